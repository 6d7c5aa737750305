"""A layer's experts at chosen bits, compensated on calibration inputs; and what that costs.

An expert with too few rows to tell how its inputs move together is rounded plainly and listed.
Legend as in `inputs`; W widths, P parts of the first projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experts.compress.gptq import Moments, compensate
from experts.compress.statistics import LayerInputs, moments, output
from experts.weights import (
    ExpertShape,
    beside_weights,
    from_expert_blobs,
    is_interleaved,
    quantize_exactly,
    split_parts,
)
from kernels import ExpertWeights, QuantizedExperts
from kernels.planes import PREFIX_BITS, PlaneLayout, PlaneMatrix, num_planes, pack, pack_scales
from kernels.quantized import join_matrices

MIN_ROWS = 128
"""Fewer rows than this in calibration: plain rounding."""

_CHUNK_VALUES = 1 << 24
"""Most values of the second moments that are worked on at once."""

Blobs = tuple[tuple[Tensor, ...], Tensor]
"""Planes and scales of one expert."""


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
        bits: of each expert, one of `PREFIX_BITS`.
        group_size: weights that share a scale.
        nested: compensate every prefix, so that an expert is good at fewer bits, too. Otherwise
            all is done for its own bits.

    Raises:
        ValueError: as `experts.weights.quantize_experts`.
    """
    job = _Job.of(whole, inputs, group_size)
    few = too_few(inputs, whole.num_experts)
    found = {expert: _first(job.plain(expert), bits[expert]) for expert in few}
    for own in sorted(set(bits)):
        widths = PREFIX_BITS[: num_planes(own)] if nested else (own,)
        those = [e for e, width in enumerate(bits) if width == own and e not in found]
        for experts in job.chunks(those):
            found |= zip(experts, job.compensated(experts, [widths])[0], strict=True)
    return job.joined([found[expert] for expert in range(whole.num_experts)])


@torch.no_grad()
def quantize_at_each_width(
    whole: ExpertWeights, inputs: LayerInputs, group_size: int = 64
) -> list[QuantizedExperts]:
    """`quantize_calibrated` for each of `PREFIX_BITS` alone, at less work than one by one."""
    job = _Job.of(whole, inputs, group_size)
    few = too_few(inputs, whole.num_experts)
    found: dict[int, list[Blobs]] = {}
    for expert in few:
        fine = job.plain(expert)
        found[expert] = [_first(fine, bits) for bits in PREFIX_BITS]
    for experts in job.chunks([e for e in range(whole.num_experts) if e not in found]):
        ways = job.compensated(experts, [[bits] for bits in PREFIX_BITS])
        found |= zip(experts, map(list, zip(*ways, strict=True)), strict=True)
    each = zip(*(found[expert] for expert in range(whole.num_experts)), strict=True)
    return [job.joined(blobs) for blobs in each]


def too_few(inputs: LayerInputs, num_experts: int) -> list[int]:
    """Experts that have fewer than `MIN_ROWS` rows."""
    few: list[int] = (inputs.counts(num_experts) < MIN_ROWS).nonzero().flatten().tolist()
    return few


@torch.no_grad()
def output_errors(
    whole: ExpertWeights, versions: Iterable[ExpertWeights], inputs: LayerInputs
) -> Tensor:
    """``(E, len(versions))`` float64: squared error of the layer's output when that expert alone is
    as in a version.

    Summed over the calibration tokens and the hidden dimension, routing weights included.
    """
    rows = [inputs.rows_of(expert) for expert in range(whole.num_experts)]
    right = [output(whole, expert, rows_RH) for expert, (rows_RH, _) in enumerate(rows)]
    errors = []
    for coarse in versions:
        own = replace(whole, gate_up_EGH=coarse.gate_up_EGH, down_EHF=coarse.down_EHF)
        lost = [
            (output(own, expert, rows_RH) - right[expert]) * weights_R1
            for expert, (rows_RH, weights_R1) in enumerate(rows)
        ]
        errors.append(torch.stack([one.double().square().sum() for one in lost]))
    return torch.stack(errors, 1)


