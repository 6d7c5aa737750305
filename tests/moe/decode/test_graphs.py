"""Recorded steps against plain ones: whatever changes from step to step is in tensors that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.triton.language import INTERPRETED
from moe.decode import cuda_graph as graphs
from moe.decode.cuda_graph import GraphStep, rows_for
from moe.decode.recorded import moved
from moe.decode.reference import reference_step
from moe.decode.step import InsideExperts
from moe.describe.description import Description, Experts, NotDescribed
from moe.network.kv_cache import KVCache, Work
from routing import Routing
from tests.moe.decode.description_cases import VOCABULARY, Maker, filled, routed
from tests.moe.decode.tape import Tape

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")

CPU = torch.device("cpu")


def inside(_layer: int, rows: Tensor, routing: Routing) -> Tensor:
    """As `routed`, and nothing for rows that visit nobody."""
    return rows * routing.weights.sum(1, keepdim=True)


class Counted(InsideExperts):
    """The routings of a step's layers."""

    def __init__(self) -> None:
        self.routings: list[Routing] = []

    def count(self, layer: int, routing: Routing) -> None:
        assert layer == len(self.routings)
        self.routings.append(routing)


def recorded(description: Description) -> GraphStep:
    return GraphStep(description, CPU, torch.float32, inside, Tape)


def made(data: st.DataObject) -> Description:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    maker = Maker(data, data.draw(st.sampled_from([8, 24])), whole=True)
    maker.dtype, maker.most_heads = torch.float32, (3, 2)  # Triton's interpreter is slow
    maker.chunks = False
    return maker.description(2)


def copies(work: list[Work]) -> list[Work]:
    """The same tokens of sequences of their own, in buffers of another size."""
    pieces = []
    for item in work:
        assert isinstance(item.cache, KVCache)
        cache = item.cache.fork(item.cache.capacity + 3, item.cache.length)
        pieces.append(replace(item, cache=cache))
    return pieces


@settings(max_examples=4)
@given(st.data())
@torch.inference_mode()
def test_sequences_that_come_grow_and_go_get_the_plain_steps_logits(data: st.DataObject) -> None:
    description = made(data)
    step = recorded(description)
    sequences: list[KVCache] = []
    for _ in range(2):
        lengths = data.draw(st.lists(st.sampled_from([1, 3, 40]), min_size=0, max_size=2))
        sequences = [s for s in sequences if data.draw(st.booleans())]
        sequences += filled(description, lengths, 12)
        counts = [data.draw(st.sampled_from([1, 1, 3])) for _ in sequences]
        work = [
            Work(torch.randint(VOCABULARY, (count,)).tolist(), cache, data.draw(st.booleans()))
            for count, cache in zip(counts, sequences, strict=True)
        ]
        if not work:
            continue
        alone, plain = copies(work), copies(work)
        expected = reference_step(description, plain, routed)
        counted = Counted()
        whole = step.inside(alone, counted)
        for actual in (step(work, routed), whole):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        moe_layers = sum(isinstance(layer.feed, Experts) for layer in description.layers)
        assert [routing.num_tokens for routing in counted.routings] == [sum(counts)] * moe_layers
        for item, other in zip(work, plain, strict=True):
            assert item.cache.length == other.cache.length


@settings(max_examples=3)
@given(st.data())
@torch.inference_mode()
def test_visits_are_those_of_the_plain_step(data: st.DataObject) -> None:
    """Also when nobody asks for them: with three rows in a recording of four."""
    description = made(data)
    work = [Work([token], cache) for token, cache in enumerate(filled(description, [2, 5, 9], 1))]
    seen: dict[str, list[Routing]] = {"plain": [], "segments": []}

    def watched(name: str) -> graphs.RoutedExperts:
        def note(layer: int, rows: Tensor, routing: Routing) -> Tensor:
            assert rows.shape[0] == 3
            seen[name].append(routing)
            return routed(layer, rows, routing)

        return note

    reference_step(description, copies(work), watched("plain"))
    step = recorded(description)
    step(copies(work), watched("segments"))
    counted = Counted()
    step.inside(copies(work), counted)
    for expected, *others in zip(seen["plain"], seen["segments"], counted.routings, strict=True):
        for actual in others:
            actual.validate(12)
            assert torch.equal(actual.expert_ids, expected.expert_ids)
            torch.testing.assert_close(actual.weights, expected.weights)


@settings(max_examples=3)
@given(st.data())
@torch.inference_mode()
def test_a_step_that_sleeps_at_a_layer_keeps_what_is_its_own(data: st.DataObject) -> None:
    description = made(data)
    first, second = (
        [Work([token], cache) for cache in filled(description, [length], 1)]
        for token, length in ((1, 4), (2, 7))
    )
    step = recorded(description)
    expected = [reference_step(description, copies(work), routed)[0] for work in (first, second)]
    nested: list[Tensor] = []

    def interrupted(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        if not nested:
            nested.extend(step(copies(second), routed))
        return routed(layer, rows, routing)

    for _ in range(2):
        nested.clear()
        actual = step(copies(first), interrupted)
        torch.testing.assert_close([*actual, *nested], expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=2)
@given(st.data())
@torch.inference_mode()
def test_what_cannot_be_recorded_leaves_sequences_as_they_were(data: st.DataObject) -> None:
    description = made(data)
    work = [Work([1], cache) for cache in filled(description, [4], 1)]

    def asks(_layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return rows * float(routing.weights.sum())

    step = GraphStep(description, CPU, torch.float32, asks, Tape)
    with pytest.raises(NotDescribed, match="recording 1 rows raised RuntimeError: item waits"):
        step.inside(work, Counted())
    assert work[0].cache.length == 4
    expected = reference_step(description, copies(work), routed)
    torch.testing.assert_close(step(work, routed), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=10)
@given(st.data())
@torch.inference_mode()
def test_a_step_stays_on_its_device(data: st.DataObject) -> None:
    """On meta tensors nothing can be read back, and a tensor of the CPU beside them is an error."""
    description = on_meta(made(data))
    launches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", lambda kernel, *_a, **_k: launches.append(kernel))
        step = GraphStep(
            description, torch.device("meta"), torch.bfloat16, inside,
            lambda: lambda function: (lambda: None, function()),
        )  # fmt: skip
        step.inside([], Counted())
    assert launches


def on_meta(part: object) -> Description:
    elsewhere: Description = moved(part, _SameOnMeta(), {}, torch.device("meta"))
    return elsewhere


class _SameOnMeta(dict[torch.nn.Module, torch.nn.Module]):
    def __missing__(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to("meta")


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (3, 4), (32, 32), (33, 64), (100, 128)])
def test_rows_of_recordings(count: int, rows: int) -> None:
    assert rows_for(count) == rows
