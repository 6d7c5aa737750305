"""Two tiers on a device that is as late as it may be: the bits of all experts on the device."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.weights import ExpertShape
from kernels import ExpertWeights, QuantizedExperts, experts_forward
from kernels.reference import AnyExperts
from offload.arena import PAGE, Arena, plane_arena, whole_arena
from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.host_tier import HostSource
from offload.layer import OffloadedExperts
from offload.offloaded import HostPolicy
from offload.policies import LRU, POLICIES
from tests.offload.test_experts import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    Layers,
    draw_routing,
    make,
    sizes_of,
)
from tests.offload.two_queues import TwoQueues
from tests.readbacks import waits


class LateRoom:
    """Slots of a device: what is moved is moved when the device comes to it."""

    def __init__(self, arena: Arena, queues: TwoQueues) -> None:
        self.arena, self.queues, self.capacity = arena, queues, arena.capacity

    def move(self, source: int, target: int) -> None:
        self.queues.launch(lambda: self.arena.move(source, target))

    def resize(self, grains: int) -> None:
        """Memory of a GPU stays taken."""


class Tiers:
    """A device over host memory over a source that copies when it likes."""

    def __init__(
        self, layers: Layers, slots: int, host_slots: int, policy: str, random: Random
    ) -> None:
        self.disk = layers
        near, own = layers.arena, layers.resident[0]
        self.queues = TwoQueues(random)
        experts = own.num_experts
        made = POLICIES[policy](LAYERS, experts)
        values = HostPolicy(made, lambda: self.cache.present)
        sizes = sizes_of(layers)
        self.host = ExpertCache(sizes, host_slots, near, layers, values)
        self.arena = like(near, own, slots)
        self.source = HostSource(self.host, near, self.arena, self.queues)
        room = LateRoom(self.arena, self.queues)
        self.cache = ExpertCache(sizes, slots, room, self.source, made)
        self.layers = [
            OffloadedExperts(index, experts, self.cache, self.arena.experts, self.source)
            for index in range(LAYERS)
        ]

    def forward(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What a layer gives when the device has come to it; kernels run late."""

        def late(
            hidden_TH: Tensor,
            expert_ids_TK: Tensor,
            weights_TK: Tensor,
            experts: AnyExperts,
            add_to_TH: Tensor | None = None,
        ) -> Tensor:
            arguments = hidden_TH, expert_ids_TK, weights_TK, experts
            total = torch.zeros_like(hidden_TH) if add_to_TH is None else add_to_TH

            def kernel() -> None:
                if add_to_TH is None:
                    total.copy_(experts_forward(*arguments))
                else:
                    experts_forward(*arguments, total)

            self.queues.launch(kernel)
            return total

        return self.layers[layer].forward(hidden, ids, weights, late)


def like(near: Arena, own: AnyExperts, slots: int) -> Arena:
    """Slots of a device with the layout of those in host memory."""
    bias: dict[str, Any] = {}
    if own.gate_up_bias_EG is not None and own.down_bias_EH is not None:
        bias = {
            "gate_up_bias_EG": torch.zeros(slots, own.gate_up_bias_EG.shape[1]),
            "down_bias_EH": torch.zeros(slots, own.down_bias_EH.shape[1]),
        }
    shape = ExpertShape(HIDDEN, own.intermediate_size, 2, 32)
    if isinstance(own, ExpertWeights):
        return whole_arena(shape, torch.bfloat16, slots, activation=own.activation, **bias)
    return plane_arena(shape, {8: 1}, slots, own.interleaved, activation=own.activation, **bias)


def tiers(seed: int = 0, slots: int = 5, host_slots: int = 9, **changed: Any) -> Tiers:
    random = Random(seed)
    layers = make(changed.get("quantized", True), changed.get("biased", False), random)
    return Tiers(layers, slots, host_slots, changed.get("policy", "lru"), random)


