"""The border between experts and keys and values follows what is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moe.engine.borrowing import KVBorrowing
from moe.loading.memory_plan import MemoryPlan, PlannedTier
from offload.errors import OffloadError

SLOT, TOKEN, KV_TOKENS = 1000, 30, 2000


class Cache(SimpleNamespace):
    """Takes any size up to 400 slots."""

    slots: int

    def resize(self, slots: int) -> int:
        self.sizes.append(slots)
        self.slots = min(slots, 400)
        return self.slots


def borrowed(slots: int) -> tuple[KVBorrowing, Any]:
    tiers = PlannedTier("memory", slots, slots * SLOT), PlannedTier("disk", 400, 400 * SLOT)
    plan = MemoryPlan((), "memory", None, KV_TOKENS, TOKEN, tiers)
    cache: Any = Cache(slots=slots, sizes=[])
    return KVBorrowing(cache, plan), cache


@given(st.integers(2, 300), st.lists(st.integers(0, KV_TOKENS + 10), max_size=40))
def test_both_together_never_take_more_than_was_planned(slots: int, used: list[int]) -> None:
    memory, cache = borrowed(slots)
    for tokens in used:
        memory.resize_for(tokens)
        assert slots <= cache.slots
        assert cache.slots * SLOT + min(tokens, KV_TOKENS) * TOKEN <= (
            slots * SLOT + KV_TOKENS * TOKEN
        )


def test_an_empty_pool_is_lent_and_given_back() -> None:
    memory, cache = borrowed(100)
    memory.resize_for(0)
    assert cache.slots == 160  # 60 slots of keys and values
    memory.resize_for(KV_TOKENS)
    assert cache.slots == 100


def test_small_changes_change_nothing() -> None:
    memory, cache = borrowed(320)  # in strides of 10 slots
    memory.resize_for(1000)
    assert cache.sizes == [350]
    for tokens in (990, 700, 1000, 980):
        memory.resize_for(tokens)
    assert cache.sizes == [350]
    memory.resize_for(300)
    memory.resize_for(1010)
    assert cache.sizes == [350, 370, 340]


def test_a_read_that_hangs_leaves_the_border_where_it_is() -> None:
    memory, cache = borrowed(100)

    def refuse(_: int) -> int:
        raise OffloadError("a read does not end")

    cache.resize = refuse
    memory.resize_for(0)
    assert cache.slots == 100
