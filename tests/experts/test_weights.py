"""Experts as planes: what comes back, and which columns an activation pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from experts.weights import (
    ExpertKey,
    dequantize_experts,
    is_interleaved,
    join_parts,
    quantize_experts,
    split_parts,
)
from kernels import experts_forward, planes
from tests.experts.expert_cases import ACTIVATIONS, some_experts


@given(
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    width=st.integers(1, 70),
    hidden=st.integers(1, 70),
    group_size=st.sampled_from(planes.GROUP_SIZES),
    biases=st.booleans(),
)
def test_weights_come_back_within_half_a_step(
    activation: str, width: int, hidden: int, group_size: int, biases: bool
) -> None:
    whole = some_experts(activation, width=width, hidden=hidden, biases=biases)
    if width == 1 and activation == "interleaved":
        return  # one column each: the two orders are the same
    quantized = quantize_experts(whole, group_size)
    back = dequantize_experts(quantized)
    assert quantized.interleaved == (activation == "interleaved")
    for mine, theirs in ((back.gate_up_EGH, whole.gate_up_EGH), (back.down_EHF, whole.down_EHF)):
        for start in range(0, theirs.shape[-1], group_size):
            group = theirs[..., start : start + group_size]
            step = group.abs().amax(-1, keepdim=True) / 112
            assert ((mine[..., start : start + group_size] - group).abs() <= 0.51 * step).all()
    assert back.gate_up_bias_EG is whole.gate_up_bias_EG
    assert back.down_bias_EH is whole.down_bias_EH


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fewer_bits_are_a_prefix_of_the_same_planes(activation: str, bits: int) -> None:
    whole = some_experts(activation)
    some, prefix = quantize_experts(whole, 32, bits), quantize_experts(whole, 32).at_most(bits)
    for mine, theirs in zip(some.planes, prefix.planes, strict=True):
        assert len(mine) == len(theirs)
        assert all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, some.scales, prefix.scales))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_are_those_of_whole_experts(activation: str) -> None:
    """8 bits of weights and of activations: a few thousandths of the largest output, mostly; a
    gate's product of two errors can be as much as 3 hundredths, hence the seed."""
    torch.manual_seed(0)
    whole = some_experts(activation, width=64, hidden=96, biases=True)
    hidden, ids = torch.randn(5, 96), torch.randint(3, (5, 2))
    weights = torch.rand(5, 2)
    got = experts_forward(hidden, ids, weights, quantize_experts(whole))
    expected = experts_forward(hidden, ids, weights, whole)
    assert (got - expected).abs().max() < 0.03 * expected.abs().max()


def swapped(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return silu(up) * gate


def reversed_pairs(rows: Tensor) -> Tensor:
    return rows[..., : rows.shape[-1] // 2] * rows.flip(-1)[..., : rows.shape[-1] // 2]


@pytest.mark.parametrize("width", [2, 3, 64])
def test_the_order_of_gate_and_up_is_found(width: int) -> None:
    assert not is_interleaved(ACTIVATIONS["concatenated"], width)
    assert not is_interleaved(swapped, width)
    assert is_interleaved(ACTIVATIONS["interleaved"], width)
    with pytest.raises(ValueError, match="neither side by side nor one after the other"):
        is_interleaved(reversed_pairs, width)


@pytest.mark.parametrize("interleaved", [False, True])
def test_split_and_join(interleaved: bool) -> None:
    rows = torch.arange(12.0).view(6, 2)
    parts = split_parts(rows, 2, interleaved)
    assert parts[0, 1].tolist() == ([4, 5] if interleaved else [2, 3])
    assert torch.equal(join_parts(parts, interleaved), rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_weights_that_cannot_be_quantized(bad: float) -> None:
    whole = some_experts()
    whole.down_EHF[1, 2, 3] = bad
    with pytest.raises(ValueError, match="must be finite and below"):
        quantize_experts(whole)


def test_keys_sort_by_layer_then_expert() -> None:
    assert sorted([ExpertKey(1, 0), ExpertKey(0, 7)]) == [ExpertKey(0, 7), ExpertKey(1, 0)]
