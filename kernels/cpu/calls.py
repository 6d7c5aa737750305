"""What the compiled kernels' Python sides share: types, errors and records of the C interface.

Shape legend as in kernels/reference.py; A is the number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.reference import AnyExperts, id_error

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POINTER, SIZE, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_NO_MEMORY = "no memory for the scratch rows of this call; use fewer tokens at once"
Signatures = Mapping[str, tuple[object, tuple[object, ...]]]
"""Result and argument types of C functions, by name."""

_SIGNATURES: Signatures = {
    "moe_routing_numbers": (SIZE, (SIZE, SIZE)),
    "moe_route": (SIZE, (POINTER, SIZE, SIZE, POINTER, POINTER)),
    "moe_combine": (None, (*(POINTER,) * 3, *(SIZE,) * 3, POINTER, NUMBER, POINTER, NUMBER)),
    "moe_weighted_sum": (
        None,
        (POINTER, SIZE, *(POINTER,) * 3, *(SIZE,) * 3, POINTER, NUMBER, NUMBER),
    ),
}


class RoutingRecord(ctypes.Structure):
    """`Routing` of kernels/cpu/grouped.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slot", "position", "begin", "active")),
        *((name, ctypes.c_int64) for name in ("rows", "num_active")),
    )


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Tell ctypes the result and argument types of functions."""
    for name, (result, arguments) in (*_SIGNATURES.items(), *signatures.items()):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def integers(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Of 64 bits, for C++; where somebody waits, numpy's array and its address take longer."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def check_done(done: int, experts: AnyExperts | None = None) -> None:
    """Raise what a C function's result says: 0 for no memory, negative for a bad expert id."""
    if done < 0 and experts is not None:
        raise id_error(experts)
    if not done:
        raise MemoryError(_NO_MEMORY)


def weighted_sum(
    library: ctypes.CDLL,
    row_AH: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    dtype: torch.dtype,
    more_BH: Tensor,
) -> Tensor:
    """As kernels.sums.weighted_sum; all contiguous, rows and weights float32, positions int32."""
    rows, hidden = row_AH.shape
    tokens, slots = position_TK.shape
    output_TH = torch.empty(tokens, hidden, dtype=dtype)
    library.moe_weighted_sum(
        row_AH.data_ptr(),
        rows,
        more_BH.data_ptr(),
        position_TK.data_ptr(),
        weights_TK.data_ptr(),
        tokens,
        slots,
        hidden,
        output_TH.data_ptr(),
        DTYPES[dtype],
        torch.get_num_threads(),
    )
    return output_TH
