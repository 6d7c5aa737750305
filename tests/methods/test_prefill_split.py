"""Prefill apart in simulation: against what arithmetic says, and a recommendation either way."""

from __future__ import annotations

import pytest

from moe.commands.plan.ranks import EngineCosts
from moe.methods.prefill_apart.planner import (
    Workload,
    advise,
    compare,
    recommend,
    serve_apart,
    serve_together,
    typical_load,
)

COSTS = EngineCosts(lambda _: 0.010, lambda tokens: tokens / 1000, 100, handover_s=lambda _: 0.5)


def test_a_lone_request_takes_the_sum_of_its_parts() -> None:
    lone = Workload(prompt=250, answer=11, requests_per_s=1e-3, requests=3)
    together = serve_together(COSTS, 2, lone)
    assert (together.ttft_p50, together.ttft_p99) == pytest.approx((0.25, 0.25))
    assert (together.tbt_p50, together.tbt_p99) == pytest.approx((0.010, 0.010))
    apart = serve_apart(COSTS, 1, 1, lone)
    assert apart.ttft_p50 == pytest.approx(0.25 + 0.5 + 0.001)
    assert apart.tbt_p99 == pytest.approx(0.010)


def test_a_prompt_holds_up_those_that_decode_beside_it_and_none_apart() -> None:
    work = Workload(prompt=400, answer=20, requests_per_s=2.0, requests=200)
    assert serve_together(COSTS, 1, work).tbt_p99 == pytest.approx(0.110)
    assert serve_apart(COSTS, 1, 1, work).tbt_p99 <= 0.0111


@pytest.mark.deep
def test_every_request_is_answered_and_engines_share_the_load() -> None:
    work = typical_load(COSTS, 4)
    assert work.requests_per_s * (COSTS.prompt_s(2048) + 256 * 0.010 / 16) == pytest.approx(2.4)
    served = compare(COSTS, 4, work)
    assert [each.prefill for each in served] == [0, 1, 2, 3]
    least = work.requests * COSTS.prompt_s(work.prompt) / 4
    assert all(each.seconds >= least for each in served)
    assert [each.name for each in compare(COSTS, 40, typical_load(COSTS, 40))][1] == "1 of 8 read"


def test_it_is_recommended_where_prompts_stall_and_not_where_they_do_not() -> None:
    costs = EngineCosts(lambda _: 0.010, lambda tokens: tokens / 20_000, 512, lambda _: 0.05)
    chosen, why = recommend(compare(costs, 4, typical_load(costs, 4)))
    assert chosen is not None
    assert 1 <= chosen.prefill <= 3
    assert "ms in place of" in why
    light = EngineCosts(lambda _: 0.050, lambda tokens: tokens / 1_000_000, 512, lambda _: 0.05)
    assert recommend(compare(light, 4, typical_load(light, 4)))[0] is None
    slow_link = EngineCosts(costs.step_s, costs.chunk_s, 512, handover_s=lambda _: 60.0)
    chosen, why = recommend(compare(slow_link, 4, typical_load(slow_link, 4)))
    assert chosen is None
    assert why.startswith("every split makes prompts wait too long")
    assert recommend(compare(costs, 1, typical_load(costs, 1))) == (
        None,
        "it takes two engines at least",
    )


def test_what_moe_plan_says_of_it() -> None:
    made = advise(COSTS, 4)
    assert [one["prefill"] for one in made.simulated] == [0, 1, 2, 3]
    assert made.advice.startswith("Prefill apart (methods.prefill_apart.role): ")
    assert "the longest gaps between tokens (p99) are" in made.advice
    assert "prompts of 2,048 new tokens in chunks of 100" in made.assumption
    unfit = advise(None, 4)
    assert "a model must fit into each rank" in unfit.advice
    assert not unfit.simulated
    assert not unfit.assumption
