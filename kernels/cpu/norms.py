"""What happens to a prompt's rows between products, compiled; `kernels/cpu/norms.h` says what.

The plain references are `apply_norm` and `rotate` of moe/fused/parts.py. Legend: T rows, H hidden.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from kernels.cpu.calls import NUMBER, POINTER, SIZE, declare
from kernels.cpu.decode import Heads, Norm


class NativeNorms:
    """A row's bits depend neither on the other rows of a call nor on the number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        norm = None, (POINTER, POINTER, SIZE, SIZE, POINTER, NUMBER)
        turn = None, (POINTER, POINTER, POINTER, SIZE, NUMBER)
        declare(library, {"moe_norm": norm, "moe_turn": turn})
        self._norm, self._turn = library.moe_norm, library.moe_turn

    @staticmethod
    def supports(x: Tensor) -> bool:
        """Whether such rows are taken."""
        kept = x.requires_grad and torch.is_grad_enabled()
        return x.device.type == "cpu" and x.dtype == torch.float32 and not kept

    def norm(self, norm: Norm, x: Tensor) -> Tensor:
        """Of each row of ``(..., H)``."""
        x, width = x.contiguous(), x.shape[-1]
        out, threads = torch.empty_like(x), torch.get_num_threads()
        rows = x.numel() // width
        self._norm(addressof(norm), x.data_ptr(), rows, width, out.data_ptr(), threads)
        return out

    def turn(self, heads: Heads, rows: Tensor, positions_T: Tensor) -> None:
        """Bring contiguous rows, ``T * heads * size`` numbers, to their positions, in place."""
        assert rows.is_contiguous()
        count, threads = len(positions_T), torch.get_num_threads()
        self._turn(addressof(heads), rows.data_ptr(), positions_T.data_ptr(), count, threads)
