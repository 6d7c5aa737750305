"""A call cut into waves of ascending experts gives the bits of one call, by every kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import Forward, experts_forward, reference
from kernels.cpu import choose_kernel
from kernels.reference import AnyExperts
from routing import Routing
from tests.kernels.kernel_cases import Case, cases, make_case
from tests.kernels.plane_cases import LayerCase, layers


def check_waves(forward: Forward, case: Case | LayerCase, cuts: list[int]) -> None:
    """Compare one call with a call for each range of experts between the cuts."""
    hidden, ids, weights, experts = case.arguments
    routing = Routing(ids, weights).ascending()
    whole = forward(hidden, routing.expert_ids, routing.weights, experts)
    bounds = [0, *sorted(cuts), experts.num_experts]
    total = torch.zeros(hidden.shape)
    for begin, end in pairwise(bounds):
        inside = (routing.expert_ids >= begin) & (routing.expert_ids < end)
        wave = routing.expert_ids.where(inside, -1)
        assert forward(hidden, wave, routing.weights, experts, total) is total
    assert torch.equal(total.to(hidden.dtype), whole)


cuts = st.lists(st.integers(0, 9), max_size=4)


def within(numbers: list[int], experts: AnyExperts) -> list[int]:
    return [min(number, experts.num_experts) for number in numbers]


@given(case=cases(), numbers=cuts)
def test_whole_weights(case: Case, numbers: list[int]) -> None:
    assert choose_kernel()[0] is not None
    check_waves(experts_forward, case, within(numbers, case.experts))
    check_waves(reference.experts_forward, case, within(numbers, case.experts))


@given(case=layers(), numbers=cuts)
def test_bit_planes(case: LayerCase, numbers: list[int]) -> None:
    experts = case.arguments[-1]
    check_waves(experts_forward, case, within(numbers, experts))
    check_waves(reference.experts_forward, case, within(numbers, experts))


@pytest.mark.parametrize("numbers", [[2], [1, 3], [1, 2, 3, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton(numbers: list[int], dtype: torch.dtype) -> None:
    triton = pytest.importorskip("kernels.triton.experts")
    case = make_case(5, experts=4, top_k=3, hidden=40, width=24, dtype=dtype, unused=0.2)
    check_waves(triton.experts_forward, case, numbers)


def test_the_sum_of_a_float64_layer_is_float64() -> None:
    case = make_case(3, experts=4, top_k=2, hidden=8, width=8, dtype=torch.float64)
    total = torch.zeros(3, 8, dtype=torch.float64)
    whole = reference.experts_forward(*case.arguments)
    assert torch.equal(reference.experts_forward(*case.arguments, total), whole)


@pytest.mark.parametrize(
    "total",
    [torch.zeros(3, 7), torch.zeros(3, 8, dtype=torch.float64), torch.zeros(8, 3).T],
    ids=["shape", "dtype", "strides"],
)
@pytest.mark.parametrize("forward", [experts_forward, reference.experts_forward])
def test_refuses_a_sum_that_does_not_fit(forward: Forward, total: Tensor) -> None:
    case = make_case(3, experts=4, top_k=2, hidden=8, width=8)
    with pytest.raises(ValueError, match=r"the sum so far must be \(3, 8\) torch.float32"):
        forward(*case.arguments, total)
