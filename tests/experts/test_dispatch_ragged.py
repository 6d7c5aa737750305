"""Ranks whose tokens visit different numbers of experts, as ReLU routers let them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.dispatch import AllToAllDispatcher
from routing import Routing
from tests.experts.dispatch_cases import ThreadExchange, on_ranks, random_placement
from tests.experts.test_dispatch import LAYER, alone, pass_through
from tests.kernels.kernel_cases import make_case

TOKENS, EXPERTS = 9, 8


def own_slots(routing: Routing) -> Routing:
    """As wide as a router that has seen these tokens alone would make it."""
    width = max(int((routing.expert_ids >= 0).sum(1).max()), 1) if routing.num_tokens else 1
    ordered = routing.ascending()
    return Routing(ordered.expert_ids[:, :width], ordered.weights[:, :width])


@pytest.mark.parametrize("combine", ["exact", "summed"])
@pytest.mark.parametrize("buffer_rows", [0, 4])
@given(
    seed=st.integers(0, 99), ranks=st.integers(2, 4), unused=st.sampled_from([0.0, 0.3, 0.7, 0.95])
)
def test_ranks_may_bring_different_numbers_of_slots(
    combine: Literal["exact", "summed"], buffer_rows: int, seed: int, ranks: int, unused: float
) -> None:
    case = make_case(TOKENS, EXPERTS, 5, 16, 8, unused=unused, seed=seed)
    hidden, routing, experts, whole = alone(case)
    owner = torch.randint(0, ranks, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    placements = [random_placement(EXPERTS, ranks, 2, seed)] * (LAYER + 1)

    def run(exchange: ThreadExchange) -> Tensor:
        dispatcher = AllToAllDispatcher(
            exchange, placements, combine=combine, buffer_rows=buffer_rows
        )
        mine = owner == exchange.rank
        part = own_slots(Routing(routing.expert_ids[mine], routing.weights[mine]))
        return pass_through(dispatcher, hidden[mine], part, experts).rows

    for rank, rows in enumerate(on_ranks(ranks, run)):
        assert not isinstance(rows, Exception), rows
        expected = whole[owner == rank]
        if combine == "exact":
            assert torch.equal(rows, expected)
        else:
            torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
