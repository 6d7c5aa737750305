"""Plans for several ranks: what they send is counted, and "don't" is an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from examples.models.random_store import write_random_store
from experts.placement import first_placement
from moe.calibration.trace import Trace
from moe.cli import main
from moe.commands.plan.decode_speed import Bandwidths, DecodeSizes, UniformRouting
from moe.commands.plan.rank_command import expected_traffic, first_placements
from moe.commands.plan.ranks import (
    Machine,
    ModelNeeds,
    PromptNeeds,
    RankForecast,
    RankPlan,
    Traffic,
    exchanges,
    loads_of,
    recommend,
    step_traffic,
    traffic,
    uniform_steps,
)
from moe.commands.plan.speeds import Link, given_link, measure_link
from moe.commands.plan.traced_routing import TracedRouting
from moe.errors import ProfileError

SIZES = DecodeSizes(
    layers=10, experts=64, top_k=8, expert_bytes=1_000_000, trunk_bytes=100_000_000, slots=640
)
NEEDS = ModelNeeds(SIZES, fixed_bytes=200_000_000, row_bytes=4096, replicas=0.25)
FAST = Link(10e9, 1e-6, "given")
SLOW = Link(1e7, 5e-3, "given")
BATCHES = (1, 16)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**32))
def test_a_step_sends_each_token_once_to_each_rank_that_serves_it(
    ranks: int, tokens: int, top_k: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    placement = first_placement("packed", 12, ranks, 0.25)
    ids_TK = rng.random((tokens, 12)).argsort(1)[:, :top_k]
    source_T = np.arange(tokens) * ranks // tokens
    step = step_traffic(ids_TK, source_T, placement)
    own_R = np.bincount(source_T, minlength=ranks)
    assert step.slots_RR.sum() == tokens * top_k == step.served_R.sum()
    assert (step.slots_RR.sum(1) == own_R * top_k).all()
    assert (step.rows_RR <= step.slots_RR).all()
    assert (step.rows_RR <= own_R[:, None]).all()
    assert ((step.rows_RR > 0) == (step.slots_RR > 0)).all()
    assert (step.distinct_R <= placement.copies_ER.sum(0)).all()
    assert step.distinct_R.sum() >= len(np.unique(ids_TK))


def test_random_routing_goes_to_as_many_ranks_as_chance_says() -> None:
    """R (1 - (1 - 1/R)^K) ranks a token with experts spread evenly, 1/R of them its own."""
    steps = uniform_steps(replace(SIZES, experts=256), 256)
    found = traffic([first_placement("linear", 256, 8, 0.0)] * steps.shape[1], steps)
    assert found.pairs == pytest.approx(8 * (1 - (7 / 8) ** 8) * 7 / 8, rel=0.03)
    assert found.slots == pytest.approx(8 * 7 / 8, rel=0.03)


def test_copies_level_ranks_and_keep_tokens_at_home() -> None:
    steps = uniform_steps(SIZES, 64)
    seen = loads_of(steps, 64)
    without, with_copies = (
        traffic([first_placement("packed", 64, 4, share, own_SE) for own_SE in seen], steps)
        for share in (0.0, 0.5)
    )
    assert with_copies.imbalance < without.imbalance
    assert with_copies.slots < without.slots


def test_a_trace_gives_the_steps_that_it_has() -> None:
    rows = torch.arange(40).view(20, 2).remainder(16).sort(1).values
    ids = [rows.to(torch.int16)] * 3
    weights = [torch.ones(rows.shape, dtype=torch.float16)] * 3
    tokens = torch.zeros(20, dtype=torch.int32)
    routing = TracedRouting(Trace(tokens, [20], [16] * 3, ids, weights), "lru")
    steps = routing.steps(4)
    assert steps.shape == (5, 3, 4, 2)
    assert steps[1, 2].tolist() == rows[[1, 6, 11, 16]].tolist()
    sizes = replace(SIZES, experts=16)
    found = expected_traffic(routing, sizes, 4, first_placements(routing, sizes, 2, "packed", 0.0))
    assert found.imbalance >= 1.0


def forecast(needs: ModelNeeds, machine: Machine, ranks_a_node: int) -> RankForecast:
    def traffic_of(batch: int, ranks: int) -> Traffic:
        away = 1 - 1 / ranks
        distinct = UniformRouting(SIZES).distinct(batch)
        return Traffic(3 * away, 8 * away, 1.1, 1.1 * distinct / ranks, distinct)

    return RankForecast(needs, machine, ranks_a_node, UniformRouting(SIZES), traffic_of)


def plans(machine: Machine, nodes: int = 1, ranks: int = 4) -> dict[str, RankPlan]:
    made = forecast(NEEDS, machine, ranks // nodes).plans(ranks, BATCHES)
    assert [plan.name for plan in made] == ["1 rank", "2 ranks", "4 ranks", "4 replicas"]
    return {plan.name: plan for plan in made}


def recommended(made: Mapping[str, RankPlan]) -> tuple[RankPlan, str]:
    found = recommend(list(made.values()), 16)
    assert found is not None
    return found


def test_one_rank_is_the_plan_without_ranks() -> None:
    machine = Machine(Bandwidths(10e9), None, FAST, FAST)
    one = plans(machine)["1 rank"]
    moved = 100e6 + 10 * 1.1 * UniformRouting(SIZES).distinct(16) * 1e6
    assert one.seconds[16] == {"memory": pytest.approx(moved / 10e9)}
    assert (one.resident, one.exchanged_bytes) == (1.0, 0.0)


def test_exchanges_take_their_latency_and_their_bytes() -> None:
    four = plans(Machine(Bandwidths(10e9), None, SLOW, SLOW))["4 ranks"]
    rows = 10 * (3 + 8) * 0.75 * 4096
    assert four.exchanged_bytes == pytest.approx(rows)
    assert (exchanges(4, 8, False), exchanges(2, 8, False), exchanges(4, 8, True)) == (3, 2, 2)
    expected = 10 * 2 * 5e-3 + 4 * rows / 1e7
    assert four.seconds[16]["exchange"] == pytest.approx(expected)


def test_ranks_on_one_machine_share_its_memory_and_read_the_trunk_each() -> None:
    made = plans(Machine(Bandwidths(10e9), None, FAST, FAST))
    one, four = made["1 rank"].seconds[16], made["4 ranks"].seconds[16]
    assert four["memory"] - one["memory"] == pytest.approx(3 * 100e6 / 10e9)
    chosen, why = recommended(made)
    assert chosen.name == "1 rank"
    assert why.startswith("the fastest at 16 sequences, 1.")


def test_where_one_machine_is_too_small_several_are_worth_their_network() -> None:
    machine = Machine(Bandwidths(10e9, disk=1e9), 600_000_000, FAST, FAST)
    made = plans(machine, nodes=4)
    assert made["1 rank"].resident == pytest.approx(400 / 640)
    assert made["4 ranks"].resident == 1.0
    assert "disk" in made["4 replicas"].seconds[1]
    assert recommended(made)[0].name == "4 ranks"
    slow = plans(replace(machine, network=Link(1e6, 0.1, "given")), nodes=4)
    assert recommended(slow)[0].name == "4 replicas"


def test_what_cannot_be_read_from_a_disk_does_not_fit() -> None:
    made = plans(Machine(Bandwidths(10e9), 600_000_000, FAST, FAST), nodes=4)
    assert [plan.fits for plan in made.values()] == [False, True, True, False]
    assert made["1 rank"].tokens_per_second(16) == 0.0
    assert json.loads(json.dumps(made["1 rank"].as_dict()))["fits"] is False
    unfit, fit = {"1 rank": made["1 rank"]}, {"4 ranks": made["4 ranks"]}
    assert recommended(unfit | fit) == (made["4 ranks"], "the only arrangement that fits")
    assert recommend([made["1 rank"], made["4 replicas"]], 16) is None


def test_a_little_faster_is_not_worth_more_ranks() -> None:
    one = plans(Machine(Bandwidths(10e9), None, FAST, FAST))["1 rank"]
    faster = replace(one, name="2 ranks", ranks=2, seconds={16: {"memory": 0.97}})
    chosen, why = recommended({"1": replace(one, seconds={16: {"memory": 1.0}}), "2": faster})
    assert chosen.name == "1 rank"
    assert why == "2 ranks would be only 3% faster at 16 sequences"


def test_prompts_take_arithmetic_and_every_expert_once() -> None:
    prompts = PromptNeeds(1e9, 1e12, kv_bytes_a_token=1000, chunk_tokens=512)
    slow = replace(FAST, bytes_per_s=2.048e6, seconds=0.5)
    made = forecast(NEEDS, Machine(Bandwidths(10e9), None, slow, FAST), 4)
    costs = made.engine_costs(2, prompts)
    assert costs is not None
    assert costs.chunk_s(512) == pytest.approx(2 * 512 * 1e9 / 1e12)  # two share the node
    few = 2 * (100e6 + 10 * UniformRouting(SIZES).distinct(8) * 1e6) / 10e9
    assert costs.chunk_s(8) == pytest.approx(few)
    assert costs.step_s(8) == pytest.approx(few)
    assert costs.handover_s(2048) == pytest.approx(1.5)
    small = forecast(NEEDS, Machine(Bandwidths(10e9), 600_000_000, FAST, FAST), 1)
    assert small.engine_costs(4, prompts) is None


def test_links_are_given_in_gigabytes_and_microseconds() -> None:
    assert given_link("1.5,2e6", "--link") == Link(1.5e9, 2.0, "given")
    for text in ("1.5", "fast,1", "0,1", "1,-1", "inf,1"):
        with pytest.raises(ProfileError, match=r"--network 1\.2,50"):
            given_link(text, "--network")


def test_what_ranks_of_one_machine_use_is_measured() -> None:
    link = measure_link()
    assert link.bytes_per_s > 1e6
    assert 0 < link.seconds < 1
    assert "local sockets" in link.how


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, dtype=torch.bfloat16,
    )  # fmt: skip
    return write_random_store(config, tmp_path_factory.mktemp("ranks") / "store")


@pytest.mark.deep
def test_the_command_compares_and_names_what_it_assumes(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(store), "--ranks", "4", "--link", "1,10", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    names = [plan["name"] for plan in made["plans"]]
    assert names == ["1 rank", "2 ranks", "4 ranks", "4 replicas"]
    assert made["plans"][0]["exchanged_bytes"] == 0 < made["plans"][1]["exchanged_bytes"]
    assert made["plans"][2]["rank_bytes"] < made["plans"][3]["rank_bytes"]
    assert made["machine"]["link"]["how"] == "given"
    assert main(["plan", str(store), "--ranks", "4", "--link", "1,10"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s: 1" in out  # whole, in 80 columns
    assert "4 replicas" in out
    assert "…" not in out
    assert "Take 1 rank: " in out
    assert "Ranks of a node exchange: 1.00 GB/s a rank, 10 µs (given)." in out
    assert "Arithmetic is not counted." in out


def test_ranks_must_be_dealt_evenly_to_nodes(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(store), "--ranks", "3", "--nodes", "2"]) != 0
    assert "--ranks is 3 and --nodes 2" in capsys.readouterr().err
    assert main(["plan", str(store), "--ranks", "9" * 20]) == 2
    assert "--ranks is 99999999999999999999, and plans are made for 320" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--nodes=2", "--link=1,10", "--network=1,10"])
def test_what_is_said_of_ranks_wants_ranks(
    option: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(store), option]) == 2
    assert "--nodes, --link and --network describe several ranks; add" in capsys.readouterr().err
