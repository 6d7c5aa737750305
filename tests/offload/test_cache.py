"""The expert cache: what is handed out is what was asked for, whatever happens around it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload.between_steps import LEAST_SLOTS
from offload.cache import ExpertCache
from offload.errors import BudgetError, OffloadError
from offload.held import RING, Held
from offload.policies import POLICIES
from offload.slots import Sizes
from tests.offload.cache_cases import (
    EXPERT_BYTES,
    FakeRoom,
    FakeSource,
    content,
    mixed,
    with_prefixes,
)

EXPERTS = [6, 4, 8]
WIDTH = 8


def make(
    slots: int,
    policy: str = "lru",
    experts: Sequence[int] = EXPERTS,
    capacity: int = 0,
    sizes: Sizes | None = None,
) -> tuple[ExpertCache, FakeSource]:
    sizes = sizes or Sizes.equal(experts, EXPERT_BYTES)
    room = FakeRoom(sizes.grains_for(capacity or slots), sizes.kinds)
    source = FakeSource(room)
    chosen = POLICIES[policy](len(experts), max(experts))
    return ExpertCache(sizes, slots, room, source, chosen), source


def check_bytes(source: FakeSource, slot: int, layer: int, expert: int) -> None:
    row = source.room.rows[slot]
    assert torch.equal(row, content(layer, expert, len(row) // EXPERT_BYTES)), expert


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def walk(held: Held, source: FakeSource, layer: int) -> list[list[int]]:
    """The experts of each wave, after a look at every byte."""
    waves = []
    with held:
        for wave in held.waves:
            for expert in wave.experts:
                check_bytes(source, int(wave.slot_ids[expert]), layer, expert)
            assert wave.slot_ids[-1].item() == -1
            waves.append(list(wave.experts))
    return waves


def test_what_is_there_comes_in_one_wave() -> None:
    cache, source = make(8)
    walk(cache.acquire(0, [0, 2, 5]), source, 0)
    assert walk(cache.acquire(0, [0, 5]), source, 0) == [[0, 5]]
    total = cache.statistics.total
    assert (total.hits, total.misses, total.demand_bytes) == (2, 3, 3 * 12)


def test_what_is_there_is_computed_while_the_rest_is_coming() -> None:
    cache, source = make(8)
    walk(cache.acquire(2, [0, 1, 5]), source, 2)
    assert walk(cache.acquire(2, [0, 1, 3, 5, 6]), source, 2) == [[0, 1], [3, 5], [6]]


def test_more_experts_than_slots_come_in_waves_of_ascending_experts() -> None:
    cache, source = make(LEAST_SLOTS)
    for _ in range(2):
        waves = walk(cache.acquire(2, list(range(8))), source, 2)
        assert flat(waves) == list(range(8))


def test_transfers_run_under_the_computation_of_a_wave() -> None:
    cache, source = make(4, experts=[16])
    source.at_once = False
    with cache.acquire(0, list(range(16))) as held:
        for wave in held.waves:
            if wave.experts[-1] < 15:
                assert source.under_way


def test_a_batch_that_touches_everything_leaves_the_hot_set_alone() -> None:
    cache, source = make(16, "lfu", experts=[8, 64])
    for _ in range(5):
        walk(cache.acquire(0, list(range(8))), source, 0)
    walk(cache.acquire(1, list(range(64))), source, 1)
    assert cache.resident(0).all()
    assert cache.statistics.layers[1].streamed_bytes > 0


def test_few_slots_are_borrowed_from_the_hot_set() -> None:
    cache, source = make(40, "lfu", experts=[40, 64])
    for _ in range(5):
        walk(cache.acquire(0, list(range(40))), source, 0)
    walk(cache.acquire(1, list(range(64))), source, 1)
    assert cache.resident(0).sum() >= 40 - RING


def test_a_prefetch_is_joined_by_who_needs_it() -> None:
    cache, source = make(4)
    assert cache.prefetch(0, 1, value=0.5)
    assert not cache.prefetch(0, 1, value=0.5)
    (transfer,) = source.under_way
    assert not transfer.urgent
    held = cache.acquire(0, [1])
    assert source.under_way[0].urgent
    walk(held, source, 0)
    total = cache.statistics.total
    assert (total.misses, total.late, total.useful_bytes, total.demand_bytes) == (1, 1, 12, 0)


def test_a_prefetch_nobody_asked_for_is_wasted_when_evicted() -> None:
    cache, source = make(LEAST_SLOTS)
    cache.prefetch(0, 1)
    source.under_way[0].finish()
    walk(cache.acquire(0, [2, 3]), source, 0)
    total = cache.statistics.total
    assert (total.useful_bytes, total.wasted_bytes, total.evictions) == (0, 12, 1)


def test_a_cancelled_prefetch_leaves_no_trace_but_the_count() -> None:
    cache, _ = make(4)
    cache.prefetch(0, 1)
    assert cache.cancel(0, 1)
    assert not cache.cancel(0, 1)
    total = cache.statistics.total
    assert (total.prefetches, total.cancelled, total.wasted_bytes) == (1, 1, 0)
    assert not cache.resident(0).any()


def test_a_prefetch_that_is_taken_back_after_it_was_asked_for_was_not_useful() -> None:
    cache, source = make(2)
    assert cache.prefetch(0, 1)
    assert cache.prefetch(0, 2)
    walk(cache.acquire(0, [0, 1, 2]), source, 0)  # the first one needs a slot
    total = cache.statistics.total
    assert (total.late, total.cancelled) == (2, 2)
    assert (total.useful_bytes, total.wasted_bytes) == (0, 0)


def test_what_somebody_waits_for_is_not_cancelled() -> None:
    cache, _ = make(4)
    cache.prefetch(0, 1)
    with cache.acquire(0, [1]):
        assert not cache.cancel(0, 1)


def test_a_prefetch_worth_less_than_its_victim_is_refused() -> None:
    cache, source = make(LEAST_SLOTS, "frequency_recency")
    for _ in range(50):
        walk(cache.acquire(0, [1, 2]), source, 0)
    assert not cache.prefetch(0, 3, value=0.01)
    assert cache.prefetch(1, 3, value=1.0)


@pytest.mark.parametrize("how", ["fails", "refuses"])
def test_a_failure_ends_one_call_only(how: str) -> None:
    cache, source = make(4)
    getattr(source, how).add((0, 3))
    with pytest.raises(OffloadError, match="expert 3 of layer 0"):
        walk(cache.acquire(0, [1, 3, 5]), source, 0)
    assert walk(cache.acquire(0, [1]), source, 0) == [[1]]
    getattr(source, how).clear()
    assert flat(walk(cache.acquire(0, [1, 3, 5]), source, 0)) == [1, 3, 5]
    assert cache.statistics.total.failures == 1


def test_too_few_slots_are_refused_with_numbers() -> None:
    with pytest.raises(BudgetError, match=r"room for 2 experts, 24 bytes .* there is room for 1"):
        make(1)


def test_what_other_calls_hold_is_not_taken_away() -> None:
    cache, source = make(LEAST_SLOTS)
    with cache.acquire(0, [1, 2]) as first:
        for _ in first.waves:
            pass
        with pytest.raises(OffloadError, match=r"no slot for expert 3 .* all 2 are held"):
            walk(cache.acquire(0, [3]), source, 0)
    assert walk(cache.acquire(0, [3]), source, 0) == [[3]]


def test_resizing_keeps_the_most_valuable() -> None:
    cache, source = make(8, "lfu", capacity=10)
    for count, expert in enumerate([3, 1, 4, 0, 5, 2]):
        for _ in range(count + 1):
            walk(cache.acquire(0, [expert]), source, 0)
    assert cache.resize(3) == 3
    assert cache.resident(0).nonzero().flatten().tolist() == [0, 2, 5]
    assert walk(cache.acquire(0, [0, 2, 5]), source, 0) == [[0, 2, 5]]
    assert cache.resize(100) == 10


def test_a_hot_set_is_restored_as_far_as_there_is_room() -> None:
    cache, source = make(8, "lfu")
    for count, expert in enumerate([3, 1, 4]):
        for _ in range(count + 1):
            walk(cache.acquire(0, [expert]), source, 0)
    assert cache.hot_set() == [(0, 4), (0, 1), (0, 3)]
    again, source = make(2, "lfu")
    assert again.warm(cache.hot_set()) == 2
    assert walk(again.acquire(0, [1, 4]), source, 0) == [[1, 4]]
    assert again.statistics.total.hits == 2


def test_what_is_dropped_makes_room_and_is_read_again_when_it_is_asked_for() -> None:
    cache, source = make(4, "lfu")
    for expert in range(4):
        walk(cache.acquire(0, [expert]), source, 0)
    assert cache.warm([(0, 4)]) == 4
    with cache.acquire(0, [3]):
        cache.drop([(0, 1), (0, 3), (0, 5)])
    assert cache.warm([(0, 4), (0, 5)]) == 4
    assert cache.resident(0).nonzero().flatten().tolist() == [0, 2, 3, 4]
    assert walk(cache.acquire(0, [1, 4]), source, 0) == [[1, 4]]
    assert cache.statistics.total.evictions == 2


def test_a_cache_holds_as_many_experts_as_their_bytes_allow() -> None:
    sizes = mixed([16] * 8)
    cache, source = make(64, "lfu", [16] * 8, sizes=sizes)
    for layer in range(8):
        walk(cache.acquire(layer, list(range(16))), source, layer)
    there, largest = cache.present, sizes.grains_for(64) // max(sizes.kinds)
    held = sum(nbytes for nbytes, is_there in zip(sizes.nbytes, there, strict=True) if is_there)
    assert held >= 0.9 * 64 * sizes.mean_bytes
    assert there.sum() >= 0.9 * 64 > 1.6 * largest
    total = cache.statistics.total
    assert total.demand_bytes + total.streamed_bytes == sum(sizes.nbytes)


def test_who_goes_is_worth_least_whatever_its_size() -> None:
    sizes = mixed([8])  # of 4, 2, 8, 3, 4, 2, 8 and 3 grains
    cache, source = make(3, "lfu", [8], sizes=sizes)
    for expert in (2, 6, 6, 6, 1, 1, 5, 5):
        walk(cache.acquire(0, [expert]), source, 0)
    assert cache.resident(0).nonzero().flatten().tolist() == [1, 5, 6]
    for expert in (0, 0, 4, 4):
        walk(cache.acquire(0, [expert]), source, 0)
    assert cache.resident(0).nonzero().flatten().tolist() == [0, 1, 4, 6]  # where 2 was


class CacheMachine(RuleBasedStateMachine):
    """Anything in any order, against the bytes of the source and simple bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Held, int, list[int]]] = []
        self.asked = 0
        self.failing = False  # what was broken when a transfer began fails after it was repaired

    @rule(
        slots=st.integers(2, 9),
        policy=st.sampled_from(sorted(POLICIES)),
        sizes=st.sampled_from((None, mixed(EXPERTS), with_prefixes(mixed(EXPERTS)))),
        late=st.booleans(),
    )
    @precondition(lambda self: not hasattr(self, "cache"))
    def begin(self, slots: int, policy: str, sizes: Sizes | None, late: bool) -> None:
        self.least = 2 if sizes is None else 4
        self.cache, self.source = make(max(slots, self.least), policy, capacity=9, sizes=sizes)
        self.cache._filling.victims.late = late

    @rule(
        layer=st.integers(0, 2),
        chosen=st.sets(st.integers(0, 7)),
        light=st.sets(st.integers(0, 7)),
    )
    @precondition(lambda self: hasattr(self, "cache"))
    def run_a_call(self, layer: int, chosen: set[int], light: set[int]) -> None:
        experts = sorted(expert for expert in chosen if expert < EXPERTS[layer])
        self.asked += len(experts)
        try:
            held = self.cache.acquire(layer, experts, light=light.intersection(experts))
            waves = walk(held, self.source, layer)
            assert flat(waves) == experts
        except OffloadError as error:
            assert "held" in str(error) or self.failing  # noqa: PT017

    @rule(layer=st.integers(0, 2), chosen=st.sets(st.integers(0, 7), max_size=2))
    @precondition(lambda self: hasattr(self, "cache") and len(self.held) < 2)
    def hold(self, layer: int, chosen: set[int]) -> None:
        experts = sorted(expert for expert in chosen if expert < EXPERTS[layer])
        self.asked += len(experts)
        try:
            held = self.cache.acquire(layer, experts)
        except OffloadError:
            assert self.source.refuses
        else:
            self.held.append((held, layer, experts))

    @rule()
    @precondition(lambda self: hasattr(self, "cache") and self.held)
    def let_go(self) -> None:
        held, layer, experts = self.held.pop()
        try:
            assert flat(walk(held, self.source, layer)) == experts
        except OffloadError as error:
            assert "held" in str(error) or self.failing  # noqa: PT017

    @rule(layer=st.integers(0, 2), expert=st.integers(0, 3), value=st.floats(0, 1))
    @precondition(lambda self: hasattr(self, "cache"))
    def prefetch(self, layer: int, expert: int, value: float) -> None:
        self.cache.prefetch(layer, expert, value=value)

    @rule(layer=st.integers(0, 2), expert=st.integers(0, 3))
    @precondition(lambda self: hasattr(self, "cache"))
    def cancel(self, layer: int, expert: int) -> None:
        self.cache.cancel(layer, expert)

    @rule(seed=st.integers(0, 100), begun=st.booleans())
    @precondition(lambda self: hasattr(self, "cache") and self.source.under_way)
    def finish_one(self, seed: int, begun: bool) -> None:
        transfer = random.Random(seed).choice(self.source.under_way)
        transfer.begun = True
        if not begun:
            transfer.finish()

    @rule(layer=st.integers(0, 2), expert=st.integers(0, 3), how=st.booleans())
    @precondition(lambda self: hasattr(self, "cache"))
    def break_one(self, layer: int, expert: int, how: bool) -> None:
        self.failing = True
        (self.source.fails if how else self.source.refuses).add((layer, expert))

    @rule()
    @precondition(lambda self: hasattr(self, "cache"))
    def repair(self) -> None:
        self.source.fails.clear()
        self.source.refuses.clear()

    @rule(slots=st.integers(2, 9))
    @precondition(lambda self: hasattr(self, "cache") and not self.held)
    def resize(self, slots: int) -> None:
        slots, before = max(slots, self.least), int(self.cache.present.sum())
        assert self.cache.resize(slots) == slots
        if self.least == 2:  # what is larger than others may push some of them out
            assert int(self.cache.present.sum()) >= min(before, slots)

    @invariant()
    def every_slot_holds_what_the_table_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        seen = set()
        for layer, count in enumerate(EXPERTS):
            there = self.cache.resident(layer).tolist()
            ids = self.cache.slot_ids(layer).tolist()
            assert ids[-1] == -1
            for expert in range(count):
                slot = ids[expert]
                assert (slot >= 0) == there[expert]
                if there[expert]:
                    assert self.source.room.in_use(slot)
                    check_bytes(self.source, slot, layer, expert)
                    seen.add(slot)
        assert len(seen) == self.cache.present.sum()

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "cache"):
            total = self.cache.statistics.total
            assert total.hits + total.misses == self.asked
            assert min(vars(total).values()) >= 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_statistics_are_json() -> None:
    cache, source = make(8)
    walk(cache.acquire(0, [0]), source, 0)
    said = cache.statistics.as_dict()
    assert said["hit_ratio"] == 0.0
    assert set(said) > {"hits", "misses", "stall_seconds", "layers"}
    json.dumps(said)
    cache.statistics.reset()
    assert cache.statistics.total.misses == 0
