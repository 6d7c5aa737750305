"""Prefixes of experts: which experts they may serve, and that results are of the bits served."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.weights import ExpertShape
from kernels import QuantizedExperts, experts_forward
from kernels.planes import num_planes
from kernels.reference import AnyExperts
from moe.methods.late_prefix.policy import LatePrefix
from offload.arena import plane_arena
from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.layer import OffloadedExperts
from offload.policies import POLICIES
from offload.slots import SlotSizes
from tests.kernels.plane_cases import make_layer
from tests.offload.test_experts import EXPERTS, HIDDEN, LAYERS, WIDTH, Layers, draw_routing

GRAINS = {8: 8, 4: 4, 3: 3, 2: 2}


def rule(ids_TK: Tensor, weights_TK: Tensor, share: float) -> list[int]:
    """`LatePrefix.light` word by word, in exact arithmetic."""
    heavy, seen = set(), set()
    for ids, weights in zip(ids_TK.tolist(), weights_TK.tolist(), strict=True):
        row = [(Fraction(abs(weight)), -at, expert)
               for at, (expert, weight) in enumerate(zip(ids, weights, strict=True))
               if expert >= 0]  # fmt: skip
        before, total = Fraction(0), sum(weight for weight, *_ in row)
        for weight, _, expert in sorted(row, reverse=True):
            seen.add(expert)
            if before < Fraction(share) * total:
                heavy.add(expert)
            before += weight
    return sorted(seen - heavy)


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 6),
    top_k=st.integers(1, EXPERTS),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_which_experts_a_prefix_may_serve(seed: int, tokens: int, top_k: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = draw_routing(tokens, top_k, generator).expert_ids
    weights = torch.randint(-8, 9, ids.shape, generator=generator) / 16  # ties and zeros, exactly
    assert LatePrefix(2, share).light(ids, weights) == rule(ids, weights, share)


def test_the_heaviest_have_the_share() -> None:
    ids, weights = torch.tensor([[1, 4, 6], [0, 4, -1]]), torch.tensor([[2, 5, 3.0], [3, 1, 9]])
    assert LatePrefix(2, 0.5).light(ids[:1], weights[:1]) == [1, 6]
    assert LatePrefix(2, 0.6).light(ids[:1], weights[:1]) == [1]
    assert LatePrefix(2, 1.0).light(ids[:1], weights[:1]) == []
    assert LatePrefix(2, 0.6).light(ids, weights) == [1]  # 4 is heavy to the first token
    assert LatePrefix(2, 0.0).light(ids, weights) == [0, 1, 4, 6]


def make(late_bits: int, slots: int, policy: str, random: Random) -> tuple[Layers, ExpertCache]:
    """Layers of experts of 8 bits, of which a prefix may be read."""
    resident: list[AnyExperts] = [
        make_layer(1, EXPERTS, 1, HIDDEN, WIDTH, 32, seed=seed).experts for seed in range(LAYERS)
    ]
    first, shape = resident[0], ExpertShape(HIDDEN, WIDTH, 2, 32)
    assert isinstance(first, QuantizedExperts)
    kinds = {bits: GRAINS[bits] for bits in (8, late_bits)}
    count = LAYERS * EXPERTS
    sizes = SlotSizes(
        [EXPERTS] * LAYERS,
        {grains: shape.nbytes(bits) for bits, grains in kinds.items()},
        [GRAINS[8]] * count,
        [GRAINS[late_bits]] * count,
    )
    capacity = sizes.grains_for(count)
    arena = plane_arena(shape, kinds, capacity, first.interleaved, activation=first.activation)
    layers = Layers(resident, arena, random)
    return layers, ExpertCache(sizes, slots, arena, layers, POLICIES[policy](LAYERS, EXPERTS))


class Watched:
    """Runs experts, and notes the bits of each that it runs."""

    def __init__(self, layer: OffloadedExperts) -> None:
        self.layer, self.bits = layer, dict[int, int]()

    def __call__(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: AnyExperts,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(experts, QuantizedExperts)
        slots = self.layer.cache.slot_ids(self.layer.layer).tolist()
        expert_of = {slot: expert for expert, slot in enumerate(slots)}
        for slot in set(expert_ids_TK.flatten().tolist()) - {-1}:
            self.bits[expert_of[slot]] = experts.bits_of(slot)
        return experts_forward(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)


def cut(experts: AnyExperts, bits: dict[int, int]) -> QuantizedExperts:
    """With no more bits of each."""
    assert isinstance(experts, QuantizedExperts)
    planes = enumerate(experts.planes)
    return replace(
        experts, planes=tuple(own[: num_planes(bits.get(expert, 8))] for expert, own in planes)
    )


@given(
    seed=st.integers(0, 2**31),
    late_bits=st.sampled_from((2, 3, 4)),
    slots=st.integers(2, LAYERS * EXPERTS),
    policy=st.sampled_from(sorted(POLICIES)),
    share=st.sampled_from((0.0, 0.4, 0.7, 1.0)),
    fail=st.sampled_from((0.0, 0.1)),
)
def test_results_are_those_of_the_bits_that_were_served(
    seed: int, late_bits: int, slots: int, policy: str, share: float, fail: float
) -> None:
    """In any state of the cache, no heavy expert is a prefix, no light one less than that, and the
    bits of a result are those of the kernel on experts of just these bits."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    layers, cache = make(late_bits, slots, policy, random)
    layers.fail = fail
    offloaded = [OffloadedExperts(at, EXPERTS, cache, layers.arena.experts) for at in range(LAYERS)]
    prefixes = 0
    for _ in range(6):
        for layer in offloaded:
            layer.serve_prefixes(LatePrefix(late_bits, share))
            for _ in range(random.randrange(3)):
                unit = random.randrange(LAYERS), random.randrange(EXPERTS)
                cache.prefetch(*unit, value=random.random())
            routing = draw_routing(random.choice((1, 1, 2, 5)), random.randint(1, 7), generator)
            hidden = torch.randn(routing.num_tokens, HIDDEN, generator=generator)
            arguments, watched = (hidden, routing.expert_ids, routing.weights), Watched(layer)
            try:
                actual = layer.forward(*arguments, watched)
            except OffloadError:
                assert fail
                continue
            light = rule(routing.expert_ids, routing.weights, share)
            assert all(bits in (8, late_bits) for bits in watched.bits.values())
            assert {expert for expert, bits in watched.bits.items() if bits < 8} <= set(light)
            expected = experts_forward(*arguments, cut(layers.resident[layer.layer], watched.bits))
            assert torch.equal(actual, expected)
            prefixes += sum(bits < 8 for bits in watched.bits.values())
        if random.random() < 0.3:
            cache.resize(random.randint(2, LAYERS * EXPERTS))
    assert fail or cache.statistics.total.prefixes == prefixes


