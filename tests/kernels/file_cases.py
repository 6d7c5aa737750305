"""Random matrices and layers with a file's own codes and scales, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import PlaneMatrix, QuantizedExperts
from kernels.planes import FILE_PLANES, PlaneFormat, PlaneLayout, join_matrices
from kernels.scales import (
    SCALES,
    GroupScales,
    Scales,
    has_float_codes,
    has_superblocks,
    powers_of_two,
)
from tests.kernels.kernel_cases import ACTIVATIONS
from tests.kernels.plane_cases import Array, quantized

FILE_FORMATS = {
    "Q2_K": PlaneFormat(16, 2, "super-nibbles"),
    "Q3_K": PlaneFormat(16, 3, "super"),
    "Q4_K": PlaneFormat(32, 4, "super-offset"),
    "Q5_1": PlaneFormat(32, 5, "offset"),
    "Q6_K": PlaneFormat(16, 6, "super"),
    "Q8_0": PlaneFormat(32, 8, "centred"),
    "AWQ": PlaneFormat(128, 4, "offset"),
    "GPTQ, groups of 64": PlaneFormat(64, 8, "offset"),
    "FP8": PlaneFormat(128, 8, "fp8"),
    "FP8, groups of 32": PlaneFormat(32, 8, "fp8"),
    "MXFP4": PlaneFormat(32, 4, "mxfp4"),
}

formats = st.builds(
    PlaneFormat,
    st.sampled_from((16, 32, 64, 128)),
    st.sampled_from(tuple(FILE_PLANES)),
    st.sampled_from([kind for kind in SCALES[1:] if not has_float_codes(kind)]),
)


@dataclass(frozen=True)
class FileWeights:
    """Numbers as a file has them: unsigned codes, and what to do with them, column by column."""

    codes_NK: Array
    scale_NK: Array
    offset_NK: Array
    kind: Scales = "centred"

    def at(self, format: PlaneFormat, planes: int) -> Array:
        """The weights in float64 where a prefix stands for the middle of its codes."""
        if has_float_codes(self.kind):
            fields = (4, 3) if self.kind == "fp8" else (2, 1)
            return small_floats(self.codes_NK, *fields) * self.scale_NK
        step = 2 ** (format.bits - format.prefix_bits[planes - 1])
        middle = self.codes_NK // step * step + (step - 1) / 2
        return middle * self.scale_NK + self.offset_NK


def make_file_matrix(
    rows: int, columns: int, format: PlaneFormat, random: np.random.Generator
) -> tuple[PlaneMatrix, FileWeights]:
    size, bits, kind = format
    groups, supers = -(-columns // size), -(-columns // 256)
    codes = random.integers(0, 2**bits, (rows, columns))
    signed = random.choice([-1, 1], (rows, groups)) * random.uniform(1e-3, 1e-2, (rows, groups))
    if has_float_codes(kind):
        codes[(codes & 127) == 127] = 0  # NaN in 8 bits
        own = GroupScales(torch.from_numpy(np.abs(signed).astype(np.float32)))
        if kind == "mxfp4":
            own = GroupScales(torch.from_numpy(random.integers(118, 124, signed.shape)).byte())
            own.scale_ND[0] = 0  # the least power of two
        layout = PlaneLayout(rows, columns, *format)
        matrix = PlaneMatrix.of_file(torch.from_numpy(codes).byte(), own, layout)
        exact = powers_of_two(own.scale_ND) if kind == "mxfp4" else own.scale_ND
        all_scales = np.repeat(exact.double().numpy(), size, 1)[:, :columns]
        return matrix, FileWeights(codes, all_scales, np.zeros_like(all_scales), kind)
    if not has_superblocks(kind):
        scale = signed.astype(np.float16)
        offset = random.normal(scale=0.05, size=scale.shape).astype(np.float16)
        middle = -(2 ** (bits - 1)) * scale.astype(np.float64)
        own = GroupScales(torch.from_numpy(scale), torch.from_numpy(offset))
        each = scale.astype(np.float64), middle if kind == "centred" else offset.astype(np.float64)
        own = replace(own, offset_ND=None if kind == "centred" else own.offset_ND)
    else:
        outer = random.uniform(1e-4, 2e-4, (2, rows, supers)).astype(np.float16)
        spread = [np.repeat(x.astype(np.float64), 256 // size, 1)[:, :groups] for x in outer]
        of = [torch.from_numpy(x) for x in outer]
        if kind == "super":
            inner = random.integers(-128, 128, (rows, groups)).astype(np.int8)
            own = GroupScales(torch.from_numpy(inner), None, of[0])
            scale = inner * spread[0]
            each = scale, -(2 ** (bits - 1)) * scale
        else:
            most = 16 if kind == "super-nibbles" else 256
            inner, least = random.integers(0, most, (2, rows, groups)).astype(np.uint8)
            own = GroupScales(torch.from_numpy(inner), torch.from_numpy(least), *of)
            each = inner * spread[0], -(least * spread[1])
    layout = PlaneLayout(rows, columns, *format)
    matrix = PlaneMatrix.of_file(torch.from_numpy(codes).to(torch.uint8), own, layout)
    scale_NK, offset_NK = (np.repeat(x, size, 1)[:, :columns] for x in each)
    return matrix, FileWeights(codes, scale_NK, offset_NK)


def small_floats(codes: Array, exponent: int, mantissa: int) -> Array:
    """What codes with a sign and so many bits stand for, by the definition of such numbers."""
    codes = codes.astype(np.int64)
    power = codes >> mantissa & 2**exponent - 1
    rest = (codes & 2**mantissa - 1) / 2**mantissa + (power > 0)
    sizes: Array = rest * 2.0 ** (np.maximum(power, 1) - (2 ** (exponent - 1) - 1))
    return np.where(codes >> exponent + mantissa, -sizes, sizes)


def first_planes(matrix: PlaneMatrix, planes: int) -> PlaneMatrix:
    return replace(matrix, planes=matrix.planes[:planes])


def rounded_rows(x_TK: Tensor | Array) -> Array:
    """Activations as the kernels round them: codes times scales, in groups of 32."""
    codes, scales = quantized(np.asarray(x_TK, dtype=np.float32), 32)
    return codes * scales


@dataclass(frozen=True)
class FileLayer:
    """A layer, and the weights of each matrix of each expert."""

    experts: QuantizedExperts
    weights: list[list[Array]]

    def output(self, row_H: Tensor, expert: int) -> Array:
        """The expert's output in float64, without what is rounded between the projections."""
        *first, second = self.weights[expert]
        parts = [rounded_rows(row_H[None]) @ part.T for part in first]
        own = torch.from_numpy(np.concatenate(parts, 1))
        if self.experts.gate_up_bias_EG is not None:
            own += self.experts.gate_up_bias_EG[expert].double()
        inner = self.experts.activation(own).numpy()
        found: Array = (rounded_rows(inner) @ second.T)[0]
        return found


def make_file_layer(
    first: PlaneFormat,
    second: PlaneFormat,
    experts: int = 3,
    hidden: int = 300,
    width: int = 200,
    planes: int = 2,
    activation: str = "silu gate",
    seed: int = 0,
) -> FileLayer:
    random = np.random.default_rng(seed)
    function, parts = ACTIVATIONS[activation]
    made = [
        [
            *(make_file_matrix(width, hidden, first, random) for _ in range(parts)),
            make_file_matrix(hidden, width, second, random),
        ]
        for _ in range(experts)
    ]
    blobs = [join_matrices([matrix for matrix, _ in expert]) for expert in made]
    layer = QuantizedExperts(
        made[0][0][0].layout,
        parts,
        made[0][-1][0].layout,
        tuple(own[:planes] for own, _ in blobs),
        tuple(scales for _, scales in blobs),
        function,
    )
    weights = [
        [own.at(matrix.layout.format, min(planes, len(matrix.planes))) for matrix, own in expert]
        for expert in made
    ]
    return FileLayer(layer, weights)
