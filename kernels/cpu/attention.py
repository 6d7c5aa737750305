"""Attention of a prompt by the compiled library; `kernels/cpu/attention.cpp` says how.

Legend: T new tokens, L tokens of the sequence with them, Q query heads, N key/value heads, D key
size, V value size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.calls import NUMBER, POINTER, check_done, declare


class _Attend(ctypes.Structure):
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
        record = _Attend(
            q_QTD.data_ptr(), k_NLD.data_ptr(), v_NLV.data_ptr(), out_TQV.data_ptr(),
            first_T.data_ptr(), None if sinks_Q is None else sinks_Q.data_ptr(),
            *q_QTD.stride()[:2], *k_NLD.stride()[:2], *v_NLV.stride()[:2],
            heads, kv_heads, size, v_NLV.shape[-1], queries, keys, scale, softcap or 0.0,
        )  # fmt: skip
        check_done(self._attend(ctypes.addressof(record), torch.get_num_threads()))
        return out_TQV
