"""A controller that decides nothing: one mode, one depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe.engine.sequence import RunningSequence
from moe.speculate.draft import Choice, Controller, Draft, Mode


@dataclass(frozen=True)
class FixedDepth(Controller):
    """Always drafts in one mode, and as far as it may; at depth 0 it rests."""

    mode: Mode
    depth: int

    def plan(
        self,
        sequences: Sequence[RunningSequence],
        limits: Sequence[int],
        offers: Sequence[Sequence[Draft]],
    ) -> Sequence[Choice]:
        return [Choice(self.mode, min(self.depth, limit)) for limit in limits]

    def rests(self, batch: int) -> int:
        return 0 if self.depth else 1
