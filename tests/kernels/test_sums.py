"""Rows summed apart from their experts give the bits of the whole layer, by every kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import Forward, experts_forward, reference, weighted_sum
from kernels.cpu import choose_kernel
from routing import Routing
from tests.kernels.kernel_cases import Case, cases
from tests.kernels.plane_cases import LayerCase, layers


def in_pieces(forward: Forward, case: Case | LayerCase, seed: int) -> tuple[Tensor, Tensor]:
    """The layer at once, and each slot by itself in any order, then summed."""
    hidden, ids, weights, experts = case.arguments
    routing = Routing(ids, weights).ascending()
    whole = forward(hidden, routing.expert_ids, routing.weights, experts)
    token, slot = (routing.expert_ids >= 0).nonzero(as_tuple=True)
    order = torch.randperm(len(token), generator=torch.Generator().manual_seed(seed))
    token, slot = token[order], slot[order]
    rows = torch.zeros(len(token), hidden.shape[1])
    ones = torch.ones(len(token), 1)
    forward(hidden[token], routing.expert_ids[token, slot][:, None], ones, experts, rows)
    position = torch.full(ids.shape, -1)
    position[token, slot] = torch.arange(len(token))
    return whole, weighted_sum(rows, position, routing.weights, hidden.dtype)


@given(case=st.one_of(cases(), layers()), seed=st.integers(0, 9))
def test_slot_by_slot(case: Case | LayerCase, seed: int) -> None:
    assert choose_kernel()[0] is not None
    whole, pieces = in_pieces(experts_forward, case, seed)
    assert torch.equal(whole, pieces)


@given(
    tokens=st.integers(0, 5),
    slots=st.integers(1, 4),
    width=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_all_kernels_sum_alike(
    tokens: int, slots: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, width, generator=random)
    position = torch.randint(-1, 7, (tokens, slots), generator=random)
    weights = torch.rand(tokens, slots, generator=random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.choose_kernel", lambda: (None, ""))
        plain = weighted_sum(rows, position, weights, dtype)
    assert torch.equal(weighted_sum(rows, position, weights, dtype), plain)


def test_reference_layer_is_that_sum() -> None:
    """Whole-number rows: products of any matrix routine are exact, only the sum can differ."""
    experts, width = 5, 8
    random = torch.Generator().manual_seed(1)
    eye = torch.eye(width).expand(experts, -1, -1).contiguous()
    layer = reference.ExpertWeights(eye, eye.clone(), activation=lambda rows: rows)
    hidden = torch.randint(-9, 9, (6, width), generator=random).float()
    ids = torch.stack([torch.randperm(experts, generator=random)[:3] for _ in range(6)])
    routing = Routing(ids, torch.rand(6, 3, generator=random)).ascending()
    whole = reference.experts_forward(hidden, routing.expert_ids, routing.weights, layer)
    position = torch.arange(6)[:, None].expand(6, 3)
    assert torch.equal(weighted_sum(hidden, position, routing.weights, torch.float32), whole)
