"""A decode step by description, compiled: a C++ call from one run of experts to the next, or one
for all layers where it may run them by itself.

Legend: B rows, each one new token; a sequence may have several, at successive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import decode as native
from kernels.cpu.calls import check_done
from moe.fused.base import Visitor, read_by
from moe.fused.compiled import CompiledPass
from moe.fused.description import Description, Experts, NotDescribed, Router
from moe.fused.records import Keeper, point
from moe.fused.resident import Company, Inside, Near
from moe.kv import SequenceKV, Work
from routing import Routing

PATIENCE = 0.05
"""Seconds without a look at whether somebody wants to interrupt the process."""
_ANY = 1 << 62
"""More positions than there are."""


class FusedStep:
    """Runs a described model on the CPU.

    Args:
        inside: of each MoE layer, what runs its experts within the step; none: only callers do.

    Raises:
        NotDescribed: the compiled step does not take a size or dtype of the description.
    """

    def __init__(
        self,
        description: Description,
        kernel: native.NativeDecode,
        inside: Sequence[Inside] = (),
    ) -> None:
        keeper, count = Keeper(), len(description.layers)
        self._description, self._kernel, self._keeper = description, kernel, keeper
        self._records = (native.Layer * count)(*map(keeper.layer, description.layers))
        self._norm, self._head = keeper.norm(description.norm), keeper.matrix(description.head)
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
        self._inside, self._experts = inside, [self._experts_by(way) for way in ((), inside)]
        self._asking, self._whole = map(self._model, self._experts)

    def _experts_by(self, inside: Sequence[Inside]) -> Array[native.Experts]:
        """Of each layer, for C++."""
        experts = (native.Experts * len(self._feeds))()
        for record, feed, index in zip(experts, self._feeds, self._moe_layers, strict=False):
            record.index = -1 if feed is None else index
            if feed is not None and inside:
                assert feed.layer == index, feed.layer  # ranks tell each other this number
                (record.forward, record.layer, record.activation, _), slots = inside[index]
                record.slots = None if slots is None else slots.data_ptr()
        return experts

    def _model(self, experts: Array[native.Experts]) -> native.Model:
        arrays = addressof(self._records), addressof(experts)
        ends = addressof(self._norm), addressof(self._head)
        return native.Model(*arrays, *ends, len(experts), self._top_k, PATIENCE)

    def __call__(self, work: Sequence[Work], visit: Visitor) -> list[Tensor]:
        """Logits as of `moe.trunk.Trunk.lanes`; the sequences grow by the tokens read."""
        going = self._begin(work)
        return self._finish(work, going, visit, going.go(self._asking))

    def nearby(self, work: Sequence[Work], near: Near) -> list[Tensor]:
        """The same, of experts in a cache: layers that lack none are passed, and told of before
        any behind them; at the others it waits for what they lack."""
        assert self._inside
        going, waits = self._begin(work), True
        while waits:
            first = self._moe_layers[going.done]
            waits = going.go(self._whole)
            at = self._moe_layers[going.done]
            for layer in range(first, at):
                near.passed(layer, going.asked(layer), going.routing(layer))
            if waits:
                asked, routing = going.asked(at), going.routing(at)
                going.bring(near.run(at, asked, going.rows(at), going.h_BH, routing))
        return read_by(work, self._scaled(going.logits_BV))

    def alone(self, work: Sequence[Work]) -> tuple[list[Tensor], list[Routing]]:
        """Logits, the same bits, and of each MoE layer what was visited: nobody is asked to run
        experts."""
        assert self._inside
        going = self._begin(work)
        if going.go(self._whole):
            check_done(0)  # a router's ids are in range: only memory can lack
        visited = [going.routing(layer) for layer in range(self._moe_layers[-1])]
        return read_by(work, self._scaled(going.logits_BV)), visited

    def together(self, work: Sequence[Work], visit: Visitor, company: Company) -> list[Tensor]:
        """Logits, the same bits, with experts that ranks share; ``visit`` is asked from where the
        others do something else than before."""
        assert self._inside
        going = self._begin(work)
        rows, hidden = going.h_BH.shape
        meeting = company.meeting(rows, hidden, self._top_k)
        if meeting is None:
            return self._finish(work, going, visit, going.go(self._asking))
        try:
            waits = company.run(lambda: going.go(self._whole, meeting))
        finally:
            met = range(self._moe_layers[going.done])
            company.met([going.routing(layer) for layer in met])
        return self._finish(work, going, visit, bool(waits))

    def _finish(
        self, work: Sequence[Work], going: CompiledPass, visit: Visitor, waits: bool
    ) -> list[Tensor]:
        """Logits; ``visit`` is asked for all rows that are waited for."""
        while waits:
            experts = self._feeds[going.done]
            assert experts is not None
            own = experts.router
            routing = (
                going.routing(self._moe_layers[going.done])
                if isinstance(own, Router)
                else Routing.from_router(*own.forward(going.h_BH), experts.num_experts)
            )
            going.bring(visit(experts.layer, going.h_BH, routing))
            waits = going.go(self._asking)
        return read_by(work, self._scaled(going.logits_BV))

    def _begin(self, work: Sequence[Work]) -> CompiledPass:
        description = self._description
        x = description.embedding(
            torch.tensor([token for item in work for token in item.token_ids])
        )
        x = x * description.embedding_scale if description.embedding_scale != 1.0 else x.clone()
        h, beside = torch.empty_like(x), torch.empty_like(x)
        positions, capacities, addresses = self._places(work)
        record = native.Step(
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
                point(record.attention.rotation, rotation)
                self._reserved = min(self._reserved, rotation.table.cos.shape[0])
