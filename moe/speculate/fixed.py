"""A controller that decides nothing: one mode, one depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe.engine.sequence import RunningSequence
from moe.speculate.draft import Choice, Draft, Judged, Mode, Round


@dataclass(frozen=True)
class FixedDepth:
    """A controller that always drafts in one mode, and as far as it may; at depth 0 it rests."""

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

    def rested(self, batch: int, seconds: Sequence[float]) -> None:
        return None

    def needs_offers(self, batch: int) -> bool:
        return self.mode.source != "elastic"

    def passed(self, batch: int, seconds: float) -> None:
        return None

    def took(self, batch: int, tokens: int, seconds: float) -> None:
        return None

    def hear(self, sequence: RunningSequence, mode: Mode, judged: Sequence[Judged]) -> None:
        return None

    def goes_on(self, mode: Mode, confidence: Sequence[float]) -> bool:
        return True

    def keep(self, mode: Mode, confidence: Sequence[float]) -> int:
        return len(confidence)

    def observe(self, round: Round) -> None:
        return None

    def figures(self) -> None:
        return None
