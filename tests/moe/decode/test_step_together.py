"""Steps of ranks that share the experts, one call each, beside steps of one that has them all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from experts.dispatch import AllToAllDispatcher, SocketExchange
from kernels import experts_forward
from kernels.cpu import choose_kernel
from moe.decode.compiled import DescribedStep
from moe.decode.step import DecodeForward
from moe.describe.description import Description, Experts
from moe.kv.cache import KVCache
from moe.network.lanes import Lane, run_lanes
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from routing import Routing
from tests.experts.dispatch_cases import random_placement
from tests.experts.test_dispatch_sockets import connected, in_threads
from tests.moe.decode.description_cases import VOCABULARY, Maker, filled
from tests.moe.decode.test_step_alone import EXPERTS, Layer, same, some_experts, whole_step

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")

STEPS = 6
NAN = 3
"""A token whose rows are no numbers."""


@dataclass
class Rank:
    """One of the ranks, a thread.

    Attributes:
        tokens: of each step and own sequence.
        whole: all experts are in memory.
        fails: the step in which it cannot run experts.
        asked: layers that Python was asked for, of each step.
        lost: rows that failed, of each step.
    """

    exchange: SocketExchange
    step: DescribedStep
    experts: MoELayers
    caches: list[KVCache]
    tokens: list[list[list[int]]]
    whole: bool
    fails: int = -1
    asked: list[list[int]] = field(default_factory=list)
    lost: list[list[int]] = field(default_factory=list)

    def run(self) -> list[list[Tensor]]:
        """Logits of each step."""
        gather = self.experts.gather

        def noted(layer: int, calls: Any) -> Any:
            self.asked[-1].append(layer)
            return gather(layer, calls)

        self.experts.gather = noted  # type: ignore[method-assign]
        whole = DecodeForward(self.step, self.experts)
        with torch.inference_mode():
            return [self.one(whole, number) for number in range(STEPS)]

    def one(self, whole: DecodeForward, number: int) -> list[Tensor]:
        self.asked.append([])
        how: Any = failing if number == self.fails else experts_forward
        self.experts.forward = how
        work = self.work(self.tokens[number])
        lanes = [Lane(lambda: whole(work), "decode")] if work else []
        with self.experts.lockstep(range(len(self.experts.layers))):
            run_lanes(lanes, self.experts.run)
        self.lost.append([row for lane in lanes for row in lane.lost()])
        return [rows for lane in lanes for rows in lane.result()]

    def work(self, tokens: list[list[int]]) -> list[Work]:
        pairs = zip(tokens, self.caches, strict=True)
        return [Work(own, cache, all_logits=True) for own, cache in pairs]


def failing(rows: Tensor, *others: Any) -> Tensor:
    if len(rows):
        raise MemoryError("none left")
    return experts_forward(rows, *others)


def some_slots(data: st.DataObject) -> Tensor | None:
    """Where experts are: all in memory, or all behind a table, or some of them nowhere."""
    if data.draw(st.booleans()):
        return None
    slots = torch.arange(EXPERTS + 1)
    if data.draw(st.integers(0, 3)) == 0:
        slots[data.draw(st.integers(0, EXPERTS - 1))] = -1
    return slots


def drawn_ranks(data: st.DataObject, description: Description, layers: list[Layer]) -> list[Rank]:
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=3))
    exchanges = connected(len(sizes))
    copies, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99))
    ranks = []
    for size, exchange in zip(sizes, exchanges, strict=True):
        if data.draw(st.integers(0, 4)) == 0:
            exchange.sockets = None  # goes by Python alone
        placements = [random_placement(EXPERTS, len(sizes), copies, seed + i) for i in range(3)]
        experts = MoELayers(layers)
        experts.dispatcher = AllToAllDispatcher(exchange, placements[: len(layers)], buffer_rows=9)
        lengths = data.draw(st.lists(st.sampled_from([1, 17, 511]), min_size=size, max_size=size))
        token = st.lists(st.integers(NAN + 1, VOCABULARY - 1), min_size=1, max_size=1)
        own = st.lists(token, min_size=size, max_size=size)
        tokens = data.draw(st.lists(own, min_size=STEPS, max_size=STEPS))
        caches = filled(description, lengths, 4 * STEPS) if size else []
        places = [some_slots(data) for _ in layers]
        step = whole_step(description, layers, places)
        whole = all(slots is None or bool((slots >= 0).all()) for slots in places)
        ranks.append(Rank(exchange, step, experts, caches, tokens, whole))
    return ranks


def alone(rank: Rank, caches: list[KVCache], layers: list[Layer]) -> list[list[Tensor]]:
    """What a rank gets that has all experts."""

    def routed(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return experts_forward(rows, routing.expert_ids, routing.weights, layers[layer])

    other = replace(rank, caches=caches)
    with torch.inference_mode():
        works = map(other.work, rank.tokens)
        return [rank.step(work, routed) if work else [] for work in works]


@given(st.data(), st.integers(0, 2**31), st.sampled_from(["", "", "more", "nan", "failure"]))
def test_ranks_give_the_bits_of_one(data: st.DataObject, seed: int, disturbed: str) -> None:
    """Any ranks, some without sequences or without compiled calls; in the middle a rank brings more
    than before, or what is no number, or fails to run experts."""
    torch.manual_seed(seed)
    hidden = data.draw(st.sampled_from([8, 24, 100]))
    description = Maker(data, hidden).description(3)
    routed = [layer for layer in description.layers if isinstance(layer.feed, Experts)]
    assume(routed)
    layers = [some_experts(data, hidden) for _ in routed]
    description.embedding.weight.data[NAN] = torch.nan  # type: ignore[operator]
    ranks = drawn_ranks(data, description, layers)
    at = data.draw(st.sampled_from([rank for rank in ranks if rank.caches] or ranks))
    if disturbed in ("more", "nan") and at.caches:
        at.tokens[STEPS // 2][0] = [NAN] if disturbed == "nan" else [5, 6, 7]
    at.fails = STEPS // 2 if disturbed == "failure" else -1
    copies = [[own.fork(own.capacity, own.length) for own in rank.caches] for rank in ranks]
    patience = data.draw(st.sampled_from([60.0, -1.0]))
    for rank in ranks:
        rank.step._whole.patience = patience
    for layer in description.layers:  # which steps of all ranks share
        if layer.attention.rotation is not None:
            layer.attention.rotation.table.reserve(600)
    found = in_threads([rank.run for rank in ranks])
    for rank in ranks:
        rank.exchange.close()
    for rank, actual, caches in zip(ranks, found, copies, strict=True):
        assert not isinstance(actual, Exception), actual
        expected = alone(rank, caches, layers)
        for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            if disturbed != "failure" or number < STEPS // 2:
                assert all(map(same, ours, theirs))
        if disturbed == "failure":
            assert not any(rank.lost[: STEPS // 2])
        else:
            assert not any(rank.lost)
        swift = rank.caches and rank.exchange.sockets is not None
        everywhere = list(range(len(layers)))
        for number in (2,) if disturbed else (2, STEPS - 1):
            if not swift:
                assert rank.asked[number] == everywhere
            elif rank.whole:
                assert rank.asked[number] == []
        tokens = sum(len(own) for step in rank.tokens for own in step)
        assert rank.experts.statistics.tokens == [tokens] * len(layers)