@dataclass(frozen=True)
class _Job:
    """A layer on its way to planes."""

    whole: ExpertWeights
    inputs: LayerInputs
    shape: ExpertShape
    interleaved: bool

    @classmethod
    def of(cls, whole: ExpertWeights, inputs: LayerInputs, group_size: int) -> _Job:
        shape = ExpertShape.of(whole, group_size)
        interleaved = shape.parts == 2 and is_interleaved(whole.activation, shape.intermediate)
        return cls(whole, inputs, shape, interleaved)

    def chunks(self, experts: Sequence[int]) -> Iterator[Sequence[int]]:
        """As many experts as may be worked on at once, after each other."""
        size = max(1, _CHUNK_VALUES // max(self.shape.hidden, self.shape.intermediate) ** 2)
        return (experts[at : at + size] for at in range(0, len(experts), size))

    def plain(self, expert: int) -> Blobs:
        """All planes of an expert, rounded to nearest."""
        first, second = (
            quantize_exactly(weight_XNK, self.shape.group_size)
            for weight_XNK in self._weights([expert])
        )
        return self._blobs(first, second, 0, PREFIX_BITS[-1])

    def compensated(
        self, experts: Sequence[int], ways: Sequence[Sequence[int]]
    ) -> list[list[Blobs]]:
        """For each way, the blobs of each of these experts.

        Args:
            ways: each the widths to compensate for, ascending; the last is how many bits are kept.
        """
        every = moments(self.inputs, self.whole, experts)
        first, second = (
            _codes(weight_XNK, Moments.of(moment_XKK), ways, self.shape.group_size)
            for weight_XNK, moment_XKK in zip(self._weights(experts), every, strict=True)
        )
        return [
            [self._blobs(one, two, at, widths[-1]) for at in range(len(experts))]
            for one, two, widths in zip(first, second, ways, strict=True)
        ]

    def _weights(self, experts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Both projections of some experts, the first's rows part by part."""
        whole, shape = self.whole, self.shape
        parts = [
            split_parts(whole.gate_up_EGH[e], shape.parts, self.interleaved).flatten(0, 1)
            for e in experts
        ]
        return torch.stack(parts), whole.down_EHF[list(experts)]

    def _blobs(self, first: _Codes, second: _Codes, at: int, bits: int) -> Blobs:
        codes, scales = (own[at].unflatten(0, (self.shape.parts, -1)) for own in first)
        matrices = [
            _matrix(part, spread, self.shape.first, bits)
            for part, spread in zip(codes, scales, strict=True)
        ]
        return join_matrices(
            [*matrices, _matrix(second[0][at], second[1][at], self.shape.second, bits)]
        )

    def joined(self, blobs: Sequence[Blobs]) -> QuantizedExperts:
        own = beside_weights(self.whole)
        return from_expert_blobs(self.shape, blobs, self.interleaved, **own)


_Codes = tuple[Tensor, Tensor]
"""Codes and scales."""


def _codes(
    weight_XNK: Tensor, own: Moments, ways: Sequence[Sequence[int]], group_size: int
) -> list[_Codes]:
    """For each way."""
    _, scales = quantize_exactly(weight_XNK, group_size)
    return [(compensate(weight_XNK, own, scales, group_size, widths), scales) for widths in ways]


def _first(blobs: Blobs, bits: int) -> Blobs:
    """The first bits of an expert."""
    planes, scales = blobs
    return planes[: num_planes(bits)], scales


def _matrix(codes_NK: Tensor, scales_ND: Tensor, layout: PlaneLayout, bits: int) -> PlaneMatrix:
    planes = pack(codes_NK, layout)[: num_planes(bits)]
    return PlaneMatrix(layout, planes, pack_scales(scales_ND, layout))
