"""What a walk computes with on a device: torch's own operations, and attention in Triton.

Nothing here reads from the device or depends on values, so that all of it can be recorded. Rows
are float32; they are rounded to the dtype of what they meet: a weight, or a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import linear_forward
from kernels.triton import attention
from moe.fused.description import (
    Attention,
    Description,
    LatentAttention,
    Projection,
    Rotation,
    View,
)
from moe.fused.inputs import Inputs
from moe.fused.parts import rotate
from moe.fused.rotary_table import RotaryTable


@dataclass(frozen=True)
class DeviceMeans:
    """See `moe.fused.walk.Means`.

    Attributes:
        inputs: of the rows at hand.
        dtype: of the trunk, and of keys and values.
    """

    inputs: Inputs
    dtype: torch.dtype

    def project(self, projection: Projection, rows: Tensor) -> Tensor:
        weight = projection.weight
        if isinstance(weight, Tensor):
            output = linear(rows.to(weight.dtype), weight)
        else:
            output = linear_forward(rows.to(self.dtype), weight)
        output = output.float()
        return output if projection.bias is None else output + projection.bias

    def turn(self, rotation: Rotation, heads: Tensor) -> Tensor:
        return rotate(rotation, heads, *self.inputs.angles[rotation.table])

    def attend(self, a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._store(a.layer, k, v)
        return attention.attend(
            self._given(q), self.inputs.places, a.layer, **_how(a.view),
            kv_heads=a.kv_heads, value_size=a.value_dim,
        )  # fmt: skip

    def attend_latent(
        self, a: LatentAttention, inward: Tensor, turned: Tensor, latent: Tensor, key: Tensor
    ) -> Tensor:
        self._store(a.layer, latent[:, None], key[:, None])
        second = self._given(turned)
        return attention.attend(
            self._given(inward), self.inputs.places, a.layer, **_how(a.view), second=second
        )

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        attention.store(self._given(keys), self._given(values), self.inputs.places, layer)

    def _given(self, states: Tensor) -> Tensor:
        return states.to(self.dtype).contiguous()


def rotary_tables(description: Description) -> list[RotaryTable]:
    """Each table that a layer turns by, once."""
    turns = [layer.attention.rotation for layer in description.layers]
    return list(dict.fromkeys(turn.table for turn in turns if turn is not None))


def _how(view: View) -> dict[str, Any]:
    return {name: getattr(view, name) for name in ("scale", "window", "softcap", "sinks")}
