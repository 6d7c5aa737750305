"""The CPU computes missing experts where that is sooner; each expert is computed once."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import experts_forward
from offload.cpu_experts import CpuCosts, CpuExperts, measure_costs
from offload.errors import OffloadError
from offload.layer import COPIED_WITH_IDS, OffloadedExperts
from offload.pins import RING
from offload.streams import packed, unpacked
from tests.offload.test_experts import EXPERTS, HIDDEN, LAYERS, draw_routing, make
from tests.offload.test_host import Tiers, check_at_rest

NEVER, ALWAYS = CpuCosts(1.0, 1e9, 0.0), CpuCosts(1.0, 0.0, 0.0)


def tiers(
    costs: CpuCosts, seed: int = 0, slots: int = 4, host_slots: int = 12, experts: int = EXPERTS
) -> Tiers:
    random = Random(seed)
    disk = make(True, random.random() < 0.5, random, experts)
    made = Tiers(disk, slots, host_slots, "lfu", random)
    made.layers = [
        OffloadedExperts(
            layer,
            experts,
            made.cache,
            made.arena.experts,
            made.source,
            CpuExperts(layer, made.host, disk.arena.experts, costs),
        )
        for layer in range(LAYERS)
    ]
    return made


@given(
    seed=st.integers(0, 2**31),
    slots=st.integers(2, 20),
    host_slots=st.integers(2, 21),
    expert=st.sampled_from((0.0, 0.3, 1.0, 3.0)),
    row=st.sampled_from((0.0, 0.2)),
)
def test_every_expert_is_computed_once(
    seed: int, slots: int, host_slots: int, expert: float, row: float
) -> None:
    """Sums differ only in their order, wherever and however late experts are computed."""
    generator = torch.Generator().manual_seed(seed)
    made = tiers(CpuCosts(1.0, expert, row), seed, slots, host_slots)
    expected, found = [], []
    for _ in range(5):
        for layer in range(LAYERS):
            routing = draw_routing(1 + seed % 3, 1 + seed % 7, generator)
            hidden = torch.randn(routing.num_tokens, HIDDEN, generator=generator)
            arguments = hidden, routing.expert_ids, routing.weights
            made.queues.finish()  # host memory adds to what a kernel gives: that must be there
            found.append(made.forward(layer, *arguments))
            expected.append(experts_forward(*arguments, made.disk.resident[layer]))
    made.queues.finish()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    check_at_rest(made)


@given(
    seed=st.integers(0, 2**31),
    slots=st.integers(2, 20),
    host_slots=st.integers(2, 48),
    fail=st.sampled_from((0.0, 0.05)),
)
def test_what_the_cpu_computes_stays_while_other_experts_pass_through_host_memory(
    seed: int, slots: int, host_slots: int, fail: float
) -> None:
    """Calls that want more experts than host memory holds, and prefetches between them. Only a
    read that fails may fail a call, and whatever fails, nothing stays pinned."""
    experts, random, generator = 32, Random(seed), torch.Generator().manual_seed(seed)
    made = tiers(CpuCosts(1.0, 0.3, 0.0), seed, slots, host_slots, experts)
    made.disk.fail = fail
    made.host.warm((random.randrange(LAYERS), expert) for expert in range(experts))
    expected, found = [], []
    for _ in range(3):
        for layer in range(LAYERS):
            if random.random() < 0.5:
                made.cache.prefetch(random.randrange(LAYERS), random.randrange(experts))
            routing = draw_routing(random.choice((1, 6)), 8, generator, experts)
            hidden = torch.randn(routing.num_tokens, HIDDEN, generator=generator)
            arguments = hidden, routing.expert_ids, routing.weights
            made.queues.finish()
            try:
                found.append(made.forward(layer, *arguments))
            except OffloadError:
                assert fail
                continue
            expected.append(experts_forward(*arguments, made.disk.resident[layer]))
    made.queues.finish()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    check_at_rest(made)


def test_the_cpu_leaves_room_for_copies() -> None:
    """`RING` slots of host memory, where it would compute all that is there."""
    for host_slots in (RING, RING + 1, RING + 5):
        made = tiers(ALWAYS, host_slots=host_slots, experts=32)
        made.host.warm((0, expert) for expert in range(32))
        made.forward(0, torch.randn(1, HIDDEN), torch.arange(32)[None], torch.rand(1, 32))
        copied = made.queues.copied_bytes // made.cache.expert_bytes
        assert made.cache.statistics.total.misses - copied == host_slots - RING
        check_at_rest(made)


def test_what_is_sooner_decides() -> None:
    made = tiers(ALWAYS, host_slots=LAYERS * EXPERTS)
    made.host.warm((0, expert) for expert in range(EXPERTS - 1))
    rows = dict.fromkeys(range(EXPERTS), 1)
    host = made.host, made.disk.arena.experts

    def choose(costs: CpuCosts, absent: list[int]) -> list[int]:
        return CpuExperts(0, *host, costs).choose(absent, rows)

    assert choose(NEVER, [0, 1, 2]) == []
    assert choose(ALWAYS, [0, 1, 2]) == [0, 1, 2]
    assert choose(ALWAYS, [1, EXPERTS - 1]) == [1]  # the other one is on disk
    assert choose(CpuCosts(1.0, 0.9, 0.05), [3]) == [3]
    assert choose(CpuCosts(1.0, 0.9, 0.2), [3]) == []
    half = choose(CpuCosts(1.0, 1.0, 0.0), [0, 1, 2, 3, 4, 5])
    assert len(half) == 3  # as long here as there
    for expert in (0, 1, 2):
        made.cache.policy.touch(0, [expert])
    assert choose(CpuCosts(1.0, 1.0, 0.0), [0, 1, 2, 3, 4, 5]) == [3, 4, 5]  # the others shall stay


def test_they_are_misses_that_bring_nothing() -> None:
    made = tiers(ALWAYS, host_slots=LAYERS * EXPERTS)
    made.host.warm((0, expert) for expert in range(EXPERTS))
    made.forward(0, torch.randn(1, HIDDEN), torch.tensor([[1, 4]]), torch.ones(1, 2))
    total = made.cache.statistics.total
    assert (total.hits, total.misses, total.demand_bytes) == (0, 2, 0)
    assert not made.cache.present.any()
    assert made.host.statistics.total.hits == 2
    assert not made.host._manager.pins


def test_what_a_call_of_few_rows_needs_comes_in_one_copy() -> None:
    """Bigger ones bring their rows only where the CPU takes a share."""
    made = tiers(ALWAYS, host_slots=LAYERS * EXPERTS)
    made.host.warm((0, expert) for expert in range(EXPERTS))
    few = COPIED_WITH_IDS // (4 * HIDDEN)
    for rows, tensors in ((1, 3), (few, 3), (few + 1, 1)):
        hidden, ids = torch.randn(rows, HIDDEN), torch.tensor([[1, 4]]).expand(rows, 2)
        made.queues.reads.clear()
        found = made.forward(0, hidden, ids, torch.rand(rows, 2))
        assert made.queues.reads == [tensors]
        assert found.shape == hidden.shape


def test_bytes_of_several_tensors_are_read_together() -> None:
    made = [torch.tensor([[3, -1]]), torch.rand(1, 2), torch.randn(1, 5).bfloat16()]
    for tensors in (made, made[:1], [tensor[:0] for tensor in made]):
        again = unpacked(packed(tensors), tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))


def test_costs_are_measured() -> None:
    disk = make(True, False, Random(0))
    costs = measure_costs(disk.arena, disk.arena.experts, 0.5)
    known = {"expert": 2.0, "row": 1.0}
    recalled = measure_costs(disk.arena, disk.arena.experts, 0.5, lambda *_: (known, "today"))
    assert recalled == CpuCosts(0.5, 2.0, 1.0)
    assert costs.copy == 0.5
    assert 0 <= costs.expert < 1
    assert costs.computed(8) == pytest.approx(costs.expert + 8 * costs.row)
