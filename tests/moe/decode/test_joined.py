"""Projections that read the same rows become one matrix, whose memory they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from kernels import PlaneMatrix, linear_forward
from moe.decode.joined import Weight, as_one, join, with_joined
from moe.decode.proof import parts_of
from moe.describe.description import Attention, FeedForward, LatentAttention, Projection
from moe.describe.parts import describe_projection
from tests.moe.decode.description_cases import Maker


def leaves(kind: str, rows: list[int]) -> list[nn.Module]:
    made = [nn.Linear(40, count, bias=False).requires_grad_(False) for count in rows]
    if kind == "planes":
        return [QuantizedLinear.of(linear, 32, 4) for linear in made]
    return [linear.bfloat16() if kind == "bf16" else linear for linear in made]


def described(leaf: nn.Module) -> Projection:
    if isinstance(leaf, QuantizedLinear):
        return describe_projection(leaf)
    assert isinstance(leaf, nn.Linear)
    return Projection(leaf.weight.detach(), None, leaf)


def feed_of(gate: nn.Module, up: nn.Module) -> FeedForward:
    return FeedForward(described(gate), described(up), described(nn.Linear(9, 40)), "silu")


def product(weight: Weight, rows: Tensor) -> Tensor:
    if isinstance(weight, PlaneMatrix):
        return linear_forward(rows, weight)
    return rows.to(weight.dtype) @ weight.T


def joined_feed(gate: nn.Module, up: nn.Module, description: Any) -> FeedForward:
    """The feed of both modules, in a description of one layer, once they are joined."""

    def whole() -> Any:
        (layer,) = description.layers
        return type(description)(**vars(description) | {"layers": (with_feed(layer),)})

    def with_feed(layer: Any) -> Any:
        return type(layer)(**vars(layer) | {"feed": feed_of(gate, up)})

    modules = modules_of(whole())
    join(whole(), dict(zip(modules, modules, strict=True)))
    feed = with_joined(whole()).layers[0].feed
    assert isinstance(feed, FeedForward)
    return feed


def modules_of(description: Any) -> list[nn.Module]:
    return [projection.leaf for projection in parts_of(description, Projection)]


@pytest.mark.parametrize("kind", ["float32", "bf16", "planes"])
@given(data=st.data(), first=st.integers(1, 40), second=st.integers(1, 40))
def test_products_are_those_of_each(
    kind: str, data: st.DataObject, first: int, second: int
) -> None:
    gate, up = leaves(kind, [first, second])
    rows = torch.randn(3, 40)
    expected = [product(described(leaf).weight, rows) for leaf in (gate, up)]
    feed = joined_feed(gate, up, Maker(data, 40).description(1))
    for leaf, before in zip((gate, up), expected, strict=True):
        torch.testing.assert_close(product(described(leaf).weight, rows), before)
    if kind == "planes" and first % 16:  # they would share a block
        assert feed.joined is None
        return
    assert feed.joined is not None
    found = product(feed.joined, rows).split([first, second], 1)
    torch.testing.assert_close(list(found), expected)
    storages = {blob.untyped_storage().data_ptr() for blob in blobs_of(feed)}
    assert len(storages) == (4 if kind == "planes" else 1)


def blobs_of(feed: FeedForward) -> list[Tensor]:
    found = []
    for weight in (feed.gate.weight, feed.up.weight, feed.joined):
        assert weight is not None
        found += [*weight.planes, weight.scales] if isinstance(weight, PlaneMatrix) else [weight]
    return found


def test_other_weights_stay_as_they_are() -> None:
    plain = nn.Linear(40, 16, bias=False).requires_grad_(False)
    assert as_one([plain.weight, nn.Linear(40, 16).weight]) is None
    planes = QuantizedLinear.of(plain, 32, 4).matrix
    assert as_one([plain.weight, planes]) is None
    assert as_one([planes, QuantizedLinear.of(plain, 64, 4).matrix]) is None
    whole = torch.randn(6, 4)
    assert as_one([whole[:2], whole[3:]]) is None
    found = as_one([whole[1:2], whole[2:6]])
    assert isinstance(found, Tensor)
    assert torch.equal(found, whole[1:])


@given(st.data())
def test_parts_of_any_description_are_joined(data: st.DataObject) -> None:
    """All whole weights of one dtype; no two tensors hold their bytes."""
    maker = Maker(data, 8, whole=True)
    maker.dtype = torch.float32
    description = maker.description(2)
    leaves = modules_of(description)
    join(description, dict(zip(leaves, leaves, strict=True)))
    for layer in with_joined(description).layers:
        a = layer.attention
        assert isinstance(a, (Attention, LatentAttention))
        assert isinstance(a.joined, Tensor)
        first = (a.q if a.q_a is None else a.q_a) if isinstance(a, LatentAttention) else a.q
        assert isinstance(first.weight, Tensor)
        assert a.joined.data_ptr() == first.weight.data_ptr()
        assert a.joined.untyped_storage().nbytes() == a.joined.nbytes
