"""A decode step by description, compiled: a C++ call from one run of experts to the next, or one
for all layers where it may run them by itself.

Legend: B rows, each one new token; a sequence may have several, at successive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, c_int64
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import decode as native
from kernels.cpu.interface import check_done
from kernels.cpu.streaming import LayerBuffers
from moe.decode.base import RoutedExperts, read_by
from moe.decode.compiled_experts import Company, Inside, Near
from moe.decode.records import Keeper, point
from moe.describe.description import Description, Experts, NotDescribed, RotaryTable, Router
from moe.network.kv_cache import SequenceKV, Work
from routing import Routing

# ---- A decode step on its way through C++: its rows, and how far they are.
#
# Legend: B rows, H hidden, V vocabulary, K slots.


class CompiledPass:
    """Goes from one layer whose experts the caller runs to the next.

    Args:
        record: what C++ is told of the rows.
        h_BH: what experts read, an address of the record.
        logits_size: V.
        moe_layers, top_k: for ids and weights, new in each step, so that they may be kept.
        kept: what else the record points to.

    Attributes:
        done: layers that are done.
        logits_BV: filled when all are.
    """

    def __init__(
        self,
        kernel: native.NativeDecode,
        record: native.StepRecord,
        h_BH: Tensor,
        logits_size: int,
        moe_layers: int,
        top_k: int,
        kept: object,
    ) -> None:
        count = len(h_BH)
        self._kernel, self._record, self._kept = kernel, record, kept
        self.h_BH, self._h = h_BH, h_BH.data_ptr()
        self._routed_BH = torch.empty_like(h_BH)
        self.logits_BV = torch.empty(count, logits_size, dtype=torch.float32)
        self._ids = torch.empty(moe_layers, count, top_k, dtype=torch.int64)
        self._weights = torch.empty(moe_layers, count, top_k, dtype=torch.float32)
        self._asked = self._ids.numpy()
        self._ids_of, self._weights_of = self._ids.unbind(), self._weights.unbind()
        self._done = c_int64(0)
        rows = (self._routed_BH, self._ids, self._weights, self.logits_BV)
        self._addresses = [tensor.data_ptr() for tensor in rows]

    @property
    def done(self) -> int:
        return self._done.value

    def go(self, model: native.ModelRecord, meeting: int | None = None) -> bool:
        """Whether the layer behind those that are done waits for its experts' rows.

        Args:
            meeting: see `NativeDecode.model`.
        """
        record, own = addressof(self._record), self._addresses
        return self._kernel.model(record, model, meeting, self._done, *own)

    def bring(self, rows_BH: Tensor | None) -> None:
        """The rows that are waited for; None: they are where `rows` has said."""
        if rows_BH is not None:
            self._routed_BH = rows_BH.contiguous()
            self._addresses[0] = self._routed_BH.data_ptr()
        self._done.value += 1

    def rows(self, moe_layer: int) -> LayerBuffers:
        """What the experts of a layer are called with, if its router is known to C++."""
        routed, ids, weights, _ = self._addresses
        (_, rows, top_k), first = self._ids.shape, moe_layer * self._ids_of[0].numel()
        addresses = self._h, ids + 8 * first, weights + 4 * first, routed
        return LayerBuffers(*addresses, rows, top_k, self.h_BH.shape[1], self)

    def asked(self, moe_layer: int) -> list[int]:
        """The experts of its routing, ascending and distinct."""
        return sorted(set(self._asked[moe_layer].ravel().tolist()))

    def routing(self, moe_layer: int) -> Routing:
        """Of a router known to C++."""
        return Routing(self._ids_of[moe_layer], self._weights_of[moe_layer])


# ----

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
        self._records = (native.DecoderLayerRecord * count)(*map(keeper.layer, description.layers))
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

    def _experts_by(self, inside: Sequence[Inside]) -> Array[native.ExpertsRecord]:
        """Of each layer, for C++."""
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

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Logits as of `Backbone.lanes`; the sequences grow by the tokens read."""
        going = self._begin(work)
        return self._finish(work, going, routed, going.go(self._asking))

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

    def together(
        self, work: Sequence[Work], routed: RoutedExperts, company: Company
    ) -> list[Tensor]:
        """Logits, the same bits, with experts that ranks share; ``routed`` is asked from where the
        others do something else than before."""
        assert self._inside
        going = self._begin(work)
        rows, hidden = going.h_BH.shape
        meeting = company.meeting(rows, hidden, self._top_k)
        if meeting is None:
            return self._finish(work, going, routed, going.go(self._asking))
        try:
            waits = company.run(lambda: going.go(self._whole, meeting))
        finally:
            met = range(self._moe_layers[going.done])
            company.met([going.routing(layer) for layer in met])
        return self._finish(work, going, routed, bool(waits))

    def _finish(
        self, work: Sequence[Work], going: CompiledPass, routed: RoutedExperts, waits: bool
    ) -> list[Tensor]:
        """Logits; ``routed`` is asked for all rows that are waited for."""
        while waits:
            experts = self._feeds[going.done]
            assert experts is not None
            own = experts.router
            routing = (
                going.routing(self._moe_layers[going.done])
                if isinstance(own, Router)
                else Routing.from_router(*own.forward(going.h_BH), experts.num_experts)
            )
            going.bring(routed(experts.layer, going.h_BH, routing))
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


