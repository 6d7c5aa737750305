"""`QuantizedLinear`: a linear layer whose weight is nested bit planes, in place of `nn.Linear`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from experts.grid import quantize_exactly
from kernels import PlaneMatrix, linear_forward
from kernels.planes import PlaneLayout, dequantize, pack, pack_scales

_PIECE_ROWS = 1 << 14
"""Rows quantized at once: a whole output head in float32 would take more memory than all else."""


class QuantizedLinear(nn.Module):
    """``y = x W^T + b`` with the first planes of W; any leading dimensions.

    Its state is ``plane0``, ``plane1``, ..., ``scales`` and ``bias``, and is loaded from a store's
    trunk like any other parameter.

    Attributes:
        in_features, out_features: as of `torch.nn.Linear`.
        dtype: of `weight`.
        reads: how often `weight` was read, not the layer called.
    """

    scales: Tensor

    def __init__(
        self,
        layout: PlaneLayout,
        bits: int,
        bias: nn.Parameter | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.dtype = dtype
        self.in_features, self.out_features = layout.columns, layout.rows
        self.reads = 0
        self._matrix: PlaneMatrix | None = None
        self._planes = [f"plane{plane}" for plane in range(layout.format.num_planes(bits))]
        for plane, name in enumerate(self._planes):
            blob = torch.empty(layout.plane_bytes(plane), dtype=torch.uint8, device=device)
            self.register_buffer(name, blob)
        scales = torch.empty(layout.num_scales, dtype=layout.scale_dtype, device=device)
        self.register_buffer("scales", scales)
        self.bias = bias

    @classmethod
    @torch.no_grad()
    def of(
        cls, linear: nn.Linear, group_size: int, bits: int, dtype: torch.dtype = torch.float32
    ) -> QuantizedLinear:
        """The layer quantized, or, from meta, one of its shape without values.

        Args:
            dtype: of the model around it, in which the weight may be read.

        Raises:
            ValueError: a weight is NaN, infinite or too large.
        """
        weight = linear.weight
        layout = PlaneLayout(linear.out_features, linear.in_features, group_size)
        made = cls(layout, bits, linear.bias, weight.device, dtype)
        if not weight.is_meta:
            found = []
            for rows in weight.split(_PIECE_ROWS):
                codes, scales = quantize_exactly(rows, group_size)
                own = replace(layout, rows=len(rows))
                blobs = pack(codes, own)[: len(made._planes)]
                found.append((*blobs, pack_scales(scales, own)))
            for name, parts in zip(
                (*made._planes, "scales"), zip(*found, strict=True), strict=True
            ):
                setattr(made, name, torch.cat(parts))
        return made

    def hold(self, matrix: PlaneMatrix) -> None:
        """Take over the planes and scales of a matrix of this layout."""
        for name, blob in zip(
            (*self._planes, "scales"), (*matrix.planes, matrix.scales), strict=True
        ):
            setattr(self, name, blob)

    def arrange(self, device: torch.device) -> None:
        """Arrange the planes for a device."""
        matrix = self.matrix.for_device(device)
        self.layout = matrix.layout
        self.hold(matrix)

    @property
    def matrix(self) -> PlaneMatrix:
        """The planes; the same object while the tensors are the same, as kernels cache by it."""
        known, buffers = self._matrix, self._buffers
        if (
            known is None
            or known.layout is not self.layout
            or known.scales is not buffers["scales"]
            or known.bias is not self.bias
        ):
            planes = tuple(getattr(self, name) for name in self._planes)
            known = self._matrix = PlaneMatrix(self.layout, planes, self.scales, self.bias)
        return known

    @property
    def bits(self) -> int:
        return self.layout.format.prefix_bits[len(self._planes) - 1]

    @property
    def weight(self) -> Tensor:
        """``(N, K)``: the dequantized weight, computed at each access, so slow."""
        self.reads += 1
        planes = [getattr(self, name) for name in self._planes]
        return dequantize(planes, self.scales, self.layout).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = linear_forward(x.reshape(-1, self.in_features), self.matrix)
        return rows.view(*x.shape[:-1], self.out_features)

    def whole(self) -> nn.Linear:
        """An ordinary layer with the dequantized weight."""
        weight = self.weight
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"
