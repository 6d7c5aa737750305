"""Prompts on a GPU through the layers of a description: Python starts each launch, none waits.

All rows of a pass are one packed matrix. A walk of the description (`moe.decode.reference`) takes
eight launches a layer beside its experts, where transformers' modules take some 150. Legend: T rows
of a pass, Q query heads, R latent size, V size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.triton.attention import KeyRows
from moe.decode.device_operations import DeviceOperations, first_keys
from moe.decode.reference import Halt, Normed, walk
from moe.decode.step import RoutedExperts, finish_step
from moe.describe.description import Attention, Description, LatentAttention, RotaryTable
from moe.kv.blocks import BlockKVCache
from moe.kv.device_blocks import WIDEST, DeviceBlocks, DevicePass
from moe.network.lanes import ExpertCall, ExpertsRunner, call_experts
from moe.network.packed_pass import Work, put_ahead
from moe.settings.device import to_device

EXPANDED_BYTES = 256 << 20
"""Most bytes of keys and values of latents at a time, unless one head's take more."""


class DevicePrompts:
    """Reads prompts, or parts of them, by a description whose tensors are on a device.

    Args:
        description: see `moe.decode.recorded`.
        memory: of the blocks of all sequences.
    """

    def __init__(self, description: Description, memory: DeviceBlocks) -> None:
        self._description, self._memory = description, memory
        self._angles = DeviceAngles(memory.device)

    @property
    def description(self) -> Description:
        """The description that it computes."""
        return self._description

    @property
    def why_not(self) -> str:
        """Why it cannot read prompts; empty if it can."""
        attentions = [layer.attention for layer in self._description.layers]
        tables = [each.rotation.table for each in attentions if each.rotation is not None]
        if any(table.of_length for table in tables):
            return "rotary tables that depend on the length"
        if any(max(_head_sizes(each)) > WIDEST for each in attentions):
            return f"heads of more than {WIDEST} numbers"
        return ""

    @torch.inference_mode()
    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Logits of each piece of work (`moe.network.backbone.Backbone.lanes`); calls ``routed``
        at every MoE layer."""
        return self._read(work, lambda halt: routed(halt.layer, halt.rows.rounded, halt.routing))

    @torch.inference_mode()
    def in_lane(self, work: Sequence[Work], run_experts: ExpertsRunner) -> list[Tensor]:
        """The same through the running lane, as a model's own modules do it. While rows come back
        from other ranks, the shared expert runs."""

        def routed(halt: Halt) -> Tensor:
            call = ExpertCall(halt.layer, halt.rows.rounded, halt.routing, beside=halt.beside)
            return call_experts(call, run_experts)

        return self._read(work, routed)

    def _read(self, work: Sequence[Work], routed: Callable[[Halt], Tensor]) -> list[Tensor]:
        inputs = PromptInputs(work, self._description, self._memory, self._angles)
        hidden = list[Tensor]()

        def last(rows: Normed) -> Normed:
            hidden.append(rows.rounded)
            wanted = inputs.wanted
            return rows if wanted is None else Normed(rows.exact[wanted], rows.rounded[wanted])

        operations = PromptOperations(inputs, self._memory)
        steps, answer = walk(self._description, inputs.tokens, operations, last=last), None
        while True:
            try:
                halt = steps.send(answer)  # type: ignore[arg-type]  # None begins
            except StopIteration as end:
                return finish_step(work, end.value, *hidden)
            answer = routed(halt)


class DeviceAngles:
    """Rotary tables on a device. A table is sent when it has no row yet for a position that is
    asked for; it doubles then, so that few passes send any."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._sent = device, dict[RotaryTable, tuple[Tensor, Tensor]]()

    def at(self, table: RotaryTable, positions: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """``(T, size / 2)`` float32 cosines and sines of ``(T,)`` positions below ``most``, which
        are on the device."""
        known = self._sent.get(table)
        if known is None or len(known[0]) < most:
            table.reserve(most)
            known = to_device(table.cos, self._device), to_device(table.sin, self._device)
            self._sent[table] = known
        cos, sin = known
        return cos.index_select(0, positions), sin.index_select(0, positions)


class PromptInputs:
    """The inputs that all layers of a pass read of its rows; see `GraphInputs`.

    Attributes:
        tokens: ``(T,)`` int64.
        places: of the keys and values.
        wanted: int64 rows whose logits are wanted; None: all.
        firsts, angles: as `GraphInputs` has them.
    """

    logits: Tensor | None = None

    def __init__(
        self,
        work: Sequence[Work],
        description: Description,
        memory: DeviceBlocks,
        angles: DeviceAngles,
    ) -> None:
        device, attentions = memory.device, [layer.attention for layer in description.layers]
        caches = [item.cache for item in work if isinstance(item.cache, BlockKVCache)]
        sizes = [len(item.token_ids) for item in work]
        self.places = DevicePass(memory, caches, sizes)
        for a in attentions:
            self.places.give_shape(a.layer, a.cache_shape)
        ids = np.array([token for item in work for token in item.token_ids], np.int64)
        at = self.places.positions
        self.tokens, positions = to_device(np.stack([ids, at]), device)
        self.slots = self.places.slots
        put_ahead(work, self.tokens)
        ends = np.cumsum(sizes)
        pieces = zip(work, sizes, ends, strict=True)
        parts = [np.arange(b - n if item.all_logits else b - 1, b) for item, n, b in pieces]
        wanted = np.concatenate(parts)
        self.wanted = None if len(wanted) == len(ids) else to_device(wanted, device)
        reaches = sorted({a.view.span for a in attentions})
        firsts = np.stack([first_keys(reach, at) for reach in reaches]).astype(np.int32)
        self.firsts = dict(zip(reaches, to_device(firsts, device), strict=True))
        tables = dict.fromkeys(a.rotation.table for a in attentions if a.rotation is not None)
        most = int(at.max()) + 1
        self.angles = {table: angles.at(table, positions, most) for table in tables}

    def attend(self, query: Tensor, rows: KeyRows, firsts: Tensor, **how: Any) -> Tensor:
        """See `RowInputs`; of rows that do not lie in blocks, those of all tokens in order."""
        if rows.keys.ndim == 4:
            rows = rows._replace(tables=self.places.tables)
        return self.places.attend_rows(query, rows, firsts, **how)


@dataclass(frozen=True)
class PromptOperations(DeviceOperations):
    """`DeviceOperations` on many rows of a sequence."""

    inputs: PromptInputs

    def _attend_latents(
        self, a: LatentAttention, plain: Tensor, turned: Tensor, own: KeyRows
    ) -> Tensor:
        """Latents of all tokens become keys and values of each head: many queries meet each, which
        then cost a third of what meeting latents costs. Some heads at a time, as tokens may be as
        many as the context."""
        assert own.values is not None
        dtype = self.memory.dtype
        latents, beside = map(self.inputs.places.history, (own.keys, own.values))
        head_bytes = len(latents) * (a.plain_dim + a.value_dim) * a.kv_b.itemsize
        most = max(1, EXPANDED_BYTES // head_bytes)
        latents, parts = latents.to(a.kv_b.dtype), []
        for first in range(0, a.heads, most):
            heads = slice(first, first + most)
            matrix = a.kv_b[heads]
            made = linear(latents, matrix.flatten(0, 1)).to(dtype)
            made = made.unflatten(1, (len(matrix), -1)).transpose(0, 1)
            keys, values = made[..., : a.plain_dim], made[..., a.plain_dim :]
            rows = KeyRows(keys, values, beside.expand(len(matrix), -1, -1))
            view = replace(a.view, sinks=None if a.view.sinks is None else a.view.sinks[heads])
            query, second = plain[:, heads].to(dtype), turned[:, heads]
            parts.append(self._attend(query, rows, view, self._dtype_of(a.o.weight), second))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _head_sizes(a: Attention | LatentAttention) -> tuple[int, int]:
    """Return the sizes of a key and a value, as prompts meet them."""
    if isinstance(a, LatentAttention):
        return a.plain_dim, a.value_dim
    return a.head_dim, a.value_dim
