"""The reference on bit planes: right to float64, and clear about bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import PlaneMatrix, reference
from kernels.planes import PREFIX_BITS, PlaneLayout
from tests.kernels.plane_cases import (
    Expected,
    LayerCase,
    first_bits,
    layers,
    linear_oracle,
    make_layer,
    make_matrix,
)


@given(
    rows=st.integers(1, 50),
    columns=st.integers(1, 200),
    group_size=st.sampled_from((32, 64)),
    bits=st.sampled_from(PREFIX_BITS),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_linear_equals_the_float64_oracle(
    rows: int, columns: int, group_size: int, bits: int, biased: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    matrix, weights = make_matrix(rows, columns, group_size, random, biased)
    x = torch.randn(5, columns, generator=random)
    expected = linear_oracle(x.numpy(), weights, bits, matrix.bias)
    actual = reference.linear_forward(x, first_bits(matrix, bits))
    Expected(expected, torch.zeros(5).numpy()).check(actual)


@given(layers())
def test_experts_equal_the_float64_oracle(case: LayerCase) -> None:
    case.expected().check(reference.experts_forward(*case.arguments))


def test_fewer_bits_share_the_memory_of_more() -> None:
    experts = make_layer(1, experts=4, top_k=1, hidden=70, width=20, bits=(8, 2, 4, 3)).experts
    assert [experts.bits_of(e) for e in range(4)] == [8, 2, 4, 3]
    small = experts.at_most(4)
    assert [small.bits_of(e) for e in range(4)] == [4, 2, 4, 3]
    assert small.planes[0][1] is experts.planes[0][1]
    assert experts.at_most(8).planes == experts.planes


def test_sizes_of_a_layer() -> None:
    bits = 8, 2, 4, 3
    case = make_layer(1, experts=4, top_k=1, hidden=70, width=20, bits=bits, biased=True)
    experts = case.experts
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (4, 70, 20)
    codes = 2 * 32 * 128 + 80 * 64
    scales, biases = 2 * (2 * 32 * 2 + 80), 4 * (40 + 70)
    sizes = [codes * own // 8 + scales + biases for own in bits]
    assert [experts.expert_bytes_of(e) for e in range(4)] == sizes
    assert experts.expert_bytes == sum(sizes) // 4


def test_tiny_and_bad_activations() -> None:
    matrix, _ = make_matrix(3, 64, 64, torch.Generator().manual_seed(0))
    x = torch.stack((torch.full((64,), 1e-31), torch.zeros(64), torch.ones(64)))
    x[2, 5] = float("nan")
    output = reference.linear_forward(x, matrix)
    assert (output[:2] == 0).all()
    assert output[2].isnan().all()


def test_refuses_blobs_that_do_not_fit() -> None:
    layout = PlaneLayout(16, 64)
    plane, scales = torch.zeros(256, dtype=torch.uint8), torch.zeros(16, dtype=torch.float16)
    with pytest.raises(ValueError, match="a matrix must hold 1 to 4 planes, got 0"):
        PlaneMatrix(layout, (), scales)
    with pytest.raises(
        ValueError, match=r"plane 0 of a matrix must be \(256,\) uint8 and contig.*\(255"
    ):
        PlaneMatrix(layout, (plane[1:],), scales)
    with pytest.raises(ValueError, match=r"scales of a matrix must be \(16,\) float16 and contig"):
        PlaneMatrix(layout, (plane,), scales.float())
    with pytest.raises(ValueError, match=r"plane 0 of a matrix must be \(256,\) uint8 and contig"):
        PlaneMatrix(layout, (torch.zeros(512, dtype=torch.uint8)[::2],), scales)
    with pytest.raises(ValueError, match="planes and scales of a matrix must be on one device"):
        PlaneMatrix(layout, (plane.to("meta"),), scales)
    matrix = PlaneMatrix(layout, (plane,), scales)
    with pytest.raises(ValueError, match=r"x must be \(T, 64\), got \(2, 63\)"):
        reference.linear_forward(torch.zeros(2, 63), matrix)


def test_refuses_layers_that_do_not_fit() -> None:
    experts = make_layer(1, experts=2, top_k=1, hidden=64, width=16).experts
    with pytest.raises(ValueError, match="1 part, or 2 to interleave, got 3"):
        replace(experts, parts=3)
    with pytest.raises(ValueError, match="got 64x17 and 16x64"):
        replace(experts, second=PlaneLayout(64, 17))
    with pytest.raises(ValueError, match="at least one expert"):
        replace(experts, planes=(), scales=())
    with pytest.raises(ValueError, match="2 experts' planes, 1 scales"):
        replace(experts, scales=experts.scales[:1])
    short = (*experts.planes[1][:2], experts.planes[1][2][1:])
    with pytest.raises(ValueError, match="plane 2 of expert 1 must be"):
        replace(experts, planes=(experts.planes[0], short))
