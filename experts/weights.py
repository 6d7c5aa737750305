"""Experts as nested bit planes: whole weights in, planes out, and back.

The first projection of a gated expert is split into its parts, gate and up, so a kernel finds the
two rows that it multiplies in equal places. Architectures lay the parts out in two ways;
`is_interleaved` finds out which by trying the activation. Legend: E experts, F intermediate width,
H hidden, G = parts * F rows of the first projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from experts.safetensors_io import fresh
from kernels import ExpertWeights, QuantizedExperts, planes
from kernels.planes import (
    PlaneFormat,
    PlaneLayout,
    dequantize,
    joint_prefix_bits,
    pack,
    pack_scales,
)
from kernels.reference import AnyExperts

MOST_STEPS = 16
"""Largest multiple of a scale: 4-bit codes minus a zero point lie in [-16, 15]."""

_SAMPLES = 32
_FEW = 4


@dataclass(frozen=True, order=True)
class ExpertKey:
    """One expert: MoE layer (from 0, dense layers not counted) and number in it."""

    layer: int
    expert: int


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert and of its blobs.

    Attributes:
        hidden, intermediate: H and F.
        parts: 2 for gated experts, else 1.
        group_size: columns that share a scale.
        own: formats of the first and the second projection where a file had quantised them; then
            ``group_size`` means nothing.
    """

    hidden: int
    intermediate: int
    parts: int
    group_size: int
    own: tuple[PlaneFormat, PlaneFormat] | None = None

    @classmethod
    def of(cls, experts: ExpertWeights, group_size: int) -> ExpertShape:
        """The shape that whole experts will have."""
        rows, width = experts.gate_up_EGH.shape[1], experts.intermediate_size
        return cls(experts.hidden_size, width, rows // width, group_size)

    @property
    def formats(self) -> tuple[PlaneFormat, PlaneFormat]:
        return self.own or (PlaneFormat(self.group_size), PlaneFormat(self.group_size))

    @property
    def first(self) -> PlaneLayout:
        """Layout of one part of the first projection, ``(F, H)``."""
        return PlaneLayout(self.intermediate, self.hidden, *self.formats[0])

    @property
    def second(self) -> PlaneLayout:
        """Layout of the second projection, ``(H, F)``."""
        return PlaneLayout(self.hidden, self.intermediate, *self.formats[1])

    @property
    def prefix_bits(self) -> tuple[int, ...]:
        """Bits of the finer projection at one blob of planes, at two, ..., at all."""
        return joint_prefix_bits(*self.formats)

    def num_planes(self, bits: int) -> int:
        """Blobs of the longest prefix of at most so many bits, 1 at least."""
        return max(1, sum(own <= bits for own in self.prefix_bits))

    def plane_bytes(self, plane: int) -> int:
        """Bytes of one plane of one expert; a multiple of 64."""
        return self.parts * self.first.plane_bytes(plane) + self.second.plane_bytes(plane)

    @property
    def scale_dtype(self) -> torch.dtype:
        dtypes = {self.first.scale_dtype, self.second.scale_dtype}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def scale_bytes(self) -> int:
        return self.parts * self.first.scale_bytes + self.second.scale_bytes

    @property
    def num_scales(self) -> int:
        """Elements of the blob of scales."""
        return self.scale_bytes // self.scale_dtype.itemsize

    def nbytes(self, bits: int) -> int:
        """Bytes of the first ``bits`` of one expert, without biases; a multiple of 32."""
        return sum(map(self.plane_bytes, range(self.num_planes(bits)))) + self.scale_bytes

    def split(self, memory: Tensor, bits: int) -> tuple[list[Tensor], Tensor]:
        """The planes and the scales of experts that lie one after the other.

        The order is that of a store's files: scales, then the planes, coarsest first, so that each
        prefix is one range of bytes.

        Args:
            memory: ``(E, nbytes(bits))`` uint8.

        Returns:
            Views, ``(E, plane_bytes(p))`` uint8 of each plane and ``(E, num_scales)``: what
            `from_blobs` takes.
        """
        sizes = [self.scale_bytes, *map(self.plane_bytes, range(self.num_planes(bits)))]
        scales, *planes = memory.split(sizes, 1)
        return planes, scales.view(self.scale_dtype)


@torch.no_grad()
def quantize_experts(
    experts: ExpertWeights, group_size: int = 64, bits: int = 8
) -> QuantizedExperts:
    """The experts as planes, of which the first ``bits`` are kept.

    Biases and the activation stay what they are. One expert is float32 at a time.

    Raises:
        ValueError: a weight is NaN, infinite or too large, or the activation pairs its columns in
            a way that is neither concatenated nor interleaved.
    """
    count, shape = experts.num_experts, ExpertShape.of(experts, group_size)
    interleaved = shape.parts == 2 and is_interleaved(experts.activation, shape.intermediate)
    device = experts.gate_up_EGH.device
    memory = fresh((count, shape.nbytes(bits)), torch.uint8, device)
    blobs, scales = shape.split(memory, bits)
    for expert in range(count):
        parts = split_parts(experts.gate_up_EGH[expert], shape.parts, interleaved)
        second = experts.down_EHF[expert]
        for layout, weight, place in (
            (shape.first, parts, slice(0, shape.parts)),
            (shape.second, second[None], slice(shape.parts, shape.parts + 1)),
        ):
            codes, spread = quantize_exactly(weight, group_size)
            for plane, packed in enumerate(pack(codes, layout)[: len(blobs)]):
                start = place.start * shape.first.plane_bytes(plane)
                blobs[plane][expert, start : start + packed.numel()] = packed.flatten()
            start = place.start * shape.first.num_scales
            flat = pack_scales(spread, layout).flatten()
            scales[expert, start : start + flat.numel()] = flat
    return from_blobs(shape, blobs, scales, interleaved, **beside_weights(experts))


def from_blobs(
    shape: ExpertShape, blobs: Sequence[Tensor], scales: Tensor, interleaved: bool, **own: Any
) -> QuantizedExperts:
    """Experts over ``(E, plane_bytes)`` blobs of each plane and ``(E, num_scales)`` scales.

    Nothing is copied: rows must be dense, but need not lie one after the other. ``own``: the fields
    of `QuantizedExperts` that are not weights.
    """
    planes = zip(*(blob.unbind() for blob in blobs), strict=True)
    each = list(zip(planes, scales.unbind(), strict=True))
    return from_expert_blobs(shape, each, interleaved, **own)


def from_expert_blobs(
    shape: ExpertShape,
    blobs: Sequence[tuple[Sequence[Tensor], Tensor]],
    interleaved: bool,
    **own: Any,
) -> QuantizedExperts:
    """`from_blobs` for planes and scales of each expert, which may differ in bits."""
    return QuantizedExperts(
        first=shape.first,
        parts=shape.parts,
        second=shape.second,
        planes=tuple(tuple(planes) for planes, _ in blobs),
        scales=tuple(scales for _, scales in blobs),
        interleaved=interleaved,
        **own,
    )


def dequantize_experts(experts: QuantizedExperts) -> ExpertWeights:
    """The float32 weights that the planes stand for, in the architecture's own order."""
    first, second = [], []
    for expert in range(experts.num_experts):
        *parts, last = [
            dequantize(matrix.planes, matrix.scales, matrix.layout)
            for matrix in experts.matrices(expert)
        ]
        first.append(join_parts(torch.stack(parts), experts.interleaved))
        second.append(last)
    return ExpertWeights(torch.stack(first), torch.stack(second), **beside_weights(experts))


def beside_weights(experts: AnyExperts) -> dict[str, Any]:
    """The fields of a layer's experts that are not weights: the same whole and as planes."""
    names = ("activation", "gate_up_bias_EG", "down_bias_EH", "post_norm")
    return {name: getattr(experts, name) for name in names}


def split_parts(rows_GX: Tensor, parts: int, interleaved: bool) -> Tensor:
    """``(parts, F, X)`` of ``(G, X)`` rows."""
    if interleaved:
        return rows_GX.unflatten(0, (-1, parts)).transpose(0, 1)
    return rows_GX.unflatten(0, (parts, -1))


def join_parts(parts_PFX: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `split_parts`."""
    return (parts_PFX.transpose(0, 1) if interleaved else parts_PFX).flatten(0, 1)


@torch.no_grad()
def is_interleaved(activation: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether output i of a gated activation depends on columns (2i, 2i + 1), not on (i, F + i).

    Changes one column at a time and looks which output changes.

    Raises:
        ValueError: neither.
    """
    base = torch.linspace(0.5, 1.0, 2 * width)[None]
    before = activation(base)
    fits = [True, True]  # concatenated, interleaved
    for column in {0, 1, width - 1, width, width + 1, 2 * width - 1} & set(range(2 * width)):
        moved = base.clone()
        moved[0, column] += 0.25
        outputs = (activation(moved) != before)[0].nonzero().flatten().tolist()
        for index, output in enumerate((column % width, column // 2)):
            fits[index] &= outputs == [output]
    if not any(fits):
        raise ValueError(
            "the activation of these experts pairs the columns of gate and up neither side by "
            "side nor one after the other, so they cannot be quantized; keep them whole"
        )
    return not fits[0]


# Exact quantization of weights that are on a grid already: no second rounding
#
# A checkpoint with 4-bit weights (MXFP4, GPTQ, AWQ, compressed-tensors) holds small multiples of
# one scale a group. The scale is found from the values alone: neither the format they came in
# matters nor that they were later saved as bf16, and no tensor must be traced through the
# conversions of transformers. Such a group keeps its weights exactly: it gets that scale, divided
# by a power of two so that the multiples fill the 8 bits, as coarse prefixes need the high bits.
# Multiples in [-8, 7], the codes of 4 bits without a zero point, are exact in the first 4 bits,
# too.


def quantize_exactly(weight_NK: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """`kernels.planes.quantize`, but groups on a grid keep their weights exactly.

    A group of float32, or of anything exact in float32, is on a grid when its values are whole
    multiples, `MOST_STEPS` at most, of one float16 number.
    """
    codes, scales = planes.quantize(weight_NK, group_size)
    rows = weight_NK.flatten(0, -2)
    if not _on_a_grid(rows[:: max(1, rows.shape[0] // _SAMPLES)], group_size):
        return codes, scales
    groups = _groups(weight_NK, group_size)
    flat = groups.flatten(0, -2)
    step = _steps(flat)
    on_grid = step > 0
    fine = _fill(-flat.amin(-1), flat.amax(-1), step)
    exact = (flat / fine.masked_fill(~on_grid, 1.0)[:, None] + planes.ZERO_CODE).to(torch.uint8)
    codes = pad(codes, (0, -codes.shape[-1] % group_size), value=planes.ZERO_CODE)
    codes = torch.where(on_grid[:, None], exact, codes.reshape(exact.shape)).view(groups.shape)
    scales = torch.where(on_grid.view(scales.shape), fine.view(scales.shape).half(), scales)
    return codes.flatten(-2)[..., : weight_NK.shape[-1]].contiguous(), scales


def _groups(weight_NK: Tensor, group_size: int) -> Tensor:
    padding = (0, -weight_NK.shape[-1] % group_size)
    return pad(weight_NK.float(), padding).unflatten(-1, (-1, group_size))


def _on_a_grid(rows_RK: Tensor, group_size: int) -> bool:
    """Whether any group of these rows is on a grid."""
    flat = _groups(rows_RK, group_size).flatten(0, -2)
    return bool((_steps(flat) > 0).any())


def _steps(groups: Tensor) -> Tensor:
    """``(R,)``: the largest grid step of each of ``(R, group)`` rows, 0 for none."""
    largest = groups.abs().amax(-1)
    found = torch.zeros_like(largest)
    counts_C1 = torch.arange(1, MOST_STEPS + 1, device=groups.device)[:, None]
    steps_CR = largest / counts_C1
    # a wrong count rarely gives a float16, so few rows are checked in full
    may_CR = (steps_CR > 0) & (steps_CR.half().float() == steps_CR)
    may_CR &= steps_CR * counts_C1 == largest
    for index in may_CR.any(1).nonzero().flatten().tolist():
        step = steps_CR[index]
        rows = (may_CR[index] & (found == 0)).nonzero().squeeze(1)
        for some in (groups[:, :_FEW], groups):  # a wrong count rarely passes the first
            own = some[rows]
            off = own.div(step[rows, None]).round_().mul_(step[rows, None]).sub_(own)
            rows = rows[off.abs_().amax(-1) == 0]
        found[rows] = step[rows]
    return found


def _fill(low: Tensor, high: Tensor, step: Tensor) -> Tensor:
    """The step over the largest power of two that fits values in [-low, high] into 8 bits.

    Negative where `high` is larger: codes have more room below zero. The largest code is then at
    least 60 from zero, but where float16 has no such small numbers.
    """
    below, above = planes.ZERO_CODE, planes.MAX_CODE - planes.ZERO_CODE
    larger, smaller, fine = torch.maximum(low, high), torch.minimum(low, high), step
    for power in range(1, 8):
        finer = step / 2**power
        fits = (larger <= below * finer) & (smaller <= above * finer)
        fine = torch.where(fits & (finer.half().float() == finer), finer, fine)
    return torch.where(high > low, -fine, fine)
