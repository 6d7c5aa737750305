"""Matrices and experts as nested bit planes: which blobs hold what.

Shape legend as in kernels/reference.py; N rows and K columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.planes import PLANE_BITS, PREFIX_BITS, PlaneLayout, num_planes


@dataclass(frozen=True, eq=False)
class PlaneMatrix:
    """An (N, K) matrix at the precision of its first planes; compared by identity.

    Attributes:
        layout: where the codes lie.
        planes: the first 1 to 4 planes, ``(plane_bytes(p),)`` uint8 each.
        scales: ``(num_scales,)`` float16.
        bias: ``(N,)`` floating point, or None.
    """

    layout: PlaneLayout
    planes: tuple[Tensor, ...]
    scales: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        _check_blobs(self.planes, self.scales, (self.layout,), "a matrix")

    @property
    def bits(self) -> int:
        """2, 3, 4 or 8."""
        return PREFIX_BITS[len(self.planes) - 1]


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """The experts of one MoE layer as nested bit planes; compared by identity.

    A blob of an expert joins its matrices: the parts of the first projection one after the other,
    then the second projection. Each expert holds a prefix of its own length.

    Attributes:
        first: layout of one part, (F, H), of the first projection.
        parts: 2 for gate and up, in this order; 1 for experts without a gate.
        second: layout of the second projection, (H, F).
        planes: of each expert its first 1 to 4 blobs of uint8.
        scales: of each expert one blob of float16.
        activation: (S, G) -> (S, F), the architecture's own, on rows in its own order.
        interleaved: the activation wants gate and up row by row in turn, not one after the other.
        gate_up_bias_EG: (E, G) added to the first projection, in the architecture's own order.
        down_bias_EH: (E, H) added to the second projection.
        post_norm: (S, H) -> (S, H), applied to each expert's output row before its routing weight.
    """

    first: PlaneLayout
    parts: int
    second: PlaneLayout
    planes: tuple[tuple[Tensor, ...], ...]
    scales: tuple[Tensor, ...]
    activation: Callable[[Tensor], Tensor]
    interleaved: bool = False
    gate_up_bias_EG: Tensor | None = None
    down_bias_EH: Tensor | None = None
    post_norm: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.parts not in (1, 2) or (self.interleaved and self.parts == 1):
            raise ValueError(f"experts have 1 part, or 2 to interleave, got {self.parts}")
        if (self.second.rows, self.second.columns) != (self.first.columns, self.first.rows):
            raise ValueError(
                f"the second projection must be (H, F) where the first is (F, H), got "
                f"{self.second.rows}x{self.second.columns} and "
                f"{self.first.rows}x{self.first.columns}"
            )
        if len(self.planes) != len(self.scales):
            raise ValueError(f"{len(self.planes)} experts' planes, {len(self.scales)} scales")
        for expert, (planes, scales) in enumerate(zip(self.planes, self.scales, strict=True)):
            _check_blobs(planes, scales, self._layouts, f"expert {expert}")
        if len({scales.device for scales in self.scales}) != 1:
            raise ValueError("a layer needs at least one expert, and all experts on one device")

    @property
    def num_experts(self) -> int:
        return len(self.planes)

    @property
    def hidden_size(self) -> int:
        return self.first.columns

    @property
    def intermediate_size(self) -> int:
        return self.first.rows

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, on average where they hold different numbers of planes."""
        return sum(map(self.expert_bytes_of, range(self.num_experts))) // self.num_experts

    def expert_bytes_of(self, expert: int) -> int:
        """Bytes of the expert's planes, scales and biases."""
        biases = [b[expert] for b in (self.gate_up_bias_EG, self.down_bias_EH) if b is not None]
        blobs = (*self.planes[expert], self.scales[expert], *biases)
        return sum(blob.numel() * blob.element_size() for blob in blobs)

    def bits_of(self, expert: int) -> int:
        """2, 3, 4 or 8."""
        return PREFIX_BITS[len(self.planes[expert]) - 1]

    def at_most(self, bits: int) -> QuantizedExperts:
        """The same experts at no more than ``bits`` bits; shares all memory."""
        keep = num_planes(bits)
        return replace(self, planes=tuple(planes[:keep] for planes in self.planes))

    def matrices(self, expert: int) -> tuple[PlaneMatrix, ...]:
        """The parts of the expert's first projection, then the second; views, without biases."""
        planes = [
            blob.split([layout.plane_bytes(plane) for layout in self._layouts])
            for plane, blob in enumerate(self.planes[expert])
        ]
        scales = self.scales[expert].split([layout.num_scales for layout in self._layouts])
        return tuple(
            PlaneMatrix(layout, tuple(blobs[index] for blobs in planes), scales[index])
            for index, layout in enumerate(self._layouts)
        )

    @property
    def _layouts(self) -> tuple[PlaneLayout, ...]:
        return (self.first,) * self.parts + (self.second,)


def _check_blobs(
    planes: tuple[Tensor, ...], scales: Tensor, layouts: Sequence[PlaneLayout], name: str
) -> None:
    if not 1 <= len(planes) <= len(PLANE_BITS):
        raise ValueError(f"{name} must hold 1 to 4 planes, got {len(planes)}")
    for plane, blob in enumerate(planes):
        size = sum(layout.plane_bytes(plane) for layout in layouts)
        if blob.shape != (size,) or blob.dtype != torch.uint8 or not blob.is_contiguous():
            raise ValueError(
                f"plane {plane} of {name} must be ({size},) uint8 and contiguous, "
                f"got {tuple(blob.shape)} {blob.dtype}"
            )
    size = sum(layout.num_scales for layout in layouts)
    if scales.shape != (size,) or scales.dtype != torch.float16 or not scales.is_contiguous():
        raise ValueError(
            f"the scales of {name} must be ({size},) float16 and contiguous, "
            f"got {tuple(scales.shape)} {scales.dtype}"
        )
    if len({blob.device for blob in (*planes, scales)}) > 1:
        raise ValueError(f"the planes and scales of {name} must be on one device")
