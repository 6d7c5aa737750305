"""A decode step on its way through C++: its rows, and how far they are.

Legend: B rows, H hidden, V vocabulary, K slots.
"""

from __future__ import annotations

from ctypes import addressof, c_int64

import torch
from torch import Tensor

from kernels.cpu import decode as native
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
        rows = len(h_BH)
        self._kernel, self._record, self._kept = kernel, record, kept
        self.h_BH, self._routed_BH = h_BH, torch.empty_like(h_BH)
        self.logits_BV = torch.empty(rows, logits_size, dtype=torch.float32)
        self._ids = torch.empty(moe_layers, rows, top_k, dtype=torch.int64)
        self._weights = torch.empty(moe_layers, rows, top_k, dtype=torch.float32)
        self._done = c_int64(0)

    @property
    def done(self) -> int:
        return self._done.value

    def go(self, model: native.Model, meeting: int | None = None) -> bool:
        """Whether the layer behind those that are done waits for its experts' rows.

        Args:
            meeting: see `NativeDecode.model`.
        """
        rows = (self._routed_BH, self._ids, self._weights, self.logits_BV)
        addresses = [tensor.data_ptr() for tensor in rows]
        return self._kernel.model(addressof(self._record), model, meeting, self._done, *addresses)

    def bring(self, rows_BH: Tensor) -> None:
        """The rows that are waited for."""
        self._routed_BH = rows_BH.contiguous()
        self._done.value += 1

    def routing(self, moe_layer: int) -> Routing:
        """Of a router known to C++."""
        return Routing(self._ids[moe_layer], self._weights[moe_layer])
