"""What speculation has come to: plain counters for statistics, metrics and tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from moe.speculate.draft import Round


@dataclass
class ModeRecord:
    """Of one mode.

    Attributes:
        drafts: by the tokens that the model has read of them, one at least, and those it took.
        draft_bytes: of experts that draft passes read.
    """

    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)
    draft_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``acceptance`` of a position is of those whose positions before were taken."""
        drafts = dict(self.drafts)
        verified, accepted = (
            sum(draft[part] * count for draft, count in drafts.items()) for part in (0, 1)
        )
        positions = []
        reached = sum(drafts.values())
        for position in range(max((deep for deep, _ in drafts), default=0)):
            read, taken = (
                sum(count for draft, count in drafts.items() if draft[part] > position)
                for part in (0, 1)
            )
            reached = min(reached, read)
            positions.append(
                {"verified": read, "accepted": taken, "acceptance": taken / max(reached, 1)}
            )
            reached = taken
        return {
            "drafts": sum(drafts.values()),
            "verified": verified,
            "accepted": accepted,
            "acceptance": accepted / max(verified, 1),
            "by_position": positions,
            "draft_bytes": self.draft_bytes,
        }


class Report:
    """Counts steps; readable from any thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin at zero."""
        self.steps = self.sequences = self.tokens = self.rows = 0
        self.rested = self.plain = 0  # steps in which nobody looked; tokens of plain ones
        self.draft_seconds = self.verify_seconds = 0.0
        self.depths: Counter[int] = Counter()
        self.modes: dict[str, ModeRecord] = {}

    def observe(self, round: Round) -> None:
        """A step is over."""
        self.steps += 1
        self.sequences += len(round.trials)
        self.rows += round.rows
        self.draft_seconds += round.draft_seconds
        self.verify_seconds += round.verify_seconds
        for trial in round.trials:
            self.tokens += trial.accepted + 1
            self.depths[trial.drafted] += 1
            if trial.mode is not None and trial.drafted:
                self._record(trial.mode.name).drafts[trial.drafted, trial.accepted] += 1
        if not round.draft_rows:
            return
        passes = {t.mode.name for t in round.trials if t.mode and t.mode.source == "elastic"}
        for name in passes:
            self._record(name).draft_bytes += round.draft_bytes // len(passes)

    def plainly(self, batch: int, resting: bool) -> None:
        """A plain step of so many sequences; ``resting``: nobody looked for drafts."""
        self.steps += 1
        self.rested += resting
        self.plain += batch

    def figures(self) -> dict[str, Any]:
        """For JSON. ``tokens_per_verification`` is of one sequence; 1 without drafts."""
        modes = {name: record.as_dict() for name, record in sorted(self.modes.items())}
        depths, tokens = self.depths + Counter({0: self.plain}), self.tokens + self.plain
        return {
            "steps": self.steps,
            "tokens": tokens,
            "rows": self.rows + self.plain,
            "rested_steps": self.rested,
            "tokens_per_verification": tokens / max(self.sequences + self.plain, 1),
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "depths": {str(depth): count for depth, count in sorted(depths.items())},
            "modes": modes,
        }

    def _record(self, name: str) -> ModeRecord:
        if name not in self.modes:
            self.modes = {**self.modes, name: ModeRecord()}  # whoever reads may be another thread
        return self.modes[name]
