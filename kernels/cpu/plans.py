"""What C++ needs to know of matrices and layers of bit planes: records of addresses and sizes.

A plan is made once for each object: its tensors must stay where they are. What they hold may change
(slots of an expert cache, see offload/).

Shape legend as in kernels/reference.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.activation import Activation, recognise
from kernels.plane_weights import PlaneMatrix, QuantizedExperts
from kernels.planes import PLANE_BITS


class MatrixRecord(ctypes.Structure):
    """`PlaneMatrix` of kernels/cpu/panel.h."""

    _fields_ = (
        ("plane", ctypes.c_void_p * len(PLANE_BITS)),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group_size", ctypes.c_int32),
        ("planes", ctypes.c_int32),
    )


class LayerRecord(ctypes.Structure):
    """`QuantizedLayer` of kernels/cpu/quantized.h."""

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

    record: MatrixRecord
    bias: int | None
    kept: Tensor | None


@dataclass(frozen=True)
class LayerPlan:
    """A layer for C++; `kept` must stay alive. No activation: one that C++ does not know."""

    record: LayerRecord
    activation: Activation | None
    kept: tuple[Tensor | None, ...]


def plan_matrix(matrix: PlaneMatrix) -> MatrixPlan:
    """Addresses and sizes of a matrix."""
    layout, addresses = matrix.layout, _addresses(matrix.planes, matrix.scales)
    record = MatrixRecord(
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
    record = LayerRecord(
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
