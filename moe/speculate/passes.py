"""Drafts by passes of a network: the loop that elastic drafts and multi-token prediction share.

`PassDrafts.draft` drafts for several sequences in shared passes, one token of each a pass, as far
as each may go and `Stop` lets it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from moe.network.packed_pass import Work
from moe.sampling.batch import Proposal
from moe.sampling.sampler import Sampler
from moe.sequence import RunningSequence
from moe.speculate.draft import Draft, Mode, Stop
from routing.predict import Forecast


@dataclass
class PendingDraft:
    """An unfinished draft.

    Attributes:
        work: what the next pass reads.
        length: of its cache, to be cut back to.
    """

    work: Work
    sampler: Sampler
    depth: int
    length: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    proposals: list[Proposal | None] = field(default_factory=list)

    def take(self, logits_V: Tensor) -> None:
        """Draw one more token from ``(V,)`` logits."""
        token, proposal = self.sampler.propose(logits_V)
        chance = float(logits_V.softmax(0)[token]) if proposal is None else proposal.chance
        self.tokens.append(token)
        self.confidence.append(chance)
        self.proposals.append(proposal)
        self.work.token_ids = [token]


class PassDrafts(ABC):
    """Drafts for several sequences in shared passes.

    Attributes:
        rows: of each pass of the last draft.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    @property
    @abstractmethod
    def bytes_read(self) -> int:
        """Bytes of experts that all passes so far have read."""

    def forecast(self) -> Forecast | None:
        """The experts that verification will need; None if the passes do not tell."""
        return None

    @abstractmethod
    def _begin(
        self, mode: Mode, sequences: Sequence[RunningSequence], depths: Sequence[int]
    ) -> list[PendingDraft]:
        """A draft without tokens for each sequence."""

    @abstractmethod
    def _run(self, drafts: Sequence[PendingDraft]) -> list[Tensor]:
        """Read the work of each draft; ``(T, V)`` logits of each. May raise anything."""

    def draft(
        self,
        mode: Mode,
        sequences: Sequence[RunningSequence],
        depths: Sequence[int],
        stop: Stop,
    ) -> list[Draft]:
        """One draft for each sequence, of at most ``depths`` tokens."""
        self.rows = []
        drafts = self._begin(mode, sequences, depths)
        active = [draft for draft in drafts if draft.depth > 0]
        try:
            while active:
                self._pass(active)
                active = [
                    draft
                    for draft in active
                    if len(draft.tokens) == len(self.rows) < draft.depth
                    and stop.goes_on(draft.confidence)
                ]
        finally:
            for draft in drafts:
                draft.work.cache.cut(draft.length)
        return [
            Draft(mode, tuple(d.tokens), tuple(d.confidence), tuple(d.proposals)) for d in drafts
        ]

    def _pass(self, drafts: Sequence[PendingDraft]) -> None:
        """Draft one more token for each, except where logits are invalid."""
        self.rows.append(len(drafts))
        # Verification meets the same error and reports it to the sequences it belongs to.
        with suppress(Exception):
            for draft, rows in zip(drafts, self._run(drafts), strict=True):
                with suppress(Exception):
                    draft.take(rows[-1])