def test_a_prefix_is_used_until_all_is_asked_for() -> None:
    layers, cache = make(4, LAYERS * EXPERTS, "lru", Random(0))
    layer = OffloadedExperts(0, EXPERTS, cache, layers.arena.experts)
    layer.serve_prefixes(LatePrefix(4, 0.6))
    ids, hidden = torch.tensor([[1, 4]]), torch.randn(1, HIDDEN)
    whole, prefix = (cache.sizes.kinds[GRAINS[bits]] for bits in (8, 4))

    def ask(*weights: float) -> tuple[int, ...]:
        layer.forward(hidden, ids, torch.tensor([weights]), experts_forward)
        total = cache.statistics.total
        return total.misses, total.demand_bytes, total.prefixes, total.refined

    assert ask(0.7, 0.3) == (2, whole + prefix, 1, 0)
    assert ask(0.7, 0.3) == (2, whole + prefix, 2, 0)
    assert ask(0.3, 0.7) == (3, 2 * whole + prefix, 2, 1)  # 1 is there whole, and stays so
    assert ask(0.7, 0.3) == (3, 2 * whole + prefix, 2, 1)


def test_prefixes_leave_room_for_more_experts() -> None:
    layers, cache = make(2, 4, "lru", Random(0))
    layer = OffloadedExperts(0, EXPERTS, cache, layers.arena.experts)
    layer.serve_prefixes(LatePrefix(4, 0.0))
    layer.forward(torch.randn(1, HIDDEN), torch.arange(EXPERTS)[None], torch.ones(1, EXPERTS),
                  experts_forward)  # fmt: skip
    assert cache.slots == 4
    assert cache.present.sum() == EXPERTS


def test_what_comes_in_background_comes_whole() -> None:
    _, cache = make(4, LAYERS * EXPERTS, "lru", Random(0))
    assert cache.prefetch(0, 3)
    with cache.acquire(0, [3], prefixes=[3]) as held:
        for _ in held.rounds:
            pass
    assert cache.statistics.total.prefixes == 0
    assert cache.statistics.total.useful_bytes == cache.sizes.kinds[GRAINS[8]]
