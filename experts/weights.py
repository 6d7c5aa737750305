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

from experts.grid import quantize_exactly
from experts.safetensors_io import fresh
from kernels import ExpertWeights, QuantizedExperts
from kernels.planes import (
    PlaneFormat,
    PlaneLayout,
    dequantize,
    joint_prefix_bits,
    pack,
    pack_scales,
)
from kernels.reference import AnyExperts


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


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor that is not empty holds neither NaN nor infinity."""
    low, high = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)  # NaN spreads
    return bool(torch.isfinite(low) & torch.isfinite(high))


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
    """Return whether output i of a gated activation depends on columns (2i, 2i + 1), not on (i, F +
    i).

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
