"""The small operations of a layer, in Triton's interpreter, against torch in float64."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.triton.attention import BLOCK
from kernels.triton.language import INTERPRETED
from kernels.triton.rows import (
    Heads,
    RowNorm,
    Turn,
    add_norm,
    add_shared,
    gated,
    place_heads,
    store,
)
from moe.describe.description import RotaryTable, Rotation, Style
from moe.describe.parts import ACTIVATIONS, rotate
from tests.amounts import amount

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")

HALVES = st.sampled_from([torch.float32, torch.bfloat16])
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def nearly(dtype: torch.dtype) -> dict[str, Any]:
    """The interpreter cuts bf16 off, where a device rounds."""
    return CLOSE if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}


def norms(draw: Any, size: int) -> RowNorm | None:
    if not draw(st.booleans()):
        return None
    centered = draw(st.booleans())
    return RowNorm(torch.rand(size) + 0.5, torch.randn(size) if centered else None, 1e-5, centered)


def normed(norm: RowNorm | None, x: Tensor) -> Tensor:
    """In float64."""
    if norm is None:
        return x
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


@settings(max_examples=15)
@given(st.data())
def test_sums_and_norms(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    size, dtype = data.draw(st.sampled_from([1, 8, 70, 1500])), data.draw(HALVES)
    x, rows = torch.randn(3, size), torch.randn(3, size).to(dtype)
    post, norm = norms(data.draw, size), norms(data.draw, size)
    whole = x.double() + 0.5 * normed(post, rows.double())
    expected = normed(norm, whole)
    exact, rounded = torch.empty(3, size), torch.empty(3, size, dtype=dtype)
    add_norm(x, rows, 0.5, post, norm, exact, rounded)
    torch.testing.assert_close(x.double(), whole, **CLOSE)
    torch.testing.assert_close(exact.double(), expected, **CLOSE)
    torch.testing.assert_close(rounded, exact.to(dtype), **nearly(dtype))
    before = x.clone()
    add_norm(x, None, 1.0, None, norm, exact, rounded)
    assert torch.equal(x, before)
    torch.testing.assert_close(exact.double(), expected, **CLOSE)


@settings(max_examples=amount(25, 10))
@given(st.data())
def test_heads_are_turned_and_placed(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    dtype, turned = data.draw(HALVES), data.draw(st.sampled_from([2, 4, 12]))
    slots = torch.tensor([3, -1, 2 * BLOCK + 63])
    angles = torch.randn(3, turned // 2)
    cos, sin = angles.cos(), angles.sin()
    table = RotaryTable(lambda at: (at[..., None].cos(), at[..., None].sin()))
    heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    parts, expected = [], []
    for count in (*heads, heads[1]):
        size = turned + data.draw(st.sampled_from([0, 3, 8]))
        rows = torch.randn(3, count, size + 2).to(dtype)[..., :size]  # heads lie apart
        bias = torch.randn(count * size) if data.draw(st.booleans()) else None
        norm, late, turn = norms(data.draw, size), data.draw(st.booleans()), None
        x = rows.double() if bias is None else rows.double() + bias.double().view(count, size)
        x = x if late else normed(norm, x)
        if data.draw(st.booleans()):
            style = data.draw(st.sampled_from(get_args(Style)))
            begin = data.draw(st.sampled_from([0, size - turned]))
            turn = Turn(style, begin, turned, cos, sin)
            x = rotate(Rotation(style, begin, turned, table), x, cos.double(), sin.double())
        parts.append(Heads(rows, bias, norm, turn, late))
        expected.append(normed(norm, x) if late else x)
    output = torch.empty(3, heads[0], expected[0].shape[2], dtype=dtype)
    pools = [torch.full((4, heads[1], BLOCK, e.shape[2]), 7.0).to(dtype) for e in expected[1:]]
    wanted = [pool.clone() for pool in pools]
    others = [part.clone() for part in (output, *pools)]
    place_heads(parts[0], parts[1], parts[2], output, pools[0], pools[1], slots)
    with pytest.MonkeyPatch.context() as patch:  # several rows of a program, not all of them full
        patch.setattr("kernels.triton.rows._MANY_HEADS", 0)
        patch.setattr("kernels.triton.rows.PLACED", 2)
        place_heads(parts[0], parts[1], parts[2], others[0], others[1], others[2], slots)
    for one, other in zip((output, *pools), others, strict=True):
        assert torch.equal(one, other)
    near = nearly(dtype)
    torch.testing.assert_close(output.double(), expected[0], **near)
    for pool, want, rows in zip(pools, wanted, expected[1:], strict=True):
        for row, slot in ((0, 3), (2, 2 * BLOCK + 63)):
            want[slot // BLOCK, :, slot % BLOCK] = rows[row].to(dtype)
        torch.testing.assert_close(pool, want, **near)


@given(st.integers(1, 3), st.integers(1, 300), HALVES)
@settings(max_examples=5)
def test_rows_of_prompts_are_placed(heads: int, tokens: int, dtype: torch.dtype) -> None:
    slots = torch.randperm(6 * BLOCK)[:tokens]
    rows = [torch.randn(heads, tokens, size).transpose(0, 1) for size in (5, 16)]
    pools = [torch.zeros(6, heads, BLOCK, part.shape[2], dtype=dtype) for part in rows]
    store(rows[0], rows[1], pools[0], pools[1], slots)
    for pool, part in zip(pools, rows, strict=True):
        found = pool[slots // BLOCK, :, slots % BLOCK]
        torch.testing.assert_close(found, part.to(dtype), **nearly(dtype))
        assert pool.count_nonzero() == part.to(dtype).count_nonzero()


@pytest.mark.parametrize("number", range(4))
def test_activations_with_gates(number: int) -> None:
    name = ("silu", "gelu_tanh", "gelu", "relu")[number]
    first, up = torch.randn(3, 2 * 1100).bfloat16().split(1100, 1)  # rows lie apart
    output = torch.empty(3, 1100)
    gated(first, up, number, output)
    expected = ACTIVATIONS[name](first.double()) * up.double()  # type: ignore[index]
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_shared_expert_is_added_to_routed_ones(has_gate: bool) -> None:
    routed, shared = torch.randn(3, 1100), torch.randn(3, 1100).bfloat16()
    gate = torch.tensor([[-100.0], [0.3], [2.0]]).bfloat16() if has_gate else None
    output = torch.empty(3, 1100)
    add_shared(routed, 0.7, shared, gate, output)
    share = 1.0 if gate is None else gate.double().sigmoid()
    expected = 0.7 * routed.double() + share * shared.double()
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
