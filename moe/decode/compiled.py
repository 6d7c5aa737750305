"""The decode step of a described model, compiled: C++ runs from one stop to the next.

Where Python runs the experts, the C++ code stops at each MoE layer; where the step runs them
itself, one call computes all layers. Legend: B rows, each one new token; a sequence may have
several, at successive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import decode as native
from moe.decode.records import CompiledPass, DescriptionRecords, point_to_table
from moe.decode.step import (
    CompiledExperts,
    InsideExperts,
    RankGroup,
    RoutedExperts,
    finish_step,
)
from moe.describe.description import Description, Experts, NotDescribed, Router
from moe.network.kv_cache import KVCache, Work
from routing import Routing

PATIENCE = 0.05
"""Seconds after which C++ looks whether the process has been interrupted (SIGINT)."""
_NO_LIMIT = 1 << 62  # more positions than there are


class CompiledStep:
    """Runs a described model on the CPU; see `moe.decode.step.DecodeStep`.

    Args:
        inside: what runs the experts of each MoE layer within the step; none: only callers do.

    Raises:
        NotDescribed: the compiled step does not take a size or dtype of the description.
    """

    def __init__(
        self,
        description: Description,
        kernel: native.NativeDecode,
        inside: Sequence[CompiledExperts] = (),
    ) -> None:
        records, count = DescriptionRecords(), len(description.layers)
        self._description, self._kernel, self._kept = description, kernel, records
        self._records = (native.DecoderLayerRecord * count)(*map(records.layer, description.layers))
        self._norm, self._head = records.norm(description.norm), records.matrix(description.head)
        feeds = [layer.feed for layer in description.layers]
        self._feeds = [feed if isinstance(feed, Experts) else None for feed in feeds]
        known = [feed.router for feed in self._feeds if feed is not None]
        chosen = {router.rule.top_k for router in known if isinstance(router, Router)}
        if len(chosen) > 1:
            raise NotDescribed("layers choose different numbers of experts")
        # Of each layer, and behind the last, how many MoE layers come before it.
        self._moe_layers = [0, *accumulate(int(feed is not None) for feed in self._feeds)]
        self._top_k = max(chosen, default=0)
        self._caches = 1 + max(layer.attention.layer for layer in description.layers)
        self._reserved = 0
        self._experts, self._arrays = inside, [self._experts_array(own) for own in ((), inside)]
        self._stopping, self._whole = map(self._model, self._arrays)

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        step = self._begin(work)
        return self._finish(work, step, routed, step.go(self._stopping))

    def inside(self, work: Sequence[Work], experts: InsideExperts) -> list[Tensor]:
        """Logits; calls ``experts.passed`` for a layer before ``experts.run`` for a later one."""
        assert self._experts
        step, waits = self._begin(work), True
        while waits:
            first = self._moe_layers[step.done]
            waits = step.go(self._whole)
            at = self._moe_layers[step.done]
            for layer in range(first, at):
                experts.passed(layer, step)
            if waits:
                step.give(experts.run(at, step, self._experts[at].call))
        return finish_step(work, self._scaled(step.logits_BV))

    def in_lockstep(
        self, work: Sequence[Work], routed: RoutedExperts, group: RankGroup
    ) -> list[Tensor]:
        assert self._experts
        step = self._begin(work)
        rows, hidden = step.h_BH.shape
        all_to_all = group.native.step_address(rows, hidden, self._top_k)
        if all_to_all is None:
            return self._finish(work, step, routed, step.go(self._stopping))
        try:
            waits = group.native.run(lambda: step.go(self._whole, all_to_all))
        finally:
            group.passed(step, self._moe_layers[step.done])
        return self._finish(work, step, routed, bool(waits))

    def _finish(
        self, work: Sequence[Work], step: CompiledPass, routed: RoutedExperts, waits: bool
    ) -> list[Tensor]:
        """Logits; ``routed`` runs the experts of the layers that are left."""
        while waits:
            experts = self._feeds[step.done]
            assert experts is not None
            own = experts.router
            routing = (
                step.routing(self._moe_layers[step.done])
                if isinstance(own, Router)
                else Routing.from_router(*own.forward(step.h_BH), experts.num_experts)
            )
            step.give(routed(experts.layer, step.h_BH, routing))
            waits = step.go(self._stopping)
        return finish_step(work, self._scaled(step.logits_BV))

    def _begin(self, work: Sequence[Work]) -> CompiledPass:
        description = self._description
        x = description.embedding(
            torch.tensor([token for item in work for token in item.token_ids])
        )
        x = x * description.embedding_scale if description.embedding_scale != 1.0 else x.clone()
        h, beside = torch.empty_like(x), torch.empty_like(x)
        positions, capacities, addresses = self._places(work)
        record = native.StepRecord(
            x.shape[0], x.shape[1], self._caches, x.data_ptr(), h.data_ptr(), beside.data_ptr(),
            positions.ctypes.data, capacities.ctypes.data, addresses.ctypes.data,
            torch.get_num_threads(),
        )  # fmt: skip
        kept = x, beside, positions, capacities, addresses
        sizes = description.head.rows, self._moe_layers[-1], self._top_k
        return CompiledPass(self._kernel, record, h, *sizes, kept)

    def _scaled(self, logits: Tensor) -> Tensor:
        scale, softcap = self._description.logit_scale, self._description.logit_softcap
        if scale != 1.0:
            logits *= scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _places(self, work: Sequence[Work]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each row its position, and its caches' capacities and ``(layers, 2)`` addresses."""
        positions: list[int] = []
        capacities: list[int] = []
        addresses: list[np.ndarray] = []
        for item in work:
            cache, count = item.cache, len(item.token_ids)
            assert isinstance(cache, KVCache)
            cache.reserve(cache.length + count)
            positions += range(cache.length, cache.length + count)
            capacities += [cache.room] * count
            addresses += [cache.addresses(self._caches)] * count
        self._reserve(max(positions) + 1)
        tables = addresses[0] if len(addresses) == 1 else np.concatenate(addresses)
        return np.array(positions, np.int64), np.array(capacities, np.int64), tables

    def _reserve(self, positions: int) -> None:
        """Make the rotary tables long enough."""
        if positions <= self._reserved:
            return
        self._reserved = _NO_LIMIT
        for record, layer in zip(self._records, self._description.layers, strict=True):
            rotation = layer.attention.rotation
            if rotation is not None:
                rotation.table.reserve(positions)
                point_to_table(record.attention.rotation, rotation)
                self._reserved = min(self._reserved, rotation.table.cos.shape[0])

    def _experts_array(self, inside: Sequence[CompiledExperts]) -> Array[native.ExpertsRecord]:
        """Of each layer, for C++: which MoE layer it is, and what runs its experts there."""
        experts = (native.ExpertsRecord * len(self._feeds))()
        for record, feed, index in zip(experts, self._feeds, self._moe_layers, strict=False):
            record.index = -1 if feed is None else index
            if feed is not None and inside:
                assert feed.layer == index, feed.layer  # ranks tell each other this number
                (record.forward, record.layer, record.activation, _), slots = inside[index]
                record.slots = None if slots is None else slots.data_ptr()
        return experts

    def _model(self, experts: Array[native.ExpertsRecord]) -> native.ModelRecord:
        arrays = addressof(self._records), addressof(experts)
        ends = addressof(self._norm), addressof(self._head)
        return native.ModelRecord(*arrays, *ends, len(experts), self._top_k, PATIENCE)
