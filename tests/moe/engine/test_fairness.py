"""Priorities and ageing: sooner turns first, nobody starves, and nothing is left over.

What is planned is run without a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.engine.prefill_batch import SequenceGroup
from moe.engine.prefill_mode import PrefillMode
from moe.sequence import check_priority
from tests.moe.fake_sequences import AGE, FakeSequence, run_step, scheduler


@dataclass(frozen=True)
class Request:
    prompt: int
    new: int
    n: int
    arrives: int
    priority: int
    cancelled_after: int | None

    @property
    def cancelled_at(self) -> int | None:
        return None if self.cancelled_after is None else self.arrives + self.cancelled_after

    def group(self) -> SequenceGroup:
        sequences = [
            FakeSequence(list(range(self.prompt)), self.new, self.priority) for _ in range(self.n)
        ]
        return SequenceGroup(sequences)  # type: ignore[arg-type]


REQUESTS = st.lists(
    st.builds(
        Request,
        prompt=st.integers(1, 30),
        new=st.integers(1, 8),
        n=st.integers(1, 3),
        arrives=st.integers(0, 15),
        priority=st.integers(-2, 2),
        cancelled_after=st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=9,
)


def fits(request: Request, kv_tokens: int) -> bool:
    return max(request.prompt + request.new, request.n * (request.prompt + 1)) <= kv_tokens


@given(st.sampled_from(["whole", "chunked", "layered"]), REQUESTS, st.integers(40, 90))
def test_random_arrivals_priorities_and_cancellations(
    mode: PrefillMode, requests: list[Request], kv_tokens: int
) -> None:
    planner = scheduler(mode, kv_tokens)
    groups = {request.group(): request for request in requests if fits(request, kv_tokens)}
    for clock in range(3000):
        for group, request in groups.items():
            if request.arrives == clock:
                planner.submit(group)
            if clock == request.cancelled_at:
                planner.cancel(group)
        if clock > 27 and planner.idle:
            break
        waiting = [g for g in planner.waiting if not g.num_read and g in groups]
        decoding = set(planner.running)
        served = run_step(planner)
        assert max(served.values(), default=1) == 1
        # Stall-free: who was running has got a token, unless its memory was given up.
        again = {s for g in planner.waiting for s in g.sequences}
        if planner.prefilling is not None:
            again |= {s for chunk in planner.prefilling.chunks for s in chunk.group.sequences}
        assert decoding <= set(served) | again
        started = [g for g in waiting if g.num_read or g not in planner.waiting]
        left = [g for g in waiting if g not in started]
        # Sooner turns first: nobody who waits is overtaken by a later turn.
        assert all(g.queue_key < other.queue_key for g in started for other in left)
    assert planner.idle, "somebody starves"
    assert planner.num_used_tokens() == 0
    for group, request in groups.items():
        if request.cancelled_after is None:
            assert all(len(s.token_ids) == request.new for s in group.sequences)


@given(REQUESTS, st.integers(1, 20))
def test_turns_follow_the_rule_of_ageing(requests: list[Request], age: int) -> None:
    """Overtaken only by those who come within ``p - q`` times ``age`` steps."""
    planner = scheduler("whole", None, age=age)
    arrived = []
    for clock in range(16):
        for request in requests:
            if request.arrives == clock:
                group = request.group()
                planner.submit(group)
                arrived.append((request, group))
        planner._num_steps += 1
    for first, (request, group) in enumerate(arrived):
        for later, other in arrived[first + 1 :]:
            head_start = (request.priority - later.priority) * age
            overtakes = later.arrives - request.arrives < head_start
            assert (other.queue_key < group.queue_key) == overtakes


def test_a_low_priority_waits_no_longer_than_its_age_under_a_flood_of_high_ones() -> None:
    """One place, and two more urgent requests come in every step for ever."""
    planner = scheduler("whole", None, batch=1)
    low = Request(2, 1, 1, 0, priority=3, cancelled_after=None).group()
    planner.submit(low)
    urgent = Request(2, 1, 1, 0, priority=0, cancelled_after=None)
    steps = 0
    while not low.sequences[0].token_ids:
        for _ in range(2):
            planner.submit(urgent.group())
        run_step(planner)
        steps += 1
    # Those who came within its 15 steps went first, two a step, one served a step.
    assert steps == 2 * 3 * AGE + 1


def test_without_ageing_it_is_first_come_first_served() -> None:
    planner = scheduler("whole", None, batch=1, age=0)
    groups = [Request(2, 1, 1, 0, priority, None).group() for priority in (5, 0, -5)]
    for group in groups:
        planner.submit(group)
    assert planner.waiting == groups


def test_memory_is_taken_from_the_last_turn() -> None:
    """The urgent one came last; the one with the lowest priority gives way, though it is older."""
    planner = scheduler("whole", kv_tokens=18, batch=3)
    low, high = (Request(5, 8, 1, 0, priority, None).group() for priority in (1, 0))
    planner.submit(low)
    run_step(planner)
    planner.submit(high)
    finished: list[SequenceGroup] = []
    preempted = False
    while not planner.idle:
        run_step(planner)
        preempted |= any(g.sequences == low.sequences for g in planner.waiting)
        finished += [
            g for g in (low, high) if len(g.sequences[0].token_ids) == 8 and g not in finished
        ]
    assert preempted
    assert finished == [high, low]


def test_a_wave_in_flight_outlives_a_running_sequence_of_a_later_turn() -> None:
    planner = scheduler("layered", kv_tokens=17, batch=3)
    low, high = (Request(n, 13 - n, 1, 0, p, None).group() for n, p in ((4, 1), (11, 0)))
    planner.submit(low)
    run_step(planner)
    planner.submit(high)
    run_step(planner)
    batch = planner.prefilling
    assert batch is not None
    while not planner.waiting and planner.prefilling:
        run_step(planner)
    assert planner.waiting[0].sequences == low.sequences
    assert batch.is_last_layer_group or planner.prefilling is batch


def test_a_half_read_prompt_gives_way_to_an_urgent_one() -> None:
    planner = scheduler("chunked", kv_tokens=30)
    long, urgent = (Request(n, 1, 1, 0, p, None).group() for n, p in ((25, 0), (24, -1)))
    planner.submit(long)
    run_step(planner)
    assert long.num_read == 6
    planner.submit(urgent)
    run_step(planner)
    assert (long.num_read, urgent.num_read) == (0, 6)
    while not planner.idle:
        run_step(planner)
    assert len(long.sequences[0].token_ids) == 1


def test_a_wave_that_nobody_waits_for_ends() -> None:
    planner = scheduler("layered", None)
    group = Request(12, 1, 1, 0, 0, None).group()
    planner.submit(group)
    run_step(planner)
    assert planner.prefilling is not None
    planner.cancel(group)
    assert planner.idle


@pytest.mark.parametrize("priority", [101, -101, 1.5, True, "0"])
def test_a_priority_outside_its_range_is_refused(priority: Any) -> None:
    with pytest.raises(ValueError, match=r"priority must be a whole number in \[-100, 100\], got"):
        check_priority(priority)
