"""How soon units are asked for next, by a small network that `moe calibrate` has fitted.

It goes by what was asked for of late, by what the policy that learns on the way says, and by what
the routers gave to all experts: who was nearly chosen is soon asked for. Its answer is `DISCOUNT`
to the power of the visits of the unit's layer until then, 0 to 1. Legend as in
offload/policies/base.py; C context, T rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from offload.policies.base import HALF_LIVES
from routing.predict.forecast import Floats, floats

DISCOUNT = 0.85
"""What a use is worth that comes a visit of its layer later."""


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

    @property
    def arrays(self) -> dict[str, Floats]:
        """All numbers."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, as they are kept in a file: float16."""
        return {name: torch.from_numpy(array).half() for name, array in self.arrays.items()}

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
            "up_bias": (size,),
            "down": (layers, width, size),
            "down_bias": (layers, width),
        }
        for name, shape in shapes.items():
            array = getattr(made, name)
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"{name} of {array.shape} is no finite {shape}")
        return made


_ARRAYS = tuple(field.name for field in fields(NextUse) if field.name != "num_experts")
