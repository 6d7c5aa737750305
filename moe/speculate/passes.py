"""Drafts by passes of a network: what elastic drafts and multi-token prediction share.

`PassDrafts.draft` drafts for several sequences in shared passes, one token of each a pass, as far
as each may go and `Stop` lets it.

On a GPU the passes follow each other without the host: each reads the tokens of the one before it
where they were drawn, and the host reads all of them back at the end. There it applies `Stop`, so
passes behind the end of a draft are in vain. Penalties and structures need each token on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from moe.network.packed_pass import Work
from moe.sampling.batch import Proposal
from moe.sampling.drafted import DraftedTokens
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

    def draw(self, logits_V: Tensor) -> None:
        """Draw one more token from ``(V,)`` logits, which the next pass reads."""
        self.take(*self.sampler.propose(logits_V))
        self.work.token_ids = self.tokens[-1:]

    def take(self, token: int, chance: float, proposal: Proposal | None) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.confidence.append(chance)
        self.proposals.append(proposal)


class PassDrafts(ABC):
    """Drafts for several sequences in shared passes.

    Args:
        stays: drafted tokens stay on the device until the draft is done.

    Attributes:
        rows: of each pass of the last draft.
    """

    def __init__(self, *, stays: bool) -> None:
        self.rows: list[int] = []
        self._stays = stays

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

    def _read(self, numbers: Sequence[Tensor]) -> list[list[tuple[float, float]]]:
        """Read the rows of ``(B, 2)`` float64 numbers of each pass back; waits for the device
        once."""
        told = torch.cat(list(numbers)).to("cpu").numpy().tolist() if numbers else []
        rows = iter([(token, chance) for token, chance in told])
        return [list(islice(rows, own.shape[0])) for own in numbers]

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
        stays = self._stays and not any(draft.sampler.needs_tokens for draft in drafts)
        run = self._chain if stays else self._one_by_one
        run(drafts, stop)
        return [
            Draft(mode, tuple(d.tokens), tuple(d.confidence), tuple(d.proposals)) for d in drafts
        ]

    def _one_by_one(self, drafts: Sequence[PendingDraft], stop: Stop) -> None:
        """Draft; the host draws each token."""
        active = [draft for draft in drafts if draft.depth > 0]
        with _kept(drafts):
            while active:
                self.rows.append(len(active))
                # Verification meets the same error and reports it to the sequences it belongs to.
                with suppress(Exception):
                    for draft, rows in zip(active, self._run(active), strict=True):
                        with suppress(Exception):
                            draft.draw(rows[-1])
                active = [
                    draft
                    for draft in active
                    if len(draft.tokens) == len(self.rows) < draft.depth
                    and stop.goes_on(draft.confidence)
                ]

    def _chain(self, drafts: Sequence[PendingDraft], stop: Stop) -> None:
        """Draft; the tokens stay on the device until all passes have been launched."""
        made: list[tuple[list[PendingDraft], DraftedTokens]] = []
        with _kept(drafts), suppress(Exception):  # as above
            for place in range(max(draft.depth for draft in drafts)):
                active = [draft for draft in drafts if draft.depth > place]
                self.rows.append(len(active))
                logits_BV = torch.cat([rows[-1:] for rows in self._run(active)])
                drawn = DraftedTokens([draft.sampler for draft in active], logits_BV, place)
                for draft, token in zip(active, drawn.ids_B.split(1), strict=True):
                    draft.work.token_ids, draft.work.ahead = [0], token
                made.append((active, drawn))
        told = self._read([drawn.told_B2 for _, drawn in made])
        for place, ((active, drawn), pairs) in enumerate(zip(made, told, strict=True)):
            tokens = [int(token) for token, _ in pairs]
            found = zip(active, tokens, pairs, drawn.proposals(tokens), strict=True)
            for draft, token, (_, chance), proposal in found:
                goes_on = place == 0 or stop.goes_on(draft.confidence)
                if len(draft.tokens) == place and goes_on and chance == chance:
                    draft.take(token, chance, proposal)


@contextmanager
def _kept(drafts: Sequence[PendingDraft]) -> Iterator[None]:
    """Cut the caches back behind the passes."""
    try:
        yield
    finally:
        for draft in drafts:
            draft.work.cache.cut(draft.length)
