"""What one way of guessing is: evidence for each expert, before it is weighed against others'.

A clue sees the same events as a `Predictor` (`routing.predict.forecast`). What it says is any
number that grows with how likely a visit is; the `Ensemble` turns it into a probability by what
calibration has shown, alone or together with other clues.
Legend: T rows, W tokens of context, H hidden, E experts, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from routing.routing import Routing

Floats = NDArray[np.float32]

Tensors = Mapping[str, Tensor]
"""What a clue has learnt, as it is kept in a file."""


class Clue(Protocol):
    """One way of guessing.

    Attributes:
        name: as it is chosen in a profile and named in tables.
        context: W, tokens that `start` wants; 1 is only the token itself.
        reach: distances (MoE layers ahead) at which it says something new; None where what it says
            is known from the start and the same at any distance.
    """

    name: str
    context: int
    reach: int | None

    def start(self, tokens: Tensor) -> None: ...

    def enter(self, layer: int, hidden_states: Tensor) -> None: ...

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None: ...

    def evidence(self, layer: int, target: int) -> Floats | None:
        """``(T, E)`` about ``target``, asked when ``layer`` was observed last (-1: none);
        None where there is nothing to say."""
        ...

    def tensors(self) -> Tensors:
        """All that its `restore` needs."""
        ...


class ClueBase:
    """A clue that overhears everything and says nothing."""

    context = 1
    reach: int | None = None

    def start(self, tokens: Tensor) -> None:
        del tokens

    def enter(self, layer: int, hidden_states: Tensor) -> None:
        del layer, hidden_states

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        del layer, hidden_states, routing


def floats(tensor: Tensor) -> Floats:
    """The numbers of a tensor on any device, float32; shared where they are that already."""
    array: Floats = tensor.detach().float().cpu().numpy()
    return array
