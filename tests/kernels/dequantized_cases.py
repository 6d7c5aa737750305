"""Layers of bit planes beside the whole weights that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels import PlaneMatrix, QuantizedExperts
from kernels.planes import PlaneLayout, dequantize, join_matrices
from tests.kernels.kernel_cases import Case
from tests.kernels.plane_cases import first_bits, quantize_matrix


def quantize_case(
    case: Case, group_size: int, bits: Sequence[int], interleaved: bool = False
) -> tuple[QuantizedExperts, Case]:
    """The case's experts, each at its own width, and the case with those weights in float32."""
    own = case.experts
    width, hidden = own.intermediate_size, own.hidden_size
    parts = own.gate_up_EGH.shape[1] // width
    blobs, first, second = [], [], []
    for expert, wanted in enumerate(bits):
        gate_up = own.gate_up_EGH[expert].float()
        split = (
            [gate_up[part::parts] for part in range(parts)] if interleaved else gate_up.chunk(parts)
        )
        matrices = [
            first_bits(quantize_matrix(weight, group_size), wanted)
            for weight in (*split, own.down_EHF[expert].float())
        ]
        blobs.append(join_matrices(matrices))
        *projections, down = map(_whole, matrices)
        joined = torch.stack(projections, 1).flatten(0, 1) if interleaved else None
        first.append(torch.cat(projections) if joined is None else joined)
        second.append(down)
    layer = QuantizedExperts(
        PlaneLayout(width, hidden, group_size),
        parts,
        PlaneLayout(hidden, width, group_size),
        tuple(planes for planes, _ in blobs),
        tuple(scales for _, scales in blobs),
        own.activation,
        interleaved,
        own.gate_up_bias_EG,
        own.down_bias_EH,
        own.post_norm,
    )
    weights = replace(own, gate_up_EGH=torch.stack(first), down_EHF=torch.stack(second))
    return layer, replace(case, experts=weights)


def _whole(matrix: PlaneMatrix) -> Tensor:
    return dequantize(matrix.planes, matrix.scales, matrix.layout)
