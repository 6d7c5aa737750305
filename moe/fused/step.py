"""A decode step by description, compiled: one C++ call a layer between runs of its experts, or one
for all layers where it may run them by itself.

Legend: B rows, each one new token; a sequence may have several, at successive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import decode as native
from kernels.cpu.layer import AtOnce
from moe.fused.description import Description, Experts, NotDescribed, Router
from moe.fused.records import Keeper, point
from moe.fused.reference import Visitor, read_by
from moe.kv import SequenceKV, Work
from routing import Routing

PATIENCE = 0.05
"""Seconds without a look at whether somebody wants to interrupt the process."""
_ANY = 1 << 62
"""More positions than there are."""


class FusedStep:
    """Runs a described model on the CPU.

    Args:
        inside: of each MoE layer, what `alone` runs its experts with; none: there is no `alone`.

    Raises:
        NotDescribed: the compiled step does not take a size or dtype of the description.
    """

    def __init__(
        self,
        description: Description,
        kernel: native.NativeDecode,
        inside: Sequence[AtOnce] = (),
    ) -> None:
        keeper, count = Keeper(), len(description.layers)
        self._description, self._kernel, self._keeper = description, kernel, keeper
        self._records = (native.Layer * count)(*map(keeper.layer, description.layers))
        self._norm, self._head = keeper.norm(description.norm), keeper.matrix(description.head)
        self._layers = [
            (addressof(record), layer.feed if isinstance(layer.feed, Experts) else None)
            for record, layer in zip(self._records, description.layers, strict=True)
        ]
        routers = [experts.router for _, experts in self._layers if experts is not None]
        chosen = {router.rule.top_k for router in routers if isinstance(router, Router)}
        if len(chosen) > 1:
            raise NotDescribed("layers choose different numbers of experts")
        self._num_moe_layers, self._top_k = len(routers), max(chosen, default=0)
        self._caches = 1 + max(layer.attention.layer for layer in description.layers)
        self._reserved = 0
        self._inside = inside
        self._model = self._whole() if inside else None

    def _whole(self) -> native.Model:
        layers = [experts.layer for _, experts in self._layers if experts is not None]
        assert layers == list(range(self._num_moe_layers)), layers  # C++ writes by these numbers
        experts = [self._run_by(experts) for _, experts in self._layers]
        self._experts = (native.Experts * len(experts))(*experts)
        arrays = addressof(self._records), addressof(self._experts)
        ends = addressof(self._norm), addressof(self._head)
        return native.Model(*arrays, *ends, len(experts), self._top_k, PATIENCE)

    def _run_by(self, experts: Experts | None) -> native.Experts:
        if experts is None:
            return native.Experts()
        call = self._inside[experts.layer]
        return native.Experts(call.forward, call.layer, call.activation, experts.layer)

    def __call__(self, work: Sequence[Work], visit: Visitor) -> list[Tensor]:
        """Logits as of `moe.trunk.Trunk.lanes`; the sequences grow by the tokens read."""
        step, h, _kept = self._begin(work)
        return read_by(work, self._run(addressof(step), h, visit))

    def alone(self, work: Sequence[Work]) -> tuple[list[Tensor], list[Routing]]:
        """Logits, the same bits, and of each MoE layer what was visited: nobody is asked to run
        experts."""
        assert self._model is not None
        step, h, _kept = self._begin(work)
        routed, logits = torch.empty_like(h), self._logits(h)
        ids, weights = self._room(h.shape[0])
        rows = (routed, ids, weights, logits)
        self._kernel.model(addressof(step), self._model, *(t.data_ptr() for t in rows))
        visited = [Routing(*pair) for pair in zip(ids.unbind(), weights.unbind(), strict=True)]
        return read_by(work, self._scaled(logits)), visited

    def _begin(self, work: Sequence[Work]) -> tuple[native.Step, Tensor, object]:
        """A step, the rows that its experts read, and what else must live as long."""
        description = self._description
        x = description.embedding(
            torch.tensor([token for item in work for token in item.token_ids])
        )
        x = x * description.embedding_scale if description.embedding_scale != 1.0 else x.clone()
        h, beside = torch.empty_like(x), torch.empty_like(x)
        positions, capacities, addresses = self._places(work)
        step = native.Step(
            x.shape[0], x.shape[1], self._caches, x.data_ptr(), h.data_ptr(), beside.data_ptr(),
            positions.ctypes.data, capacities.ctypes.data, addresses.ctypes.data,
            torch.get_num_threads(),
        )  # fmt: skip
        return step, h, (x, beside, positions, capacities, addresses)

    def _run(self, step: int, h: Tensor, visit: Visitor) -> Tensor:
        """Every layer and the head: ``(B, V)``."""
        run, before, routed, due = self._kernel.layer, None, None, None
        routings = zip(*(t.unbind() for t in self._room(h.shape[0])), strict=True)
        for layer, experts in self._layers:
            if experts is None:
                run(step, before, layer, due, 0, 0)
                routed = due = None
            else:
                ids, weights = next(routings)
                run(step, before, layer, due, ids.data_ptr(), weights.data_ptr())
                own = experts.router
                routing = (
                    Routing(ids, weights)
                    if isinstance(own, Router)
                    else Routing.from_router(*own.forward(h), experts.num_experts)
                )
                routed = visit(experts.layer, h, routing).contiguous()
                due = routed.data_ptr()
            before = layer
        logits = self._logits(h)
        assert before is not None
        norm, head = addressof(self._norm), addressof(self._head)
        self._kernel.head(step, before, due, norm, head, logits.data_ptr())
        return self._scaled(logits)

    def _logits(self, h: Tensor) -> Tensor:
        return torch.empty(h.shape[0], self._description.head.rows, dtype=torch.float32)

    def _scaled(self, logits: Tensor) -> Tensor:
        scale, softcap = self._description.logit_scale, self._description.logit_softcap
        if scale != 1.0:
            logits *= scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _room(self, rows: int) -> tuple[Tensor, Tensor]:
        """For ids and weights of all MoE layers: new each step, so that they may be kept."""
        shape = self._num_moe_layers, rows, self._top_k
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)

    def _places(self, work: Sequence[Work]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each row its position, and its caches' capacities and ``(layers, 2)`` addresses."""
        positions: list[int] = []
        capacities: list[int] = []
        addresses: list[np.ndarray] = []
        for item in work:
            cache, count = item.cache, len(item.token_ids)
            assert isinstance(cache, SequenceKV)
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
        self._reserved = _ANY
        for record, layer in zip(self._records, self._description.layers, strict=True):
            rotation = layer.attention.rotation
            if rotation is not None:
                rotation.table.reserve(positions)
                point(record.attention, rotation)
                self._reserved = min(self._reserved, rotation.table.cos.shape[0])