# ---- What changes from step to step, in two tensors that never move, so that recorded work finds
# it.
#
# Legend: B rows a recording was made for, C caches (one a layer).

_TOKEN, _POSITION, _PLACES = 0, 1, 3
_PADDING = -1


class Inputs:
    """Tokens, places and angles of at most ``rows`` rows; the others are padding.

    Attributes:
        tokens: ``(B,)`` int64, 0 in padding.
        places: ``(B, 2 + 2 C)`` int64, as `kernels.triton.attention` reads it; padding has the
            position -1.
        angles: of each rotary table ``(B, size / 2)`` cosines and sines.
    """

    def __init__(
        self, rows: int, caches: int, tables: Sequence[RotaryTable], device: torch.device
    ) -> None:
        self._caches, self._tables = caches, list(tables)
        sizes = [table.cos.shape[1] for table in tables for _ in range(2)]
        self._numbers = torch.zeros(rows, _PLACES + 2 * caches, dtype=torch.int64, device=device)
        self._floats = torch.zeros(rows, sum(sizes), device=device)
        self.tokens = self._numbers[:, _TOKEN]
        self.places = self._numbers[:, _POSITION:]
        parts = iter(self._floats.split(sizes, 1))
        self.angles = dict(zip(self._tables, zip(parts, parts, strict=True), strict=True))
        self.fill([])

    @property
    def padding(self) -> Tensor:
        """``(B,)`` bool."""
        return self.places[:, 0] < 0

    def fill(self, work: Sequence[Work]) -> None:
        """Put new tokens and where their sequences are in place, without waiting for the device."""
        numbers = np.zeros(tuple(self._numbers.shape), np.int64)
        numbers[:, _POSITION] = _PADDING
        begin = 0
        for item in work:
            cache, count = item.cache, len(item.token_ids)
            assert isinstance(cache, SequenceKV)
            cache.reserve(cache.length + count)
            own = numbers[begin : begin + count]
            own[:, _TOKEN] = item.token_ids
            own[:, _POSITION] = np.arange(cache.length, cache.length + count)
            own[:, _POSITION + 1] = cache.room
            own[:, _PLACES:] = cache.addresses(self._caches).reshape(-1)
            begin += count
        _send(self._numbers, torch.from_numpy(numbers))
        self._turn(torch.from_numpy(numbers[:begin, _POSITION]))

    def _turn(self, positions: Tensor) -> None:
        if not len(positions) or not self._tables:
            return
        floats = torch.zeros(tuple(self._floats.shape))
        begin = 0
        for table in self._tables:
            table.reserve(int(positions.max()) + 1)
            for values in (table.cos, table.sin):
                end = begin + values.shape[1]
                floats[: len(positions), begin:end] = values[positions]
                begin = end
        _send(self._floats, floats)


def _send(to: Tensor, values: Tensor) -> None:
    # torch keeps a pinned block from being used again until the device has read it.
    to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)
