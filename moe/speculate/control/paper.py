"""Whether looking for drafts in every step is worth it."""

from __future__ import annotations

LEAST = 0.05
"""Gain of a step, in plain ones, from which it is."""
MEMORY = 64
"""Steps that are remembered."""


class Paper:
    """Mean gain of a step that looks for drafts, in plain steps: measured where somebody looks, and
    elsewhere judged on tokens that came anyway."""

    def __init__(self) -> None:
        self._seen, self._gain = 0, 0.0

    def note(self, gain: float) -> None:
        """Of one step."""
        self._seen = min(self._seen + 1, MEMORY)
        self._gain += (gain - self._gain) / self._seen

    def pays(self) -> bool:
        return self._gain > LEAST
