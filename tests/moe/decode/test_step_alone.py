"""A step in one call beside the same step in a call a layer, on random descriptions and experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ExpertWeights, QuantizedExperts, experts_forward
from kernels.cpu import choose_kernel
from kernels.cpu.experts import LayerCall
from moe.decode.compiled import DescribedStep
from moe.decode.records import CompiledPass
from moe.decode.step import CompiledExperts, InsideExperts
from moe.describe.description import Description, Experts
from moe.kv.cache import KVCache
from moe.network.packed_pass import Work
from routing import Routing
from tests.kernels.kernel_cases import make_case
from tests.kernels.plane_cases import make_layer
from tests.moe.decode.description_cases import VOCABULARY, Maker, filled

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")

EXPERTS = 12
Layer = ExpertWeights | QuantizedExperts


def some_experts(data: st.DataObject, hidden: int) -> Layer:
    """One layer of any kind that C++ runs by itself."""
    width, seed = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 2**31))
    biased = data.draw(st.booleans())
    sizes = (1, EXPERTS, 1, hidden, width)
    if data.draw(st.booleans()):
        bits = tuple(data.draw(st.permutations((8, 4, 3, 2))))
        kind = data.draw(st.sampled_from(["silu gate", "clamped interleaved gate"]))
        return make_layer(*sizes, 32, bits, kind, biased=biased, seed=seed).experts
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    kind = data.draw(st.sampled_from(["silu gate", "tanh gelu gate"]))
    return make_case(*sizes, dtype, activation=kind, biased=biased, seed=seed).experts


def whole_step(
    description: Description, layers: list[Layer], slots: Sequence[Tensor | None] = ()
) -> DescribedStep:
    """Runs these experts by itself.

    Args:
        slots: see `CompiledExperts`; none: all are in memory.
    """
    kernel, _ = choose_kernel()
    assert kernel is not None
    rows = torch.empty(1, description.norm.weight.numel())
    inside = [kernel.layer_call(rows, layer) for layer in layers]
    calls = [call for call in inside if call is not None]
    places = slots or [None] * len(calls)
    return DescribedStep(description, kernel.decode, list(map(CompiledExperts, calls, places)))


@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_one_call_gives_the_bits_of_a_call_a_layer(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    hidden = data.draw(st.sampled_from([8, 24, 64, 100]))
    description = Maker(data, hidden).description(3)
    routed = [layer for layer in description.layers if isinstance(layer.feed, Experts)]
    layers = [some_experts(data, hidden) for _ in routed]
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 17, 511, 1100]), min_size=1, max_size=16))
    one = filled(description, lengths, 6)
    other = [sequence.fork(sequence.capacity, sequence.length) for sequence in one]
    step, threads = whole_step(description, layers), torch.get_num_threads()
    description.embedding.weight[3] = torch.nan  # type: ignore[operator]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step._whole, "patience", data.draw(st.sampled_from([60.0, -1.0])))
        try:
            torch.set_num_threads(data.draw(st.integers(1, 3)))
            for _ in range(2):
                check_both(step, layers, new_work(data, one), other)
        finally:
            torch.set_num_threads(threads)


def new_work(data: st.DataObject, caches: list[KVCache]) -> list[Work]:
    tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3)
    return [Work(data.draw(tokens), cache, all_logits=True) for cache in caches]


def check_both(
    step: DescribedStep, layers: list[Layer], work: list[Work], others: list[KVCache]
) -> None:
    routings = []

    def routed(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        routings.append(routing)
        return experts_forward(rows, routing.expert_ids, routing.weights, layers[layer])

    expected = step([Work(w.token_ids, c, True) for w, c in zip(work, others, strict=True)], routed)
    noted = Noted(layers)
    actual = step.inside(work, noted)
    visited = [routing for _, routing in noted.told]
    assert all(map(same, actual, expected))
    assert len(visited) == len(routings)
    for ours, theirs in zip(visited, routings, strict=True):
        assert torch.equal(ours.expert_ids, theirs.expert_ids)
        assert same(ours.weights, theirs.weights)
    for item, cache in zip(work, others, strict=True):
        assert item.cache.length == cache.length


class Noted(InsideExperts):
    """What a step has told of each layer; runs experts where one is missing.

    Args:
        slots: of each layer, as of `CompiledExperts`; none: all experts are in memory.
    """

    def __init__(self, layers: list[Layer], slots: Sequence[Tensor] = ()) -> None:
        self.layers, self.slots = layers, slots
        self.told: list[tuple[int, Routing]] = []

    def passed(self, first: int, end: int, step: CompiledPass) -> None:
        assert first < end
        for layer in range(first, end):
            routing, asked = step.routing(layer), step.experts(layer)
            assert asked == sorted(set(routing.expert_ids.flatten().tolist()))
            assert not self.slots or all(self.slots[layer][expert] >= 0 for expert in asked)
            self.told.append((layer, routing))

    def run(self, layer: int, step: CompiledPass, call: LayerCall) -> Tensor | None:
        routing = step.routing(layer)
        assert any(self.slots[layer][expert] < 0 for expert in step.experts(layer))
        self.told.append((layer, routing))
        own = self.layers[layer]
        found = experts_forward(step.h_BH, routing.expert_ids, routing.weights, own)
        if layer % 2:  # as compiled calls do
            address(found.shape, step.rows(layer).out_TH)[:] = found
            return None
        return found


def address(shape: Sequence[int], at: int) -> Tensor:
    """Float32 memory."""
    size = math.prod(shape)
    return torch.frombuffer((c_float * size).from_address(at), dtype=torch.float32).view(shape)


@settings(max_examples=30)
@given(st.data(), st.integers(0, 2**31))
@torch.inference_mode()
def test_only_layers_that_lack_an_expert_are_asked(data: st.DataObject, seed: int) -> None:
    """The others are passed and told of, in their order; bits are those of a call a layer."""
    torch.manual_seed(seed)
    description = Maker(data, 24).description(4)
    expert_layers = [layer for layer in description.layers if isinstance(layer.feed, Experts)]
    layers = [some_experts(data, 24) for _ in expert_layers]
    slots = [torch.arange(EXPERTS + 1) for _ in layers]
    for own in slots:
        own[data.draw(st.lists(st.integers(0, EXPERTS - 1), max_size=3))] = -1
    caches = filled(description, [1] * data.draw(st.integers(1, 3)), 3)
    others = [sequence.fork(sequence.capacity, sequence.length) for sequence in caches]
    step, visits, told = whole_step(description, layers, slots), dict[int, Routing](), list[int]()

    def routed(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        visits[layer] = routing
        told.append(layer)
        return experts_forward(rows, routing.expert_ids, routing.weights, layers[layer])

    work = [Work(own.token_ids, cache, True) for own, cache in zip(
        new_work(data, caches), others, strict=True
    )]  # fmt: skip
    logits = step(work, routed)
    assert told == list(range(len(layers)))
    told.clear()
    again = [Work(own.token_ids, cache, True) for own, cache in zip(work, caches, strict=True)]
    noted = Noted(layers, slots)
    assert all(map(same, step.inside(again, noted), logits))
    assert [layer for layer, _ in noted.told] == list(range(len(layers)))
    for layer, found in noted.told:
        assert torch.equal(found.expert_ids, visits[layer].expert_ids)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, where both are numbers."""
    return torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
