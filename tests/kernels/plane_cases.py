"""Random matrices and layers of bit planes, and float64 oracles apart from the kernels' code.

Where an oracle and a kernel differ in the last bit of an inner activation, its 8-bit code may be
another; `Expected.slack` is what such a step can change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import PlaneMatrix, QuantizedExperts
from kernels.planes import (
    PREFIX_BITS,
    PlaneLayout,
    join_matrices,
    num_planes,
    pack,
    pack_scales,
    quantize,
)
from tests.kernels.kernel_cases import ACTIVATIONS, norm_rows

Array = np.ndarray
# The names of ACTIVATIONS whose gate and up take turns.
INTERLEAVED = {"clamped interleaved gate"}


@dataclass(frozen=True)
class Weights:
    """What a matrix of planes was made from: signed codes in [-128, 119], scales by group."""

    codes_NK: Array
    scales_ND: Array
    group_size: int

    def at(self, bits: int) -> Array:
        """(N, K) float64 codes of the first `bits` bits, in the middle of their range."""
        step = 2 ** (8 - bits)
        unsigned = self.codes_NK + 136
        return (unsigned // step) * step + step // 2 - 136.0


@dataclass(frozen=True)
class Expected:
    value: Array  # float64
    slack: Array  # per row

    def check(self, actual: Tensor, tolerance: float = 1e-5) -> None:
        scale = np.abs(self.value).max(initial=0.0)
        error = np.abs(actual.double().numpy() - self.value)
        assert actual.shape == self.value.shape
        assert (error <= tolerance * scale + 1e-6 + self.slack[:, None]).all()


def quantize_matrix(weight_NK: Tensor, group_size: int, bias: Tensor | None = None) -> PlaneMatrix:
    """A matrix with all its planes."""
    layout = PlaneLayout(weight_NK.shape[0], weight_NK.shape[1], group_size)
    codes, scales = quantize(weight_NK, group_size)
    return PlaneMatrix(layout, pack(codes, layout), pack_scales(scales, layout), bias)


def make_matrix(
    rows: int, columns: int, group_size: int, random: torch.Generator, biased: bool = False
) -> tuple[PlaneMatrix, Weights]:
    weight = torch.randn(rows, columns, generator=random) * columns**-0.5
    bias = torch.randn(rows, generator=random) if biased else None
    matrix = quantize_matrix(weight, group_size, bias)
    padded = np.pad(weight.numpy(), ((0, 0), (0, -columns % group_size)))
    groups = padded.reshape(rows, -1, group_size)
    low, high = -groups.min(-1), groups.max(-1)
    larger, smaller = np.maximum(low, high), np.minimum(low, high)
    exact = larger / np.float32(128)
    exact = np.where(smaller <= exact * np.float32(119), exact, larger / np.float32(112))
    scales = exact.astype(np.float16)
    scales = np.where(scales < exact, np.nextafter(scales, np.float16(np.inf)), scales)
    scales = np.where(high > low, -scales, scales)
    spread = np.repeat(scales.astype(np.float32), group_size, 1)[:, :columns]
    codes = np.rint(weight.numpy() / np.where(spread == 0, 1, spread))
    return matrix, Weights(codes.astype(np.int64), scales.astype(np.float64), group_size)


def first_bits(matrix: PlaneMatrix, bits: int) -> PlaneMatrix:
    return replace(matrix, planes=matrix.planes[: num_planes(bits)])


def quantized(x_TK: Array, group_size: int) -> tuple[Array, Array]:
    """(T, K) float64 codes and (T, K) float64 scales of float32 activations."""
    columns = x_TK.shape[1]
    padded = np.pad(x_TK.astype(np.float32), ((0, 0), (0, -columns % group_size)))
    groups = padded.reshape(len(x_TK), padded.shape[1] // group_size, group_size)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest < 2.0**-100, np.float32(0), np.float32(127) / largest)
    codes = np.rint(groups * inverse).reshape(padded.shape)[:, :columns]
    scales = np.where(largest < 2.0**-100, 0, largest / np.float32(127))
    return codes.astype(np.float64), np.repeat(scales[..., 0], group_size, 1)[:, :columns]


def linear_oracle(
    x_TK: Array, weights: Weights, bits: int, bias: Tensor | None = None, row_bits: int = 8
) -> Array:
    rows = x_TK.astype(np.float64)
    if row_bits == 8:
        codes, scales = quantized(x_TK, weights.group_size)
        rows = codes * scales
    spread = np.repeat(weights.scales_ND, weights.group_size, 1)[:, : x_TK.shape[1]]
    output = rows @ (weights.at(bits) * spread).T
    return output if bias is None else output + bias.double().numpy()


@dataclass(frozen=True)
class LayerCase:
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    experts: QuantizedExperts
    stored: list[list[Weights]]

    def rows(self, keep: slice) -> LayerCase:
        return replace(
            self, hidden=self.hidden[keep], ids=self.ids[keep], weights=self.weights[keep]
        )

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, QuantizedExperts]:
        return self.hidden, self.ids, self.weights, self.experts

    def expected(self) -> Expected:
        """(T, H), one token and slot after the other."""
        value, slack = np.zeros(self.hidden.shape), np.zeros(len(self.hidden))
        chosen = zip(self.ids.tolist(), self.weights.tolist(), strict=True)
        for t, (ids, weights) in enumerate(chosen):
            for expert, weight in zip(ids, weights, strict=True):
                if expert >= 0:
                    row, step = self._one(self.hidden[t : t + 1].float().numpy(), expert)
                    value[t] += weight * row
                    slack[t] += abs(weight) * step
        return Expected(value, slack)

    def _one(self, row: Array, expert: int) -> tuple[Array, float]:
        experts, bits = self.experts, self.experts.bits_of(expert)
        *first, second = self.stored[expert]
        kept = experts.row_bits
        parts = [linear_oracle(row, part, bits, row_bits=kept)[0] for part in first]
        joined = np.stack(parts, 1).ravel() if experts.interleaved else np.concatenate(parts)
        own = torch.from_numpy(joined)
        if experts.gate_up_bias_EG is not None:
            own += experts.gate_up_bias_EG[expert].double()
        inner = experts.activation(own[None]).numpy()
        bias = None if experts.down_bias_EH is None else experts.down_bias_EH[expert]
        output = linear_oracle(inner, second, bits, bias, kept)
        largest = np.abs(second.scales_ND).max()
        step = 2 * quantized(inner, second.group_size)[1].max() * largest * 136
        step *= 2.0 ** (8 - kept)
        if experts.post_norm is None:
            return output[0], step
        normed = experts.post_norm(torch.from_numpy(output)).numpy()
        return normed[0], 4 * step / np.sqrt(np.square(output).mean() + 1e-6)


def make_layer(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    group_size: int = 64,
    bits: tuple[int, ...] = (8,),
    activation: str = "silu gate",
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
    normed: bool = False,
    unused: float = 0.0,
    one_expert: bool = False,
    seed: int = 0,
    row_bits: Literal[8, 24] = 8,
) -> LayerCase:
    """A layer whose experts hold `bits` in turn."""
    random = torch.Generator().manual_seed(seed)
    function, parts = ACTIVATIONS[activation]
    shapes = [(width, hidden)] * parts + [(hidden, width)]
    made = [[make_matrix(*shape, group_size, random) for shape in shapes] for _ in range(experts)]
    blobs = [join_matrices([matrix for matrix, _ in expert]) for expert in made]
    keep = [num_planes(bits[e % len(bits)]) for e in range(experts)]
    layer = QuantizedExperts(
        made[0][0][0].layout,
        parts,
        made[0][-1][0].layout,
        tuple(planes[:count] for (planes, _), count in zip(blobs, keep, strict=True)),
        tuple(scales for _, scales in blobs),
        function,
        activation in INTERLEAVED,
        torch.randn(experts, parts * width, generator=random) if biased else None,
        torch.randn(experts, hidden, generator=random) if biased else None,
        norm_rows if normed else None,
        row_bits=row_bits,
    )
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    if not one_expert:
        ids = torch.rand(tokens, experts, generator=random).topk(top_k, dim=1).indices
    off = torch.rand(ids.shape, generator=random) < unused
    return LayerCase(
        torch.randn(tokens, hidden, generator=random).to(dtype),
        ids.masked_fill(off, -1),
        torch.rand(ids.shape, generator=random),
        layer,
        [[weights for _, weights in expert] for expert in made],
    )


@st.composite
def layers(draw: st.DrawFn) -> LayerCase:
    """Any layer: odd sizes, mixed bits, biases, norms, unused slots, none or many tokens."""
    experts = draw(st.integers(1, 6))
    return make_layer(
        tokens=draw(st.sampled_from((0, 1, 2, 3, 7, 13, 40))),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        hidden=draw(st.integers(1, 150)),
        width=draw(st.integers(1, 150)),
        group_size=draw(st.sampled_from((32, 64))),
        bits=tuple(draw(st.permutations(PREFIX_BITS))),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        biased=draw(st.booleans()),
        normed=draw(st.booleans()),
        unused=draw(st.sampled_from((0.0, 0.3, 1.0))),
        one_expert=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
        row_bits=draw(st.sampled_from((8, 24))),
    )
