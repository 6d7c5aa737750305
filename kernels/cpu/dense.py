"""Attention of a prompt by the compiled library; `kernels/cpu/attention.cpp` says how.

Legend: T new tokens, L tokens of the sequence with them, Q query heads, N key/value heads, D key
size, V value size.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from kernels.cpu.decode import HeadsRecord, NormRecord
from kernels.cpu.interface import DTYPES, NUMBER, POINTER, SIZE, check_done, declare
from kernels.cpu.records import Record


class _AttendRecord(Record, struct="Attend"):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "begin", "sinks")),
        *(
            (f"{tensor}_{step}", ctypes.c_int64)
            for tensor in ("q", "k", "v")
            for step in ("head", "row")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "kv_heads", "key_size", "value_size", "queries", "keys")
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class NativeAttention:
    """Attention of one sequence's new tokens in float32, without a matrix of scores."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, {"moe_attend": (NUMBER, (POINTER, NUMBER))})
        self._attend = library.moe_attend

    @staticmethod
    def supports(*tensors: Tensor) -> bool:
        """Whether the library reads such queries, keys and values where they lie."""
        return all(
            t.device.type == "cpu"
            and t.dtype == torch.float32
            and t.stride(-1) == 1
            and not (t.requires_grad and torch.is_grad_enabled())
            for t in tensors
        )

    def attend(
        self,
        q_QTD: Tensor,
        k_NLD: Tensor,
        v_NLV: Tensor,
        first_T: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """``(T, Q, V)``: each of the last T tokens attends to all keys from ``first_T`` to its own.

        A row's bits do not depend on which other rows are in the call.

        Args:
            first_T: int64, of each token the first key that it sees, at most its own position.
            softcap: scores s become ``softcap * tanh(s / softcap)`` after scaling.
            sinks_Q: scores of one more key of each head, which has no value.
        """
        (heads, queries, size), (kv_heads, keys, _) = q_QTD.shape, k_NLD.shape
        out_TQV = torch.empty(queries, heads, v_NLV.shape[-1], dtype=torch.float32)
        sinks_Q = None if sinks_Q is None else sinks_Q.detach().float().contiguous()
        first_T = first_T.contiguous()
        record = _AttendRecord(
            q_QTD.data_ptr(), k_NLD.data_ptr(), v_NLV.data_ptr(), out_TQV.data_ptr(),
            first_T.data_ptr(), None if sinks_Q is None else sinks_Q.data_ptr(),
            *q_QTD.stride()[:2], *k_NLD.stride()[:2], *v_NLV.stride()[:2],
            heads, kv_heads, size, v_NLV.shape[-1], queries, keys, scale, softcap or 0.0,
        )  # fmt: skip
        check_done(self._attend(ctypes.addressof(record), torch.get_num_threads()))
        return out_TQV


# ---- Linear layers of whole weights by the compiled library; `kernels/cpu/linear.cpp` says how.


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


# ---- What happens to a prompt's rows between products, compiled; `kernels/cpu/norms.h` says
# what.
#
# The plain references are `apply_norm` and `rotate` of moe/describe/parts.py. Legend: T rows, H
# hidden.


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

    def norm(self, norm: NormRecord, x: Tensor) -> Tensor:
        """Of each row of ``(..., H)``."""
        x, width = x.contiguous(), x.shape[-1]
        out, threads = torch.empty_like(x), torch.get_num_threads()
        rows = x.numel() // width
        self._norm(addressof(norm), x.data_ptr(), rows, width, out.data_ptr(), threads)
        return out

    def turn(self, heads: HeadsRecord, rows: Tensor, positions_T: Tensor) -> None:
        """Bring contiguous rows, ``T * heads * size`` numbers, to their positions, in place."""
        assert rows.is_contiguous()
        count, threads = len(positions_T), torch.get_num_threads()
        self._turn(addressof(heads), rows.data_ptr(), positions_T.data_ptr(), count, threads)
