"""How soon units are asked for next, by a small network that `moe calibrate` has fitted.

It goes by what was asked for of late, by what the policy that learns on the way says, and by what
the routers gave to all experts: who was nearly chosen is soon asked for. Its answer is `DISCOUNT`
to the power of the visits of the unit's layer until then, 0 to 1. Legend as in
offload/policies/heard.py; C context, T rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from offload.policies.heard import HALF_LIVES, Heard
from routing.predict.base import Floats, floats
from routing.predict.gate import sigmoid

DISCOUNT = 0.85
"""What a use is worth that comes a visit of its layer later."""
CORRECTION = 0.05
"""How much of an error corrects a unit's log-odds."""
SPEAKS = 8
"""Times a pass over the layers that all units are valued anew; in between, those of the layers that
have been."""


@dataclass(frozen=True)
class NextUse:
    """What was fitted, float32.

    Attributes:
        num_experts: E of each layer.
        gates, gate_bias: ``(L, W, H)`` and ``(L, W)``, what routers multiply rows by, and add.
        usual: ``(L, W)``, how often each unit is asked for.
        shares: ``(F + 1, L, L)``, of each memory, and of the policy that learns on the way, what
            its log-odds count, by the layer that has been and the unit's.
        up, up_bias: ``(C, D)`` and ``(D,)``, from the context to hidden units.
        down, down_bias: ``(L, W, D)`` and ``(L, W)``, from these to log-odds.
    """

    num_experts: tuple[int, ...]
    gates: Floats
    gate_bias: Floats
    usual: Floats
    shares: Floats
    up: Floats
    up_bias: Floats
    down: Floats
    down_bias: Floats

    def scores(self, layer: int, rows: Floats) -> Floats:
        """``(..., E)``, what a layer's router gives to rows ``(..., H)``."""
        experts = self.num_experts[layer]
        found: Floats = rows @ self.gates[layer, :experts].T + self.gate_bias[layer, :experts]
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, as they are kept in a file: float16."""
        return {name: torch.from_numpy(getattr(self, name)).half() for name in _ARRAYS}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], num_experts: Sequence[int]) -> NextUse:
        """From `tensors`. LookupError or ValueError where they are not whole, or are for other
        layers than of so many experts each."""
        made = cls(tuple(num_experts), **{name: floats(tensors[name]) for name in _ARRAYS})
        layers, width, (size,) = len(num_experts), max(num_experts), made.up_bias.shape
        hidden = made.gates.shape[-1]
        shapes = {
            "gates": (layers, width, hidden),
            "gate_bias": (layers, width),
            "usual": (layers, width),
            "shares": (len(HALF_LIVES) + 1, layers, layers),
            "up": (2 * layers * width + hidden + layers, size),
            "down": (layers, width, size),
            "down_bias": (layers, width),
        }
        for name, shape in shapes.items():
            array = getattr(made, name)
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"{name} of {array.shape} is no finite {shape}")
        return made


_ARRAYS = tuple(field.name for field in fields(NextUse) if field.name != "num_experts")


class Foresight:
    """The network at work beside a cache.

    It corrects each unit's log-odds by what it was wrong by before, so that a text with favourites
    of its own is followed. What hidden units sum up is changed by what is new, not summed anew.

    Args:
        learnt: what it goes by.
    """

    def __init__(self, learnt: NextUse) -> None:
        layers, width = learnt.usual.shape
        self._learnt, self._heard = learnt, Heard(learnt.usual, learnt.gates.shape[-1])
        ends = np.cumsum([layers * width, layers * width, learnt.gates.shape[-1]])
        now, before, self._up_row, self._up_layer = np.split(learnt.up, ends)
        self._up_now, self._up_before = (own.reshape(layers, width, -1) for own in (now, before))
        self._sums = learnt.up_bias.copy()
        self._drift, self._soon = np.zeros_like(learnt.usual), learnt.usual.copy()
        self._news: dict[int, Sequence[int]] = {}  # experts by layer, since units were valued
        self._period, self._rest, self._rows = max(1, layers // SPEAKS), 0, 0

    @property
    def speaks(self) -> bool:
        """Whether one row came last: the token of one sequence, so what was heard leads to the
        next."""
        return self._rows == 1

    def hear(self, layer: int, rows: Tensor) -> None:
        """A layer's router has read rows ``(T, H)``; the last is the latest of its sequence."""
        row = floats(rows[-1])
        self.listen(layer, self._learnt.scores(layer, row), row)
        self._rows = len(rows)

    def listen(self, layer: int, scores: Floats, row: Floats) -> None:
        """The same of one row ``(H,)``, with what the router gave it, ``(E,)``."""
        heard, self._rows = self._heard, 1
        older, last = heard.before[layer].copy(), heard.row.copy()
        heard.listen(layer, scores, row)
        before = heard.before[layer]
        self._sums += (heard.scores[layer] - before) @ self._up_now[layer]
        self._sums += (before - older) @ self._up_before[layer]
        if layer == len(heard.scores) - 1:
            self._sums += (heard.row - last) @ self._up_row

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        """It asks for these."""
        self._heard.visit(layer, experts)
        self._news[layer] = experts
        self._rest -= 1

    def soon(self, learning: Floats) -> Floats:
        """``(L, W)``: how soon each unit is asked for; the next call may write over it.

        Args:
            learning: ``(L, W)`` log-odds by who learns on the way.
        """
        been = list(self._news)
        if self._rest <= 0:
            self._rest, layers = self._period, list(range(len(self._soon)))
        else:
            layers = been
        odds = self._odds(layers, learning)
        for layer in been:
            self._correct(layer, odds[layers.index(layer)])
        self._news.clear()
        self._soon[layers] = sigmoid(odds + self._drift[layers])
        return self._soon

    def tail(self, layer: int, expert: int) -> float:
        """What a unit's uses are worth whose next is not at once, as of the last `soon`."""
        return DISCOUNT * float(self._soon[layer, expert])

    def _odds(self, layers: list[int], learning: Floats) -> Floats:
        """``(layers, W)`` by the network."""
        learnt, heard = self._learnt, self._heard
        shares = learnt.shares[:, heard.layer, layers, None]
        said = np.concatenate([heard.memories[:, layers], learning[None, layers]])
        hidden = gelu(self._sums + self._up_layer[heard.layer])
        odds: Floats = np.add.reduce(shares * said) + learnt.down_bias[layers]
        odds += learnt.down[layers] @ hidden
        return odds

    def _correct(self, layer: int, odds: Floats) -> None:
        """By what has come: a use now, else as soon as is now believed (temporal difference)."""
        drift, target = self._drift[layer], DISCOUNT * sigmoid(odds + self._drift[layer])
        target[self._news[layer]] = 1
        drift += CORRECTION * (target - self._soon[layer])


def gelu(x: Floats) -> Floats:
    """By tanh, as the network learns with."""
    found: Floats = 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + 0.044715 * x * x * x)))
    return found
