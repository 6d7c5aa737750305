"""A router's rule, and slots sorted by expert: the kernels do as operations of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.triton import router
from kernels.triton.language import INTERPRETED
from kernels.triton.router import logits
from kernels.triton.routing import CHUNK, Blocks, align, route, sort_slots
from moe.describe.routers import by_kernel, decide
from routing.routers import RouterRule, Score

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")

VALUES = st.sampled_from([-3.0, -0.5, -0.0, 0.0, 0.25, 0.5, 2.0, float("nan")])


@st.composite
def decisions(draw: st.DrawFn) -> tuple[RouterRule, Tensor]:
    """Any rule, on logits with many ties, and now and then no numbers."""
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    experts, tokens = groups * per_group, draw(st.integers(1, 3))
    score = draw(st.sampled_from(get_args(Score)))
    kept = draw(st.integers(1, groups))
    vector = st.lists(st.sampled_from([0.0, 0.5, -1.0]), min_size=experts, max_size=experts)
    correction = draw(st.none() | vector.map(torch.tensor))
    rule = RouterRule(
        draw(st.integers(1, 6)), score, correction, groups, kept,
        draw(st.sampled_from(["max", "top2"])), draw(st.booleans()),
        draw(st.sampled_from([1, 2.5])), draw(st.sampled_from([0.02, 0.4])),
        draw(st.none() | vector.map(torch.tensor)),
    )  # fmt: skip
    rows = st.lists(VALUES, min_size=tokens * experts, max_size=tokens * experts)
    logits = torch.tensor(draw(rows)).view(tokens, experts)
    if score == "mixer":
        logits = logits.nan_to_num(1.0)
        rule = RouterRule(rule.top_k, score, scale=rule.scale, mixer_threshold=rule.mixer_threshold)
    return rule, logits


@settings(max_examples=30)
@given(decisions())
def test_the_kernel_decides_as_the_rule(case: tuple[RouterRule, Tensor]) -> None:
    rule, logits = case
    found, expected = by_kernel(rule, logits), decide(rule, logits)
    assert torch.equal(found.expert_ids, expected.expert_ids)
    # A total of NaN makes the weights of the rule's unused slots NaN, too.
    weights = expected.weights.masked_fill(expected.expert_ids < 0, 0.0)
    torch.testing.assert_close(found.weights, weights, equal_nan=True)
    assert found.weights.dtype == torch.float32


@settings(max_examples=10)
@given(decisions(), st.data())
def test_padding_visits_nobody(case: tuple[RouterRule, Tensor], data: st.DataObject) -> None:
    rule, rows = case
    places = torch.tensor(data.draw(st.lists(st.sampled_from([-1, 0, 7]),
                                             min_size=len(rows), max_size=len(rows))))  # fmt: skip
    found, expected = by_kernel(rule, rows, places), by_kernel(rule, rows)
    used = (places >= 0)[:, None]
    assert torch.equal(found.expert_ids, expected.expert_ids.where(used, -1))
    weights = expected.weights.where(used, 0.0)
    torch.testing.assert_close(found.weights, weights, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=10)
@given(st.data(), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 24, 700, 1024]))
def test_logits_are_exact_products(
    data: st.DataObject, tokens: int, experts: int, hidden: int
) -> None:
    """A row has the same bits alone and in company, among few and among many."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    rows, weight = torch.randn(tokens, hidden), torch.randn(experts, hidden + 3).to(dtype)
    weight = weight[:, :hidden]  # its rows lie apart
    bias = torch.randn(experts) if data.draw(st.booleans()) else None
    at = data.draw(st.integers(0, tokens - 1))
    few = data.draw(st.sampled_from([0, router.MOST_TOKENS]))
    with patch.object(router, "MOST_TOKENS", few):
        found = logits(rows, weight, bias)
        assert torch.equal(logits(rows[at : at + 1], weight, bias)[0], found[at])
    expected = rows.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * hidden**0.5)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 40), st.integers(1, 3), st.integers(1, 9))
def test_the_kernel_aligns_as_torch_does(
    data: st.DataObject, tokens: int, slots: int, experts: int
) -> None:
    """Ids that do not exist, too: no block has them."""
    given = st.lists(st.integers(-2, experts), min_size=tokens * slots, max_size=tokens * slots)
    ids = torch.tensor(data.draw(given)).view(tokens, slots)
    check_aligned(ids, experts, data.draw(st.sampled_from([1, 3, 16])))


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(64, 8, 128), (341, 6, 60), (1, 8, 127)])
def test_the_kernel_aligns_many_slots(tokens: int, slots: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots]
    ids[torch.rand(tokens, generator=generator) < 0.2] = -1
    check_aligned(ids, experts, 16)


@settings(max_examples=12)
@given(st.data(), st.integers(1, 3 * CHUNK), st.sampled_from([1, 2, 9, 60, 511, 512]))
def test_two_kernels_sort_as_torch_does(data: st.DataObject, slots: int, experts: int) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    few = data.draw(st.sampled_from([1, experts]))  # experts that are asked for
    ids = torch.randint(-2, few + 2, (slots, 1)).to(data.draw(st.sampled_from(_INTEGERS)))
    check_aligned(ids, experts, data.draw(st.sampled_from([1, 3, 64])), sort_slots)


@pytest.mark.parametrize(
    ("slots", "experts"),
    [(CHUNK, 4), (9 * CHUNK, 128), pytest.param(65_536, 512, marks=pytest.mark.deep)],
)
def test_two_kernels_sort_many_slots(slots: int, experts: int) -> None:
    torch.manual_seed(slots)
    check_aligned(torch.randint(-1, experts, (slots, 1)), experts, 128, sort_slots)


_INTEGERS = torch.int32, torch.int64


def check_aligned(
    ids: Tensor, experts: int, rows: int, kernel: Callable[..., Blocks] = align
) -> None:
    found, expected = kernel(ids.flatten(), experts, rows), route(ids, experts, rows)
    assert torch.equal(found.order_S, expected.order_S)
    assert torch.equal(found.offsets_E1, expected.offsets_E1)
    assert torch.equal(found.expert_B, expected.expert_B)
    used = expected.expert_B >= 0
    assert torch.equal(found.first_B[used], expected.first_B[used])
