"""Plain steps, in some of which nobody looks for drafts: they are timed, and told of together."""

from __future__ import annotations

from moe.speculate.draft import Controller, Plain

TOLD = 4, 256
"""Steps that are told of together: twice as many each time, while the number of sequences stays and
nothing is drafted."""

LOOK = 2.0
"""Times what a look takes itself that it costs: the pass behind it, whose caches it has emptied, is
slower by about as much."""


class PlainSteps:
    """Collects them for a controller.

    Attributes:
        resting: nobody looks for drafts in this step.
    """

    def __init__(self) -> None:
        self.resting = False
        self._batch = self._left = self._looks = 0
        self._looking, self._told = 0.0, TOLD[0]
        self._seconds: list[float] = []

    def begin(self, controller: Controller, batch: int) -> bool:
        """Whether nobody looks for drafts in a step of so many sequences."""
        if self._left and batch == self._batch:
            self._left -= 1
            return True
        if batch != self._batch or len(self._seconds) >= self._told:
            self._tell(controller, batch)
        self._left = controller.rests(batch)
        self.resting = self._left > 0
        self._left -= self.resting
        return self.resting

    def over(self, seconds: float, looking: float) -> None:
        """One took so long, nan where a prompt was read in it, and looking for drafts before."""
        self._seconds.append(seconds)
        if not self.resting:
            self._looks, self._looking = self._looks + 1, self._looking + LOOK * looking

    def drafted(self) -> None:
        """A step was not plain: what plain ones take is wanted soon, to compare."""
        self._told = 2 * TOLD[0]

    def _tell(self, controller: Controller, batch: int) -> None:
        if self._seconds:
            controller.rested(Plain(self._batch, self._seconds, self._looks, self._looking))
        self._told = min(2 * self._told, TOLD[1]) if batch == self._batch else TOLD[0]
        self._batch, self._seconds, self._looks, self._looking = batch, [], 0, 0.0
