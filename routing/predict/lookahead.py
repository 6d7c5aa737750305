"""Later gates on earlier rows: what layer l reads, put into the gate of layer l + 1, l + 2, ...

A layer changes the residual stream little, so a later gate often chooses the same experts for the
rows of an earlier layer. Raw, it needs no training at all; a low-rank map fitted on calibration
rows foresees the change between the layers (the training-free relative of M2R2).
`PreAttention` does the same with the rows that come into a block, before its attention: a later
guess, and a better one; exact where a model routes before attention.
Legend: R calibration rows, T rows, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from routing.predict.base import ClueBase, Floats, Tensors, floats
from routing.predict.gate import Gate
from routing.routing import Routing

REACH = 2
"""MoE layers ahead at most: beyond, tokens alone tell as much."""

ANY_DISTANCE = 0


class Lookahead(ClueBase):
    """Gates by target layer and distance (or `ANY_DISTANCE`), for the rows that experts read."""

    reach: int | None = REACH

    def __init__(self, name: str, gates: Mapping[tuple[int, int], Gate]) -> None:
        self.name = name
        self._gates = dict(gates)
        self._layer = -1
        self._rows: Floats | None = None

    def start(self, tokens: Tensor) -> None:
        del tokens
        self._rows = None

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        del routing
        self._layer, self._rows = layer, floats(hidden_states)

    def evidence(self, layer: int, target: int) -> Floats | None:
        distance = target - layer
        if self._rows is None or layer != self._layer or not 1 <= distance <= REACH:
            return None
        gate = self._gates.get((target, distance)) or self._gates.get((target, ANY_DISTANCE))
        if gate is None:
            return None
        return gate.margins(self._rows)

    def tensors(self) -> Tensors:
        return gate_tensors({f"{t}.{d}": gate for (t, d), gate in self._gates.items()})


class PreAttention(ClueBase):
    """Gates by layer, for root-mean-square normed rows that come into the layer's block."""

    reach: int | None = 1

    def __init__(self, name: str, gates: Mapping[int, Gate]) -> None:
        self.name = name
        self._gates = dict(gates)
        self._layer = -1
        self._rows: Floats | None = None

    def start(self, tokens: Tensor) -> None:
        del tokens
        self._rows = None

    def enter(self, layer: int, hidden_states: Tensor) -> None:
        self._layer, self._rows = layer, normed(floats(hidden_states))

    def evidence(self, layer: int, target: int) -> Floats | None:
        gate = self._gates.get(target)
        if gate is None or self._rows is None or target != layer + 1 or target != self._layer:
            return None
        return gate.margins(self._rows)

    def tensors(self) -> Tensors:
        return gate_tensors({str(layer): gate for layer, gate in self._gates.items()})


def normed(rows: Floats) -> Floats:
    """Rows ``(T, H)`` divided by their root mean square."""
    squares = np.einsum("th,th->t", rows, rows)[:, None] / rows.shape[-1]
    return rows / np.sqrt(squares + np.float32(1e-6))


def gate_tensors(gates: Mapping[str, Gate]) -> Tensors:
    """All numbers of gates but for their rules."""
    return {
        f"{key}.{part}": tensor
        for key, gate in gates.items()
        for part, tensor in (("weight", gate.weight), ("bias", gate.bias), ("down", gate.down))
        if tensor is not None
    }
