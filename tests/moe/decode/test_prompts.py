"""Norms and positions of prompts by compiled code: what float64 says, rows that do not mix, and
used only where prompts come out the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import choose_kernel
from kernels.cpu.build import load_library
from kernels.cpu.dense import NativeNorms
from moe.decode.prompts import _read, fuse_prompts
from moe.decode.proof import parts_of
from moe.decode.records import DescriptionRecords
from moe.describe.description import Attention, Description, HeadNorm, Norm
from moe.describe.parts import rotate
from moe.network.backbone import Backbone
from tests.kernels.kernel_cases import TARGET_PARAMS
from tests.moe.decode.description_cases import Maker, table
from tests.moe.decode.test_probe import (
    Change,
    described,
    in_attention,
    in_rotation,
    in_view,
    trunk_of,
)

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")


@pytest.fixture(scope="module", params=TARGET_PARAMS)
def native(request: pytest.FixtureRequest) -> NativeNorms:
    return NativeNorms(load_library((request.param,)))


def normed(norm: Norm | None, x: Tensor) -> Tensor:
    """Float64."""
    if norm is None:
        return x
    x = x - x.mean(-1, keepdim=True) if norm.centered else x
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return x if norm.bias is None else x + norm.bias


@settings(max_examples=30)
@given(st.data(), st.integers(0, 2**31))
def test_norms_are_what_float64_says_and_rows_do_not_mix(
    native: NativeNorms, data: st.DataObject, seed: int
) -> None:
    torch.manual_seed(seed)
    size, rows = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([1, 2, 90, 700]))
    norm, keeper = Maker(data, size).norm(size), DescriptionRecords()
    x = torch.randn(rows, size) * data.draw(st.sampled_from([1e-4, 1.0, 1e3]))
    actual = native.norm(keeper.norm(norm), x)
    expected = normed(norm, x.double())
    # A mean that is taken off leaves the last bits of what it was taken off from.
    spread = (x.double().var(-1, correction=0) + norm.eps).sqrt()
    allowed = 4e-6 * (1 + x.abs().amax(-1) / spread)[:, None]
    assert bool(((actual - expected).abs() <= allowed * expected.abs().clamp_min(1)).all())
    one = data.draw(st.integers(0, rows - 1))
    assert torch.equal(native.norm(keeper.norm(norm), x[None, one]), actual[None, one])


@settings(max_examples=30)
@given(st.data(), st.integers(0, 2**31))
def test_heads_come_to_their_positions(native: NativeNorms, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    maker, keeper = Maker(data, 8, whole=True), DescriptionRecords()
    a = maker.grouped(0)
    x = torch.randn(data.draw(st.sampled_from([1, 3, 200])), a.heads * a.head_dim)
    positions = torch.randint(1000, (len(x),))
    queries, _ = keeper.heads(a)
    actual = x.clone()
    native.turn(queries, actual, positions)
    expected = turned(a, a.q_norm, x.double(), positions)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    one = x[-1:].clone()
    native.turn(queries, one, positions[-1:])
    assert torch.equal(one, actual[-1:])


def turned(a: Attention, own: HeadNorm | None, x: Tensor, positions: Tensor) -> Tensor:
    if own is not None and not own.per_head:
        x = normed(own.norm, x)
    states = x.unflatten(-1, (-1, a.head_dim))
    each = own.norm if own is not None and own.per_head else None
    if own is None or not own.after_rotation:
        states = normed(each, states)
    if a.rotation is not None:
        cos, sin = (t[positions].double() for t in (a.rotation.table.cos, a.rotation.table.sin))
        states = rotate(a.rotation, states, cos, sin)
    if own is not None and own.after_rotation:
        states = normed(each, states)
    return states.flatten(1)


def fused(backbone: Backbone, description: Description) -> str:
    kernel, _ = choose_kernel()
    assert kernel is not None
    return fuse_prompts(backbone, description, kernel.norms)


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_moe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "minimax_m2", "deepseek_v3"],
)
@torch.inference_mode()
def test_prompts_of_described_models_come_out_the_same(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = trunk_of(architecture)
    description, calls = described(backbone), list[str]()
    for name in ("norm", "turn"):
        monkeypatch.setattr(NativeNorms, name, counted(name, getattr(NativeNorms, name), calls))
    assert fused(backbone, description) == "prompts by compiled norms and positions"
    calls.clear()
    passes, norms = 2, len(list(parts_of(description, Norm)))
    heads = [a for a in parts_of(description, Attention) for n in (a.q_norm, a.k_norm) if n]
    _read(backbone)
    assert calls.count("norm") == passes * (norms - len(heads))
    assert calls.count("turn") == passes * 2 * len(list(parts_of(description, Attention)))


def counted(name: str, method: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append(name)
        return method(*arguments)

    return call


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("qwen3_moe", in_rotation(style="pairs")),
        ("qwen3_moe", in_attention(k_norm=None)),
        ("mixtral", in_view(scale=0.251)),
        ("mixtral", in_attention(heads=3)),
        ("deepseek_v3", lambda layer: replace(layer, feed_norm=wrong(layer.feed_norm))),
    ],
)
@torch.inference_mode()
def test_other_prompts_are_left_to_transformers_as_they_were(
    architecture: str, change: Change
) -> None:
    backbone = trunk_of(architecture)
    own = [vars(module).get("forward") for module in backbone.model.modules()]
    description, before = described(backbone), torch.cat(_read(backbone).logits)
    layers = [*description.layers[:-1], change(description.layers[-1])]
    said = fused(backbone, replace(description, layers=tuple(layers)))
    assert said.startswith("prompts left to transformers: "), said
    assert torch.equal(torch.cat(_read(backbone).logits), before)
    assert [vars(module).get("forward") for module in backbone.model.modules()] == own


def wrong(norm: Norm | None) -> Norm:
    assert norm is not None
    return replace(norm, weight=norm.weight * 1.01)


def test_a_table_stays_where_it_was_for_those_who_have_its_address() -> None:
    rotary = table(8)
    before = weakref.ref(rotary.cos)
    rotary.reserve(5000)
    kept = before()
    assert kept is not None
    assert torch.equal(rotary.cos[: len(kept)], kept)
