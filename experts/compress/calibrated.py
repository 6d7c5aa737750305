"""A layer's experts at chosen bits, compensated on calibration inputs; and what that costs.

An expert with too few rows to tell how its inputs move together is rounded plainly and listed.
Legend as in `inputs`; W widths, P parts of the first projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experts.compress.gptq import compensate
from experts.compress.inputs import LayerInputs, moments, output
from experts.grid import quantize_exactly
from experts.weights import (
    ExpertShape,
    dequantize_experts,
    from_expert_blobs,
    is_interleaved,
    split_parts,
)
from kernels import ExpertWeights, QuantizedExperts
from kernels.plane_weights import PlaneMatrix
from kernels.planes import PREFIX_BITS, PlaneLayout, num_planes, pack, pack_scales
from kernels.quantized import join_matrices

MIN_ROWS = 128
"""Fewer rows than this in calibration: plain rounding."""

_CHUNK_VALUES = 1 << 24
"""Most values of the second moments that are worked on at once."""


@torch.no_grad()
def quantize_calibrated(
    whole: ExpertWeights,
    inputs: LayerInputs,
    bits: Sequence[int],
    group_size: int = 64,
    *,
    nested: bool,
) -> QuantizedExperts:
    """The experts as planes, each at its own bits, compensated.

    Args:
        whole: the layer's weights.
        inputs: what its experts were given in calibration.
        bits: 2, 4 or 8 of each expert.
        group_size: weights that share a scale.
        nested: compensate every prefix, so that an expert is good at fewer bits, too. Otherwise
            all is done for its own bits.

    Raises:
        ValueError: as `experts.weights.quantize_experts`.
    """
    width = whole.intermediate_size
    parts = whole.gate_up_EGH.shape[1] // width
    shape = ExpertShape(whole.hidden_size, width, parts, group_size)
    interleaved = parts == 2 and is_interleaved(whole.activation, width)
    job = _Job(whole, inputs, shape, interleaved, nested)
    found = {
        expert: blobs
        for experts in _chunks(bits, shape)
        for expert, blobs in zip(experts, _quantize(job, experts, bits[experts[0]]), strict=True)
    }
    ordered = [found[expert] for expert in range(whole.num_experts)]
    return from_expert_blobs(
        shape,
        ordered,
        interleaved,
        activation=whole.activation,
        gate_up_bias_EG=whole.gate_up_bias_EG,
        down_bias_EH=whole.down_bias_EH,
        post_norm=whole.post_norm,
    )


def too_few(inputs: LayerInputs, num_experts: int) -> list[int]:
    """Experts that have fewer than `MIN_ROWS` rows."""
    few: list[int] = (inputs.counts(num_experts) < MIN_ROWS).nonzero().flatten().tolist()
    return few


@torch.no_grad()
def output_errors(whole: ExpertWeights, quantized: QuantizedExperts, inputs: LayerInputs) -> Tensor:
    """``(E,)`` float64: squared error of the layer's output when that expert alone is quantised.

    Summed over the calibration tokens and the hidden dimension, routing weights included.
    """
    errors = torch.zeros(whole.num_experts, dtype=torch.float64)
    for expert in range(whole.num_experts):
        rows_RH, weights_R1 = inputs.rows_of(expert)
        alone = dequantize_experts(_only(quantized, expert))
        exact = output(whole, expert, rows_RH)
        # one expert's weights, the layer's biases
        own = replace(
            whole,
            gate_up_EGH=alone.gate_up_EGH.expand(whole.num_experts, -1, -1),
            down_EHF=alone.down_EHF.expand(whole.num_experts, -1, -1),
        )
        lost = (output(own, expert, rows_RH) - exact) * weights_R1
        errors[expert] = lost.double().square().sum()
    return errors


def _only(quantized: QuantizedExperts, expert: int) -> QuantizedExperts:
    planes, scales = quantized.planes[expert], quantized.scales[expert]
    return replace(quantized, planes=(planes,), scales=(scales,))


def _chunks(bits: Sequence[int], shape: ExpertShape) -> Iterator[list[int]]:
    """Experts of equal bits, as many as may be worked on at once."""
    size = max(1, _CHUNK_VALUES // max(shape.hidden, shape.intermediate) ** 2)
    for width in PREFIX_BITS:
        experts = [expert for expert, own in enumerate(bits) if own == width]
        yield from (experts[at : at + size] for at in range(0, len(experts), size))


@dataclass(frozen=True)
class _Job:
    whole: ExpertWeights
    inputs: LayerInputs
    shape: ExpertShape
    interleaved: bool
    nested: bool


def _quantize(
    job: _Job, experts: list[int], bits: int
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Planes and scales of each of these experts, in order."""
    whole, inputs, shape = job.whole, job.inputs, job.shape
    widths = PREFIX_BITS[: num_planes(bits)] if job.nested else (bits,)
    first_XHH, second_XFF = moments(inputs, whole, experts)
    counts = inputs.counts(whole.num_experts)[experts]
    enough = counts >= MIN_ROWS
    rows = torch.stack(
        [split_parts(whole.gate_up_EGH[e], shape.parts, job.interleaved) for e in experts]
    )
    first = _codes(rows.flatten(1, 2), first_XHH, enough, widths, shape.group_size)
    second = _codes(whole.down_EHF[experts], second_XFF, enough, widths, shape.group_size)
    for index in range(len(experts)):
        codes, scales = (own[index].unflatten(0, (shape.parts, -1)) for own in first)
        matrices = [
            _matrix(part, spread, shape.first, bits)
            for part, spread in zip(codes, scales, strict=True)
        ]
        matrices.append(_matrix(second[0][index], second[1][index], shape.second, bits))
        yield join_matrices(matrices)


def _codes(
    weight_XNK: Tensor,
    moment_XKK: Tensor,
    enough_X: Tensor,
    widths: Sequence[int],
    group_size: int,
) -> tuple[Tensor, Tensor]:
    codes, scales = quantize_exactly(weight_XNK, group_size)
    if bool(enough_X.any()):
        codes[enough_X] = compensate(
            weight_XNK[enough_X], moment_XKK[enough_X], scales[enough_X], group_size, widths
        )
    return codes, scales


def _matrix(codes_NK: Tensor, scales_ND: Tensor, layout: PlaneLayout, bits: int) -> PlaneMatrix:
    planes = pack(codes_NK, layout)[: num_planes(bits)]
    return PlaneMatrix(layout, planes, pack_scales(scales_ND, layout))
