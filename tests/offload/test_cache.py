"""The expert cache: what is handed out is what was asked for, whatever happens around it."""

from __future__ import annotations

import json
from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.cache import LEAST_SLOTS
from offload.errors import BudgetError, OffloadError
from offload.pins import RING, TierPin
from tests.offload.cache_cases import (
    check_bytes,
    flat,
    make,
    mixed,
    walk,
)

WIDTH = 8


def test_what_is_there_comes_in_one_round() -> None:
    cache, source = make(8)
    walk(cache.acquire(0, [0, 2, 5]), source, 0)
    assert walk(cache.acquire(0, [0, 5]), source, 0) == [[0, 5]]
    total = cache.statistics.total
    assert (total.hits, total.misses, total.demand_bytes) == (2, 3, 3 * 12)


def test_what_is_there_is_computed_while_the_rest_is_coming() -> None:
    cache, source = make(8)
    walk(cache.acquire(2, [0, 1, 5]), source, 2)
    assert walk(cache.acquire(2, [0, 1, 3, 5, 6]), source, 2) == [[0, 1], [3, 5], [6]]


def test_more_experts_than_slots_come_in_rounds_of_ascending_experts() -> None:
    cache, source = make(LEAST_SLOTS)
    for _ in range(2):
        rounds = walk(cache.acquire(2, list(range(8))), source, 2)
        assert flat(rounds) == list(range(8))


def test_transfers_run_under_the_computation_of_a_round() -> None:
    cache, source = make(4, experts=[16])
    source.at_once = False
    with cache.acquire(0, list(range(16))) as held:
        for ready in held.rounds:
            if ready.experts[-1] < 15:
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
        for _ in first.rounds:
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


@given(seed=st.integers(0, 2**31), slots=st.integers(4, 48), of_sizes=st.booleans())
def test_experts_that_stay_leave_room_for_any_other(seed: int, slots: int, of_sizes: bool) -> None:
    random, experts = Random(seed), [24, 24]
    sizes = mixed(experts) if of_sizes else None
    cache, source = make(slots, "lfu", experts, sizes=sizes)
    units = [(layer, expert) for layer in range(2) for expert in range(24)]
    random.shuffle(units)
    cache.warm(units)
    there = [expert for layer, expert in units if layer == 0 and cache.has(0, expert)]
    stay = cache.may_stay(0, there)
    assert stay == there[: len(stay)]
    at_once = 1
    if not of_sizes:
        assert len(stay) == min(len(there), max(0, slots - RING))
        at_once = min(RING, slots)
    copied = deque[TierPin]()
    with cache.acquire(0, sorted(stay)) as held:
        for layer, expert in units:
            if cache.lacks(layer, expert):
                pin = cache.pin(layer, expert, urgent=True)
                assert pin is not None
                pin.wait()
                check_bytes(source, pin.slot, layer, expert)
                copied.append(pin)
                if len(copied) == at_once:
                    copied.popleft().release()
        assert walk(held, source, 0) == [sorted(stay)]


def test_statistics_are_json() -> None:
    cache, source = make(8)
    walk(cache.acquire(0, [0]), source, 0)
    said = cache.statistics.as_dict()
    assert said["hit_ratio"] == 0.0
    assert set(said) > {"hits", "misses", "stall_seconds", "layers"}
    json.dumps(said)
    cache.statistics.reset()
    assert cache.statistics.total.misses == 0
