"""Ranks at MoE layers: who has nothing there joins, and what cannot be read costs who needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from experts.dispatch import (
    AllToAllDispatcher,
    Combined,
    Dispatched,
    ExchangeError,
    Failure,
    LocalDispatcher,
)
from experts.placement import linear
from kernels import experts_forward
from moe import MoE, SamplingParams
from moe.errors import RankError
from moe.network.lanes import ExpertCall
from moe.network.moe_layer import LockstepPass, MoELayers
from offload.errors import OffloadError
from offload.layer import OffloadedExperts
from routing import PolicyChain, Routing, parse_policies
from tests.amounts import amount
from tests.experts.dispatch_cases import ThreadExchange, on_ranks
from tests.offload.test_experts import EXPERTS, HIDDEN, LAYERS, Arriving, Layers, draw_routing, make

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
NO_POLICIES = parse_policies([], lossless=True)


@dataclass
class Lossy(Layers):
    """Some experts cannot be read."""

    lost: set[tuple[int, int]] = field(default_factory=set)

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Arriving:
        arriving = super().fetch(layer, expert, slot, urgent=urgent)
        arriving.fails = (layer, expert) in self.lost
        return arriving


def lossy_layers(seed: int, slots: int, lost: set[tuple[int, int]]) -> tuple[MoELayers, Layers]:
    made = make(True, False, Random(seed))
    layers = Lossy(made.resident, made.arena, made.random, lost=lost)
    cache = layers.cache(slots, "lru")
    offloaded = [
        OffloadedExperts(index, EXPERTS, cache, layers.arena.experts) for index in range(LAYERS)
    ]
    return MoELayers(offloaded), layers


def make_visits(layer: int, seed: int) -> list[ExpertCall]:
    random = torch.Generator().manual_seed(seed)
    sizes = Random(seed).choices((0, 1, 3), k=Random(seed + 1).randint(1, 3))
    return [
        ExpertCall(layer, torch.randn(n, HIDDEN, generator=random), draw_routing(n, 3, random))
        for n in sizes
    ]


def check(outcome: Tensor | Exception, call: ExpertCall, layers: Layers, lost: set[int]) -> None:
    """Tokens have the bits of whole layers, or zeros and a reason where they need a lost expert."""
    assert isinstance(outcome, Tensor)
    ids, weights = call.routing.expert_ids, call.routing.weights
    whole = experts_forward(call.hidden_states, ids, weights, layers.resident[call.layer])
    for token, row in enumerate(ids.tolist()):
        if lost & set(row):
            assert "the disk is broken" in call.lost[token].reason
            assert not outcome[token].any()
        else:
            assert token not in call.lost
            assert torch.equal(outcome[token], whole[token])


@hypothesis_settings(max_examples=amount(25, 10))
@given(
    seed=st.integers(0, 9999),
    ranks=st.integers(1, 3),
    slots=st.integers(2, 9),
    losses=st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=4),
    loops=st.integers(1, 3),
)
def test_any_ranks_visit_any_layers_and_some_experts_are_lost(
    seed: int, ranks: int, slots: int, losses: set[tuple[int, int]], loops: int
) -> None:
    """Everybody's disk lacks the same experts, so whoever serves them fails. The model may come to
    its last layers several times."""
    visits = [*range(LAYERS - 2), *[LAYERS - 2, LAYERS - 1] * loops]

    def rank_of(exchange: ThreadExchange) -> None:
        experts, layers = lossy_layers(seed, slots, losses)
        size = -(-EXPERTS // ranks) * ranks
        experts.dispatcher = AllToAllDispatcher(exchange, [linear(EXPERTS, size, ranks)] * LAYERS)
        for step in range(3):
            chosen = Random(seed * 7 + step * ranks + exchange.rank)
            with experts.lockstep(visits):
                for layer in visits:
                    if chosen.random() < 0.6:
                        calls = make_visits(layer, chosen.randrange(999))
                        lost = {expert for at, expert in losses if at == layer}
                        outcomes = experts.run(layer, calls)
                        for outcome, call in zip(outcomes, calls, strict=True):
                            check(outcome, call, layers, lost)

    for error in on_ranks(ranks, rank_of):
        if error is not None:
            raise error


class Bad(Exception):
    pass


def on_two(run: Callable[[MoELayers, int], Any], policies: PolicyChain = NO_POLICIES) -> list[Any]:
    """Two ranks with seven experts a layer in memory."""

    def rank_of(exchange: ThreadExchange) -> Any:
        experts = MoELayers(make(True, False, Random(1)).resident)
        experts.policies = policies
        experts.dispatcher = AllToAllDispatcher(exchange, [linear(EXPERTS, 8, 2)] * LAYERS)
        return run(experts, exchange.rank)

    return on_ranks(2, rank_of)


def test_one_disk_that_fails_concerns_only_what_it_serves() -> None:
    """Rank 1 cannot read anything; tokens of both ranks with experts of rank 0 only are fine."""

    def rank_of(exchange: ThreadExchange) -> list[dict[int, Failure]]:
        everything = {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
        experts, _ = lossy_layers(3, 4, everything if exchange.rank else set())
        experts.dispatcher = AllToAllDispatcher(exchange, [linear(EXPERTS, 8, 2)] * LAYERS)
        choices = torch.tensor([[1, 3], [2, 3]]), torch.tensor([[1, 2], [3, 4]])
        calls = [
            ExpertCall(0, torch.ones(2, HIDDEN), Routing(ids, torch.ones(2, 2))) for ids in choices
        ]
        with experts.lockstep([0]):
            experts.run(0, calls)
        return [call.lost for call in calls]

    lost = {1: Failure("rank 1: the disk is broken", unreadable=True)}
    assert on_ranks(2, rank_of) == [[{}, lost]] * 2


def test_a_rank_that_raises_elsewhere_keeps_step() -> None:
    """A policy raises, and a block is left early: the other rank gets all its rows."""

    def leave_early(experts: MoELayers) -> None:
        with experts.lockstep(range(LAYERS)):
            with pytest.raises(AttributeError):
                experts.run(0, make_visits(0, 5)[:1])
            raise Bad

    def steps(experts: MoELayers, rank: int) -> str:
        if rank == 0:
            with experts.lockstep(range(LAYERS)):
                for layer in range(LAYERS):
                    [rows] = experts.run(layer, make_visits(layer, 5)[:1])
                    assert isinstance(rows, Tensor)
            return "all rows"
        experts.policies = object()  # type: ignore[assignment]
        with pytest.raises(Bad):
            leave_early(experts)
        return "raised"

    assert on_two(steps) == ["all rows", "raised"]


def test_a_visit_that_comes_back_fails_without_the_others() -> None:
    def steps(experts: MoELayers, rank: int) -> None:
        with experts.lockstep([0, 2]):
            if rank == 0:
                experts.run(2, make_visits(2, 5))
                for layer in (0, 1, 2):
                    with pytest.raises(OffloadError, match=f"MoE layer {layer} cannot be visited"):
                        experts.run(layer, make_visits(layer, 5))

    assert on_two(steps) == [None, None]


def swallow(experts: MoELayers) -> None:
    """A pass whose lanes keep to themselves what they were told."""
    with experts.lockstep([0]), pytest.raises(ExchangeError):
        experts.run(0, make_visits(0, 5))


def test_a_lost_rank_is_raised_at_the_end_of_the_pass() -> None:
    def steps(experts: MoELayers, rank: int) -> str:
        if rank == 1:
            raise RuntimeError("killed")
        with pytest.raises(ExchangeError, match="rank 0 is alone"):
            swallow(experts)
        return "told"

    assert on_two(steps)[0] == "told"


def test_order_of_joining() -> None:
    joined: list[int] = []
    one = LockstepPass([0, 1, 3, 5], joined.append)
    one.reach(3)
    assert joined == [0, 1]
    one.finish()
    one.finish()
    assert joined == [0, 1, 5]
    looped = LockstepPass([0, 2, 3, 2, 3, 4], joined.append)
    joined.clear()
    for layer in (3, 2):
        looped.reach(layer)
    assert joined == [0, 2]
    assert looped.left == 2
    looped.finish()
    assert joined == [0, 2, 3, 4]


class Losing(LocalDispatcher):
    """As if another rank could not read, or not run, one expert of one layer."""

    local = False

    def __init__(self, layer: int, expert: int, failure: Failure) -> None:
        self.lost, self.failure = (layer, expert), failure

    def combine(
        self, dispatched: Dispatched, rows: Tensor, failures: Any, meanwhile: Any = None
    ) -> Combined:
        layer, expert = self.lost
        concerned = (dispatched.routing.expert_ids == expert).any(1).nonzero()[:, 0].tolist()
        lost = dict.fromkeys(concerned, self.failure) if dispatched.layer == layer else {}
        rows[list(lost)] = 0
        return Combined(rows, lost)


def generate(model: MoE, prompts: list[list[int]]) -> list[list[int] | str]:
    """The tokens of each prompt, or why it ended, all prompts in one batch."""
    engine = model.engine()
    groups = [model.request(prompt, GREEDY) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    failed: dict[Any, str] = {}
    while not engine.idle:
        outcomes = engine.step()
        failed |= {s: repr(e) for s, e in outcomes if isinstance(e, OffloadError | RankError)}
    sequences = [group.sequences[0] for group in groups]
    return [failed.get(sequence, sequence.token_ids) for sequence in sequences]


@pytest.mark.parametrize(
    ("model_type", "error"),
    [
        ("qwen3_moe", OffloadError("rank 1: disk broken")),
        ("qwen3_moe", RankError("rank 1: MemoryError")),
        ("granitemoehybrid", OffloadError("rank 1: disk broken")),
    ],
)
def test_only_sequences_that_need_a_lost_expert_end(
    tiny_moe: Callable[[str], MoE], model_type: str, error: Exception
) -> None:
    """Packed in one pass or not: in company just those fail that fail alone."""
    failure = Failure(str(error), unreadable=isinstance(error, OffloadError))
    model = tiny_moe(model_type)
    prompts = [[20, 7], [5], [90, 11], [64], [33, 2, 8]]
    experts, fates = model.experts, set()
    whole = generate(model, prompts)
    try:
        for expert in range(experts.layers[1].num_experts):
            experts.dispatcher = Losing(1, expert, failure)
            alone = [generate(model, [prompt])[0] for prompt in prompts]
            assert generate(model, prompts) == alone
            for tokens, expected in zip(alone, whole, strict=True):
                assert tokens in (expected, repr(error))
            fates |= {str(tokens) for tokens in alone}
    finally:
        experts.dispatcher = LocalDispatcher()
    assert repr(error) in fates
    assert len(fates) > 1
