"""Elastic drafts: the next tokens by the model itself, with the part of its experts that is cheap.

The same weights, the same keys and values: a draft pass writes its rows behind those of the
sequence, and when the draft is done the sequence is as long as before, so that the verification
overwrites every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from moe.engine.sequence import RunningSequence
from moe.kv import Work
from moe.lanes import run_lanes
from moe.sampling.candidates import Proposal
from moe.sampling.sampler import Sampler
from moe.speculate.draft import Draft, Mode
from moe.speculate.layers import DraftLayers
from moe.trunk import Trunk
from routing.predict import Forecast

GoesOn = Callable[[Mode, Sequence[float]], bool]
"""Whether a draft with such confidence so far is worth another token."""


@dataclass
class _Pending:
    """A draft in the making."""

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


class ElasticDrafts:
    """Drafts for several sequences in shared passes.

    Args:
        trunk: the model; sequences share its passes, so that what they wrote can be taken back.
        layers: its MoE layers, for drafts.
        foretell: hears before each further pass of a draft what the model will need by then, so
            that it is read while the pass runs.

    Attributes:
        rows: of each pass of the last draft.
    """

    def __init__(
        self,
        trunk: Trunk,
        layers: DraftLayers,
        foretell: Callable[[Forecast], None] = lambda _: None,
    ) -> None:
        assert trunk.packed
        self.layers = layers
        self.rows: list[int] = []
        self._trunk, self._foretell = trunk, foretell

    def draft(
        self,
        mode: Mode,
        sequences: Sequence[RunningSequence],
        depths: Sequence[int],
        goes_on: GoesOn,
    ) -> list[Draft]:
        """One draft for each sequence, of at most as many tokens as its depth says."""
        self.rows = []
        self.layers.begin(mode)
        drafts = [_pending(s, depth) for s, depth in zip(sequences, depths, strict=True)]
        active = [draft for draft in drafts if draft.depth > 0]
        try:
            while active:
                self._pass(active)
                active = [
                    draft
                    for draft in active
                    if len(draft.tokens) == len(self.rows) < draft.depth
                    and goes_on(mode, draft.confidence)
                ]
        finally:
            for draft in drafts:
                draft.work.cache.length = draft.length
        return [
            Draft(mode, tuple(d.tokens), tuple(d.confidence), tuple(d.proposals)) for d in drafts
        ]

    def _pass(self, drafts: Sequence[_Pending]) -> None:
        """One more token for each; none where there are no logits to draw it from."""
        share = len(self.rows) / (1 + max(draft.depth for draft in drafts))
        if share and (told := self.layers.forecast(share)) is not None:
            self._foretell(told)
        lanes = self._trunk.lanes([draft.work for draft in drafts], "decode")
        run_lanes(lanes, self.layers.run)
        self.rows.append(len(drafts))
        # Whatever is wrong here, the verification meets it too and tells those whom it concerns.
        with suppress(Exception):
            logits = [rows for lane in lanes for rows in lane.result()]
            for draft, rows in zip(drafts, logits, strict=True):
                with suppress(Exception):
                    draft.take(rows[-1])


def _pending(sequence: RunningSequence, depth: int) -> _Pending:
    assert sequence.cache is not None
    work = Work(sequence.token_ids[-1:], sequence.cache)
    return _Pending(work, sequence.sampler.fork(), depth, sequence.cache.length)
