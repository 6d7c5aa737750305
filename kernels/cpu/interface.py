"""What the compiled kernels' Python sides share: types, errors and records of the C interface.

Shape legend as in kernels/reference.py; A is the number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.activation import Activation, recognise
from kernels.cpu.records import Record
from kernels.planes import PLANE_BITS, PlaneMatrix, QuantizedExperts
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


class RoutingRecord(Record, struct="Routing"):
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
    """As `weighted_sum`; all contiguous, rows and weights float32, positions int32."""
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


# ---- What C++ needs to know of matrices and layers of bit planes: records of addresses and
# sizes.
#
# A plan is made once for each object: its tensors must stay where they are. What they hold may
# change (slots of an expert cache, see offload/).
#
# Shape legend as in kernels/reference.py.


class PlaneMatrixRecord(Record, struct="PlaneMatrix"):
    _fields_ = (
        ("plane", ctypes.c_void_p * len(PLANE_BITS)),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group_size", ctypes.c_int32),
        ("planes", ctypes.c_int32),
    )


class QuantizedLayerRecord(Record, struct="QuantizedLayer"):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("blobs", "planes", "first_bias", "second_bias")),
        *((name, ctypes.c_int64) for name in ("experts", "hidden", "width")),
        *(
            (name, ctypes.c_int32)
            for name in ("first_group", "second_group", "parts", "interleaved")
        ),
    )


@dataclass(frozen=True)
class MatrixPlan:
    """A matrix for C++. `bias` is its address, `kept` what must stay alive."""

    record: PlaneMatrixRecord
    bias: int | None
    kept: Tensor | None


@dataclass(frozen=True)
class LayerPlan:
    """A layer for C++; `kept` must stay alive. No activation: one that C++ does not know."""

    record: QuantizedLayerRecord
    activation: Activation | None
    kept: tuple[Tensor | None, ...]


def plan_matrix(matrix: PlaneMatrix) -> MatrixPlan:
    """Addresses and sizes of a matrix."""
    layout, addresses = matrix.layout, _addresses(matrix.planes, matrix.scales)
    record = PlaneMatrixRecord(
        (ctypes.c_void_p * len(PLANE_BITS))(*addresses[:-1]),
        addresses[-1],
        layout.rows,
        layout.columns,
        layout.group_size,
        len(matrix.planes),
    )
    bias = None if matrix.bias is None else matrix.bias.detach().float().contiguous()
    return MatrixPlan(record, None if bias is None else bias.data_ptr(), bias)


def plan_layer(experts: QuantizedExperts) -> LayerPlan:
    """Addresses and sizes of a layer; float32 biases are used where they lie."""
    rows = [_addresses(*blobs) for blobs in zip(experts.planes, experts.scales, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    counts = torch.tensor([len(p) for p in experts.planes], dtype=torch.int32, device="cpu")
    biases = (experts.gate_up_bias_EG, experts.down_bias_EH)
    own = [None if bias is None else bias.detach().float().contiguous() for bias in biases]
    kept = table, counts, *own
    record = QuantizedLayerRecord(
        *(None if tensor is None else tensor.data_ptr() for tensor in kept),
        experts.num_experts,
        experts.hidden_size,
        experts.intermediate_size,
        experts.first.group_size,
        experts.second.group_size,
        experts.parts,
        experts.interleaved,
    )
    width, parts = experts.intermediate_size, experts.parts
    known = recognise(experts.activation, width, parts, experts.interleaved)
    return LayerPlan(record, known, kept)


def _addresses(planes: tuple[Tensor, ...], scales: Tensor) -> list[int]:
    """Of planes 0 to 3 (0 where absent) and the scales."""
    absent = [0] * (len(PLANE_BITS) - len(planes))
    return [*(plane.data_ptr() for plane in planes), *absent, scales.data_ptr()]
