"""A decode step on its way through C++: its rows, and how far they are.

Legend: B rows, H hidden, V vocabulary, K slots.
"""

from __future__ import annotations

from ctypes import addressof, c_int64

import torch
from torch import Tensor

from kernels.cpu import decode as native
from kernels.cpu.arriving import Rows
from routing import Routing


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
        record: native.Step,
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

    def go(self, model: native.Model, meeting: int | None = None) -> bool:
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

    def rows(self, moe_layer: int) -> Rows:
        """What the experts of a layer are called with, if its router is known to C++."""
        routed, ids, weights, _ = self._addresses
        (_, rows, top_k), first = self._ids.shape, moe_layer * self._ids_of[0].numel()
        addresses = self._h, ids + 8 * first, weights + 4 * first, routed
        return Rows(*addresses, rows, top_k, self.h_BH.shape[1], self)

    def asked(self, moe_layer: int) -> list[int]:
        """The experts of its routing, ascending and distinct."""
        return sorted(set(self._asked[moe_layer].ravel().tolist()))

    def routing(self, moe_layer: int) -> Routing:
        """Of a router known to C++."""
        return Routing(self._ids_of[moe_layer], self._weights_of[moe_layer])
