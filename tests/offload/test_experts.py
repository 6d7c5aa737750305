"""Layers over a cache give the bits of the kernel on all experts, whatever happens to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.weights import ExpertShape
from kernels import ExpertWeights, experts_forward
from kernels.cpu import choose_kernel
from kernels.reference import AnyExperts
from offload.arena import Arena, plane_arena, whole_arena
from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.layer import OffloadedExperts, run_arriving
from offload.policies import POLICIES
from offload.slots import SlotSizes
from routing import Routing
from tests.kernels.kernel_cases import make_case
from tests.kernels.plane_cases import make_layer

LAYERS, EXPERTS, HIDDEN, WIDTH = 3, 7, 40, 24


@dataclass
class Arriving:
    """A transfer that ends when it is waited for, or now and then when `done` is read."""

    places: Sequence[Tensor]
    blobs: Sequence[Tensor]
    random: Random
    fails: bool
    ended: bool = False
    failed: Exception | None = None

    @property
    def done(self) -> bool:
        if not self.ended and self.random.random() < 0.3:
            self._end()
        return self.ended

    def wait(self) -> float:
        if not self.ended:
            self._end()
        if self.failed is not None:
            raise self.failed
        return 0.0

    def cancel(self) -> bool:
        return not self.ended and self.random.random() < 0.5

    def hasten(self) -> None:
        pass

    def _end(self) -> None:
        self.ended = True
        if self.fails:
            self.failed = OffloadError("the disk is broken")
            return
        data = torch.cat([blob.reshape(-1).view(torch.uint8) for blob in self.blobs])
        for place in self.places:
            place.copy_(data[: len(place)])
            data = data[len(place) :]
        assert not len(data)


@dataclass
class Layers:
    """Whole layers in memory, a cache of their experts, and a source that copies."""

    resident: list[AnyExperts]
    arena: Arena
    random: Random
    fail: float = 0.0
    arriving: list[Arriving] = field(default_factory=list)

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Arriving:
        own, slots = self.resident[layer], self.arena.experts
        for rows, bias in (
            (slots.gate_up_bias_EG, own.gate_up_bias_EG),
            (slots.down_bias_EH, own.down_bias_EH),
        ):
            if rows is not None and bias is not None:
                rows[slot] = bias[expert]
        if isinstance(own, ExpertWeights):
            blobs = [own.gate_up_EGH[expert], own.down_EHF[expert]]
        else:
            assert not isinstance(slots, ExpertWeights)
            blobs = [own.scales[expert], *own.planes[expert][: len(slots.planes[slot])]]
        fails = self.random.random() < self.fail
        return Arriving(self.arena.places(slot), blobs, self.random, fails)

    def cache(self, slots: int, policy: str) -> ExpertCache:
        made, sizes = POLICIES[policy](LAYERS, EXPERTS), sizes_of(self)
        return ExpertCache(sizes, slots, self.arena, self, made)


def sizes_of(layers: Layers) -> SlotSizes:
    nbytes = sum(place.numel() for place in layers.arena.places(0))
    return SlotSizes.equal([layer.num_experts for layer in layers.resident], nbytes)


def make(quantized: bool, biased: bool, random: Random, experts: int = EXPERTS) -> Layers:
    bias: dict[str, Any] = {}
    count = LAYERS * experts
    if biased:
        bias = {
            "gate_up_bias_EG": torch.zeros(count, 2 * WIDTH),
            "down_bias_EH": torch.zeros(count, HIDDEN),
        }
    resident: list[AnyExperts] = []
    for seed in range(LAYERS):
        if quantized:
            layer: AnyExperts = make_layer(
                1, experts, 1, HIDDEN, WIDTH, 32, biased=biased, seed=seed,
                activation="clamped interleaved gate" if biased else "silu gate",
            ).experts  # fmt: skip
        else:
            layer = make_case(
                1, experts, 1, HIDDEN, WIDTH, torch.bfloat16, biased=biased, seed=seed
            ).experts
        resident.append(layer)
    shape, first = ExpertShape(HIDDEN, WIDTH, 2, 32), resident[0]
    if isinstance(first, ExpertWeights):
        arena = whole_arena(shape, torch.bfloat16, count, activation=first.activation, **bias)
    else:
        arena = plane_arena(
            shape, {8: 1}, count, first.interleaved, activation=first.activation, **bias
        )
    return Layers(resident, arena, random)


def draw_routing(
    tokens: int, top_k: int, generator: torch.Generator, experts: int = EXPERTS
) -> Routing:
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, 1).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return Routing(ids, torch.rand(ids.shape, generator=generator)).ascending()


@given(
    seed=st.integers(0, 2**31),
    quantized=st.booleans(),
    biased=st.booleans(),
    slots=st.integers(2, LAYERS * EXPERTS),
    policy=st.sampled_from(sorted(POLICIES)),
    fail=st.sampled_from((0.0, 0.1)),
)
def test_any_life_of_the_cache_gives_the_same_bits(
    seed: int, quantized: bool, biased: bool, slots: int, policy: str, fail: float
) -> None:
    """Prefetches of anything, taken back or not, sizes that change, transfers that come late and in
    any order, and some that fail: a call gives the right bits or an `OffloadError`."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    layers = make(quantized, biased, random)
    cache = layers.cache(slots, policy)
    layers.fail = fail
    offloaded = [
        OffloadedExperts(index, EXPERTS, cache, layers.arena.experts) for index in range(LAYERS)
    ]
    for _ in range(6):
        for layer in range(LAYERS):
            for _ in range(random.randrange(4)):
                unit = random.randrange(LAYERS), random.randrange(EXPERTS)
                cache.prefetch(*unit, value=random.random())
                if random.random() < 0.3:
                    cache.cancel(*unit)
            routing = draw_routing(random.choice((0, 1, 2, 5)), random.randint(1, 7), generator)
            hidden = torch.randn(routing.num_tokens, HIDDEN, generator=generator)
            arguments = hidden, routing.expert_ids, routing.weights
            expected = experts_forward(*arguments, layers.resident[layer])
            try:
                actual = offloaded[layer].forward(*arguments, experts_forward)
            except OffloadError:
                assert fail
                continue
            assert torch.equal(actual, expected)
        if random.random() < 0.3:
            cache.resize(random.randint(2, LAYERS * EXPERTS))


@pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")
@torch.inference_mode()
def test_the_way_that_a_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds while another reader than the native one reads, or for another kernel than ours;
    in one compiled call once all experts are there."""
    ways = list[bool]()

    def noted(*arguments: Any) -> bool:
        ways.append(run_arriving(*arguments))
        return ways[-1]

    monkeypatch.setattr("offload.layer.run_arriving", noted)
    layers = make(quantized=True, biased=False, random=Random(0))
    layer = OffloadedExperts(0, EXPERTS, layers.cache(4, "lru"), layers.arena.experts)
    arguments = torch.randn(1, HIDDEN), torch.tensor([[1, 4]]), torch.rand(1, 2)
    expected = experts_forward(*arguments, layers.resident[0])
    for kernel, tried in (
        (experts_forward, [False]),
        (experts_forward, [False, True]),
        (partial(experts_forward), [False, True]),
    ):
        assert torch.equal(layer.forward(*arguments, kernel), expected)
        assert ways == tried


def test_sizes_of_a_layer() -> None:
    layers = make(quantized=True, biased=True, random=Random(0))
    cache = layers.cache(4, "lru")
    layer = OffloadedExperts(1, EXPERTS, cache, layers.arena.experts)
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (7, HIDDEN, WIDTH)
    assert layer.expert_bytes == layers.resident[0].expert_bytes


def test_a_failed_read_is_an_error_of_that_call_only() -> None:
    layers = make(quantized=True, biased=False, random=Random(0))
    cache = layers.cache(4, "lru")
    layer = OffloadedExperts(0, EXPERTS, cache, layers.arena.experts)
    hidden, ids, weights = torch.randn(1, HIDDEN), torch.tensor([[1, 4]]), torch.ones(1, 2)
    layers.fail = 1.0
    with pytest.raises(OffloadError, match="the disk is broken"):
        layer.forward(hidden, ids, weights, experts_forward)
    layers.fail = 0.0
    expected = experts_forward(hidden, ids, weights, layers.resident[0])
    assert torch.equal(layer.forward(hidden, ids, weights, experts_forward), expected)