@given(
    seed=st.integers(0, 2**31),
    quantized=st.booleans(),
    biased=st.booleans(),
    slots=st.integers(2, LAYERS * EXPERTS),
    host_slots=st.integers(2, LAYERS * EXPERTS),
    policy=st.sampled_from(sorted(POLICIES)),
    fail=st.sampled_from((0.0, 0.1)),
    arranged=st.booleans(),
)
def test_a_device_as_late_as_it_may_be_gives_the_same_bits(
    seed: int,
    quantized: bool,
    biased: bool,
    slots: int,
    host_slots: int,
    policy: str,
    fail: float,
    arranged: bool,
) -> None:
    """Kernels and copies run in any order that events allow, reads come late, some fail, prefetches
    are taken back: no slot is read before its bytes have come and, on CUDA devices, are arranged,
    or filled while it is read."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    layers = make(quantized, biased, random)
    order = "cuda" if arranged else "cpu"
    with patch("offload.arena.arrangement_for", lambda *_: order):
        made = Tiers(layers, slots, host_slots, policy, random)
    made.disk.fail = fail
    expected, found = [], []
    for _ in range(6):
        for layer in range(LAYERS):
            for _ in range(random.randrange(4)):
                unit = random.randrange(LAYERS), random.randrange(EXPERTS)
                made.cache.prefetch(*unit, value=random.random())
                if random.random() < 0.3:
                    made.cache.cancel(*unit)
            routing = draw_routing(random.choice((0, 1, 2, 5)), random.randint(1, 7), generator)
            hidden = torch.randn(routing.num_tokens, HIDDEN, generator=generator)
            arguments = hidden, routing.expert_ids, routing.weights
            try:
                found.append(made.forward(layer, *arguments))
            except OffloadError:
                assert fail
                continue
            own = made.disk.resident[layer]
            if isinstance(own, QuantizedExperts) and arranged:
                own = own.for_device(torch.device("cuda"))  # so that the same kernel reads it
            expected.append(experts_forward(*arguments, own))
        if random.random() < 0.3:
            made.cache.resize(random.randint(2, slots))
    made.queues.finish()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    check_at_rest(made)


def check_at_rest(made: Tiers) -> None:
    """When all copies have ended, they pin nothing in host memory."""
    made.cache.resize(made.cache.slots)  # which settles what is under way
    made.queues.finish()
    for batch in made.source._batches:
        batch.event.synchronize()
    made.source.launch()
    assert not made.host._manager.pins
    assert not made.source._waiting


def test_misses_of_a_layer_are_one_batch_and_one_round() -> None:
    made = tiers(slots=8, host_slots=LAYERS * EXPERTS)
    made.host.warm((layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS))
    ids, weights = torch.tensor([[0, 2, 3], [1, 3, 5]]), torch.rand(2, 3)
    hidden = torch.randn(2, HIDDEN)
    made.forward(0, hidden, ids, weights)
    assert made.queues.batches == 1
    assert made.host.statistics.total.hits == 5
    assert made.host.statistics.total.misses == 0
    made.forward(0, hidden, ids, weights)
    assert made.queues.batches == 1
    made.queues.finish()
    made.forward(1, hidden, ids, weights)
    stalls = [layer.stall_seconds for layer in made.cache.statistics.layers]
    # The device waited once, for its second; what the host waits is real time, and far less.
    assert [int(seconds) for seconds in stalls[:2]] == [1, 0]


def test_the_host_does_not_wait_for_ids_where_the_device_has_all_experts() -> None:
    """Nor if it has those that this rank serves; it counts what was asked for at a later call."""
    made = tiers(slots=LAYERS * EXPERTS, host_slots=LAYERS * EXPERTS)
    made.cache.warm((layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS))
    made.queues.finish()
    layer, counters = made.layers[1], made.cache.statistics.layers[1]
    ids, weights, hidden = torch.tensor([[1, 3], [3, -1]]), torch.ones(2, 2), torch.ones(2, HIDDEN)

    def call() -> Tensor:
        return layer.forward(hidden, ids, weights, experts_forward)

    whole = experts_forward(hidden, ids, weights, made.disk.resident[1])
    assert torch.equal(call(), whole)
    made.queues.drift = lambda: None  # type: ignore[method-assign]
    assert not waits(call)
    assert counters.hits == 0
    made.queues.finish()
    assert torch.equal(call(), whole)
    assert counters.hits == 2 * 2
    made.cache.drop([(1, 5)])
    assert waits(call)
    layer.serve_only([1, 3])
    call()
    assert not waits(call)
    layer.serve_only(None)
    assert waits(call)


def test_what_host_memory_has_is_not_read_again() -> None:
    made = tiers(slots=2, host_slots=EXPERTS)
    hidden, weights = torch.randn(1, HIDDEN), torch.ones(1, 1)
    for _ in range(3):
        for expert in range(EXPERTS):
            made.forward(0, hidden, torch.tensor([[expert]]), weights)
    total = made.host.statistics.total
    assert (total.misses, total.evictions) == (EXPERTS, 0)
    assert made.cache.statistics.total.misses == 3 * EXPERTS
    assert made.queues.copied_bytes == 3 * EXPERTS * made.cache.expert_bytes


def test_both_tiers_together_hold_what_fits_into_both() -> None:
    """Two thirds of the experts on both sides of the border are all of them, if few are held
    twice; a cache that includes the other would have to read a third again and again."""
    random = Random(1)
    made = Tiers(make(True, False, random), 14, 14, "lfu", random)
    generator = torch.Generator().manual_seed(1)
    hot = torch.arange(EXPERTS).float().neg().div(2).exp()

    def visit() -> None:
        for layer in range(LAYERS):
            ids = torch.multinomial(hot, 2, generator=generator).sort().values[None]
            made.forward(layer, torch.randn(1, HIDDEN), ids, torch.rand(1, 2))

    for _ in range(60):
        visit()
    made.host.statistics.reset()
    for _ in range(60):
        visit()
    distinct = made.host.present | made.cache.present
    assert distinct.sum() >= 0.9 * LAYERS * EXPERTS


def test_host_memory_gives_up_what_is_safest_on_the_device() -> None:
    policy = LRU(1, 6)
    for expert in range(6):
        policy.touch(0, [expert])  # the later, the more valuable

    present = np.zeros(6, dtype=bool)
    values = HostPolicy(policy, lambda: present)
    assert values.values().tolist() == policy.values().tolist()
    present[[0, 2, 3, 5]] = True
    order = np.argsort(values.values(), kind="stable").tolist()
    assert order == [5, 3, 0, 1, 2, 4]


def test_a_failed_read_fails_the_call_and_nothing_after_it() -> None:
    made = tiers()
    arguments = torch.randn(1, HIDDEN), torch.tensor([[1, 4]]), torch.ones(1, 2)
    made.disk.fail = 1.0
    with pytest.raises(OffloadError, match="the disk is broken"):
        made.forward(0, *arguments)
    made.disk.fail = 0.0
    found = made.forward(0, *arguments)
    made.queues.finish()
    assert torch.equal(found, experts_forward(*arguments, made.disk.resident[0]))
    check_at_rest(made)


def test_what_the_system_does_not_let_us_pin_stays_pageable() -> None:
    arena = tiers(host_slots=LAYERS * EXPERTS).disk.arena
    queues = TwoQueues(Random(0), pins=2)
    pieces = arena.pin(arena.capacity, queues.pin)
    assert arena.pinned == arena.capacity  # it is small: one piece
    assert pieces == queues.locked
    assert sum(piece.nbytes for piece in pieces) == arena.capacity * arena.grain_bytes
    assert arena.pin(arena.capacity, queues.pin) == []
    refused = tiers(host_slots=4).disk.arena
    assert refused.pin(4, TwoQueues(Random(0), pins=0).pin) == []
    assert refused.pinned == 0


@given(st.integers(0, 40), st.integers(1, 40), st.sampled_from((40, 512, 4096)))
def test_pinned_pieces_share_no_page(wanted: int, slots: int, hidden: int) -> None:
    shape = ExpertShape(hidden, 24, 2, 32)
    arena = whole_arena(shape, torch.bfloat16, slots, activation=torch.nn.functional.silu)
    with patch("offload.arena.PIN_BYTES", 3 * arena.grain_bytes):
        pieces = arena.pin(min(wanted, slots), TwoQueues(Random(0)).pin)
    assert arena.pinned <= min(wanted, slots)
    assert arena.pinned == slots or wanted < slots
    pages = [range(p.data_ptr() // PAGE, -(-(p.data_ptr() + p.nbytes) // PAGE)) for p in pieces]
    assert sum(map(len, pages)) == len({page for piece in pages for page in piece})
