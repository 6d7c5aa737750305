"""What drafts that cost nothing to make would have brought, judged on tokens that came anyway."""

from __future__ import annotations

from collections.abc import Iterable

from moe.speculate.draft import Mode

LEAST = 0.03
"""Plain steps that looking for drafts in every step takes at least."""
FOLLOW = 0.2
MEMORY = 64
"""Verifications that are remembered of each mode."""


class Paper:
    """Mean gain of each model-free mode, in tokens a verification."""

    def __init__(self) -> None:
        self._gains: dict[Mode, tuple[int, float]] = {}
        self._price = 0.0

    def looked(self, price: float) -> None:
        """A step that looked and found nothing took so many plain steps longer than one; 0 where
        nobody looks in every step: what it took before may be forgotten."""
        self._price += FOLLOW * (price - self._price)

    def note(self, mode: Mode, gain: float) -> None:
        """Of one verification: accepted tokens less what reading all drafted ones costs."""
        seen, mean = self._gains.get(mode, (0, 0.0))
        seen = min(seen + 1, MEMORY)
        self._gains[mode] = seen, mean + (gain - mean) / seen

    def pays(self, modes: Iterable[Mode]) -> bool:
        """Whether looking for drafts of one of these modes in every step is worth it."""
        least = max(LEAST, self._price)
        return any(self._gains.get(mode, (0, 0.0))[1] > least for mode in modes)
