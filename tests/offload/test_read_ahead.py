"""Reading the next layer ahead, on a simulated disk: what it saves, and when it does not begin."""

from __future__ import annotations

import pytest

from offload.cache import ExpertCache
from offload.layer import read_ahead
from offload.policies import POLICIES
from offload.slots import SlotSizes
from tests.oracles.simulated_disk import Clock, Disk, Room

LAYERS, EXPERTS, SLOTS = 12, 32, 96
READ_S, ATTENTION_S, EXPERTS_S = 0.001, 0.02, 0.01


def read_prompts(ahead: bool, wanted: int = EXPERTS) -> tuple[float, int, ExpertCache]:
    """Seconds and reads of two prompts that want so many experts of every layer."""
    clock = Clock()
    disk = Disk(clock, READ_S)
    policy = POLICIES["forecast"](LAYERS, EXPERTS)
    cache = ExpertCache(SlotSizes.equal([EXPERTS] * LAYERS, 1000), SLOTS, Room(), disk, policy)
    for _ in range(2):
        for layer in range(LAYERS):
            clock.now += ATTENTION_S
            with cache.acquire(layer, range(wanted)) as held:
                for ready in held.rounds:
                    clock.now += EXPERTS_S * len(ready.experts) / wanted
            if ahead:
                read_ahead(cache, layer, wanted)
    return clock.now, disk.reads, cache


def test_the_disk_reads_while_a_prompt_attends() -> None:
    before, reads, _ = read_prompts(ahead=False)
    after, more, cache = read_prompts(ahead=True)
    computing = 2 * LAYERS * (ATTENTION_S + EXPERTS_S)
    assert after - computing < 0.6 * (before - computing)
    assert reads <= more < 1.05 * reads
    assert cache.statistics.total.wasted_bytes == 0


@pytest.mark.parametrize("wanted", [4, 28])
def test_a_call_that_wants_less_than_nearly_all_reads_nothing_ahead(wanted: int) -> None:
    assert read_prompts(ahead=True, wanted=wanted)[2].statistics.total.prefetches == 0
