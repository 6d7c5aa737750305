"""What a policy is: it watches what is asked for and says what each unit is worth keeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class Policy(Protocol):
    """Values units; the cache evicts the least valuable and keeps out what is worth less still.

    A unit is an expert of a layer, numbered ``layer * width + expert``.
    """

    @property
    def name(self) -> str: ...

    def touch(self, layer: int, units: Sequence[int]) -> None:
        """A call of a layer asks for these units; once a call, in the order of the layers. A layer
        waits for what comes behind this, so it takes note and learns when `values` are wanted."""
        ...

    def values(self) -> Values:
        """``(units,)``: what each unit is worth keeping now, comparable between layers. Read it
        before the next call of any method."""
        ...

    def bid(self, unit: int, probability: float) -> float:
        """What a unit that is asked for with this probability when its layer comes next is worth
        prefetching, on the scale of `values`."""
        ...
