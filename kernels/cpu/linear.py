"""Linear layers of whole weights by the compiled library; `kernels/cpu/linear.cpp` says how."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.calls import DTYPES, NUMBER, POINTER, SIZE, declare


class NativeLinear:
    """``x W^T + b`` in float32 (bf16 meets bf16 in the CPU's pair products, where it has them)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        matrix = POINTER, NUMBER
        arguments = *matrix, *matrix, POINTER, SIZE, SIZE, SIZE, POINTER, NUMBER
        declare(library, {"moe_linear": (None, arguments)})
        self._linear = library.moe_linear

    @staticmethod
    def supports(x: Tensor, weight: Tensor) -> bool:
        """Whether the library reads such activations and weights."""
        return (
            x.device.type == weight.device.type == "cpu"
            and x.dtype in (torch.float32, torch.bfloat16)
            and weight.dtype in DTYPES
            and weight.is_contiguous()
            and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        )

    def linear(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """``(..., N)`` of ``(..., K)``, in x's dtype.

        A row's bits depend neither on the other rows of the call nor on the number of threads.
        """
        (width, columns), x = weight_NK.shape, x.contiguous()
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
        bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        self._linear(
            x.data_ptr(), DTYPES[x.dtype], weight_NK.data_ptr(), DTYPES[weight_NK.dtype],
            None if bias_N is None else bias_N.data_ptr(), x.numel() // columns, width, columns,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out
