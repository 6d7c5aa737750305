"""The expert cache under anything in any order: bytes, table and counters agree all the time."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload.errors import OffloadError
from offload.pins import PinnedExperts
from offload.policies import POLICIES
from offload.slots import SlotSizes
from tests.offload.cache_cases import EXPERTS, check_bytes, flat, make, mixed, walk, with_prefixes


class CacheMachine(RuleBasedStateMachine):
    """Anything in any order, against the bytes of the source and simple bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[PinnedExperts, int, list[int]]] = []
        self.asked = 0
        self.failing = False  # what was broken when a transfer began fails after it was repaired

    @rule(
        slots=st.integers(2, 9),
        policy=st.sampled_from(sorted(POLICIES)),
        sizes=st.sampled_from((None, mixed(EXPERTS), with_prefixes(mixed(EXPERTS)))),
        deferred=st.booleans(),
    )
    @precondition(lambda self: not hasattr(self, "cache"))
    def begin(self, slots: int, policy: str, sizes: SlotSizes | None, deferred: bool) -> None:
        self.least = 2 if sizes is None else 4
        self.cache, self.source = make(max(slots, self.least), policy, capacity=9, sizes=sizes)
        self.cache._manager.ranking.deferred = deferred

    @rule(
        layer=st.integers(0, 2),
        chosen=st.sets(st.integers(0, 7)),
        prefixes=st.sets(st.integers(0, 7)),
    )
    @precondition(lambda self: hasattr(self, "cache"))
    def run_a_call(self, layer: int, chosen: set[int], prefixes: set[int]) -> None:
        experts = sorted(expert for expert in chosen if expert < EXPERTS[layer])
        self.asked += len(experts)
        try:
            held = self.cache.acquire(layer, experts, prefixes=prefixes.intersection(experts))
            rounds = walk(held, self.source, layer)
            assert flat(rounds) == experts
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
    def residency_says_where_each_expert_is(self) -> None:
        if not hasattr(self, "cache"):
            return
        found, table = self.cache.residency().reshape(len(EXPERTS), -1), self.cache._table
        for layer, count in enumerate(EXPERTS):
            for expert in range(count):
                if self.cache.has(layer, expert):
                    unit = layer * table.width + expert
                    assert found[layer, expert] == (3 if table.is_whole(unit) else 2)
                else:
                    assert found[layer, expert] == (0 if self.cache.lacks(layer, expert) else 1)
            assert not found[layer, count:].any()

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "cache"):
            total = self.cache.statistics.total
            assert total.hits + total.misses == self.asked
            assert min(vars(total).values()) >= 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=40)
