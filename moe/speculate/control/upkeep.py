"""How often something may be done that takes time of its own."""

from __future__ import annotations

from dataclasses import dataclass

FOLLOW = 0.2
LONGEST = 1024
"""Steps that it waits at most."""


@dataclass
class Upkeep:
    """Something that is to take no more than a share of the time.

    Attributes:
        seconds: that it has taken of late.
    """

    share: float
    seconds: float = 0.0

    def took(self, seconds: float) -> None:
        self.seconds += FOLLOW * (seconds - self.seconds)

    def steps(self, step: float) -> int:
        """Steps, of ``step`` seconds, until it may be done again."""
        return int(min(self.seconds / (self.share * step), LONGEST))
