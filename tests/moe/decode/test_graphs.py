"""Recorded steps against plain ones: whatever changes from step to step is in tensors that stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from triton.runtime.interpreter import InterpretedFunction

from kernels.reference import ExpertWeights
from kernels.triton.experts import experts_forward
from kernels.triton.language import INTERPRETED
from kernels.triton.routing import Blocks, align
from moe.decode import cuda_graph as graphs
from moe.decode.cuda_graph import GraphStep, rows_for
from moe.decode.joined import join, with_joined
from moe.decode.proof import parts_of
from moe.decode.recorded import moved
from moe.decode.reference import reference_step
from moe.decode.step import InsideExperts
from moe.describe.description import (
    Attention,
    Description,
    Experts,
    FeedForward,
    HeadNorm,
    Layer,
    Norm,
    NotDescribed,
    Projection,
    Rotation,
    Router,
    View,
)
from moe.kv.blocks import BlockPool
from moe.kv.cache import KVCache
from moe.kv.device_blocks import DeviceBlocks
from moe.network.packed_pass import Work
from routing import Routing
from routing.routers import RouterRule
from tests.amounts import amount
from tests.launches import Launches
from tests.moe.decode.description_cases import VOCABULARY, Maker, filled, routed, table
from tests.moe.decode.tape import Tape

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")

CPU = torch.device("cpu")


def inside(_layer: int, rows: Tensor, routing: Routing) -> Tensor:
    """As `routed`, and nothing for rows that visit nobody."""
    return rows * routing.weights.sum(1, keepdim=True)


class Counted(InsideExperts):
    """The experts that a step's layers chose."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []

    def count(self, ids_LBK: Tensor) -> None:
        self.ids += ids_LBK


def new_memory() -> DeviceBlocks:
    return DeviceBlocks(CPU, torch.float32, 24)


def recorded(description: Description, memory: DeviceBlocks) -> GraphStep:
    return GraphStep(description, memory, inside, Tape)


def sequences_of(
    description: Description, memory: DeviceBlocks, lengths: list[int], room: int
) -> list[KVCache]:
    return filled(description, lengths, room, BlockPool(memory).new_cache)


def made(data: st.DataObject) -> Description:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    maker = Maker(data, data.draw(st.sampled_from([8, 24])), whole=True)
    maker.dtype, maker.most_heads = torch.float32, (3, 2)  # Triton's interpreter is slow
    description = maker.description(2)
    return joined(description) if data.draw(st.booleans()) else description


def joined(description: Description) -> Description:
    leaves = [projection.leaf for projection in parts_of(description, Projection)]
    join(description, dict(zip(leaves, leaves, strict=True)))
    return with_joined(description)


def copies(work: list[Work]) -> list[Work]:
    """The same tokens of forks, which share blocks."""
    pieces = []
    for item in work:
        assert isinstance(item.cache, KVCache)
        cache = item.cache.fork(item.cache.capacity + 3, item.cache.length)
        pieces.append(replace(item, cache=cache))
    return pieces


def in_buffers(work: list[Work]) -> list[Work]:
    """The same tokens of sequences without blocks, as the plain step reads them."""
    pieces = []
    for item in work:
        assert isinstance(item.cache, KVCache)
        cache = KVCache(item.cache.capacity)
        for layer in item.cache.layers:
            cache.write(layer, *item.cache.read(layer, item.cache.length))
        cache.length = item.cache.length
        pieces.append(replace(item, cache=cache))
    return pieces


@pytest.mark.deep
@settings(max_examples=4)
@given(st.data())
@torch.inference_mode()
def test_sequences_that_come_grow_and_go_get_the_plain_steps_logits(data: st.DataObject) -> None:
    description, memory = made(data), new_memory()
    step = recorded(description, memory)
    sequences: list[KVCache] = []
    for _ in range(2):
        lengths = data.draw(st.lists(st.sampled_from([1, 3, 40]), min_size=0, max_size=2))
        sequences = [s for s in sequences if data.draw(st.booleans())]
        sequences += sequences_of(description, memory, lengths, 12)
        counts = [data.draw(st.sampled_from([1, 1, 3])) for _ in sequences]
        work = [
            Work(torch.randint(VOCABULARY, (count,)).tolist(), cache, data.draw(st.booleans()))
            for count, cache in zip(counts, sequences, strict=True)
        ]
        if not work:
            continue
        alone, plain = copies(work), in_buffers(work)
        expected = reference_step(description, plain, routed)
        counted = Counted()
        whole = step.inside(alone, counted)
        for actual in (step(work, routed), whole):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        moe_layers = sum(isinstance(layer.feed, Experts) for layer in description.layers)
        assert [len(ids) for ids in counted.ids] == [sum(counts)] * moe_layers
        for item, other in zip(work, plain, strict=True):
            assert item.cache.length == other.cache.length


@pytest.mark.deep
@settings(max_examples=amount(3, quick=1))
@given(st.data())
@torch.inference_mode()
def test_visits_are_those_of_the_plain_step(data: st.DataObject) -> None:
    """Also when nobody asks for them: with three rows in a recording of four."""
    description, memory = made(data), new_memory()
    caches = sequences_of(description, memory, [2, 5, 9], 1)
    work = [Work([token], cache) for token, cache in enumerate(caches)]
    seen: dict[str, list[Routing]] = {"plain": [], "segments": []}

    def watched(name: str) -> graphs.RoutedExperts:
        def note(layer: int, rows: Tensor, routing: Routing) -> Tensor:
            assert rows.shape[0] == 3
            seen[name].append(routing)
            return routed(layer, rows, routing)

        return note

    reference_step(description, in_buffers(work), watched("plain"))
    step = recorded(description, memory)
    step(copies(work), watched("segments"))
    counted = Counted()
    step.inside(copies(work), counted)
    _, inner = step.inside_by(copies(work), "visits", inside)
    assert len(counted.ids) == len(inner)
    assert all(
        torch.equal(ids, own.expert_ids) for ids, own in zip(counted.ids, inner, strict=True)
    )
    for expected, *others in zip(seen["plain"], seen["segments"], inner, strict=True):
        for actual in others:
            actual.validate(12)
            assert torch.equal(actual.expert_ids, expected.expert_ids)
            torch.testing.assert_close(actual.weights, expected.weights)


@settings(max_examples=amount(3, quick=1))
@given(st.data())
@torch.inference_mode()
def test_a_step_that_sleeps_at_a_layer_keeps_what_is_its_own(data: st.DataObject) -> None:
    description, memory = made(data), new_memory()
    first, second = (
        [Work([token], cache) for cache in sequences_of(description, memory, [length], 1)]
        for token, length in ((1, 4), (2, 7))
    )
    step = recorded(description, memory)
    expected = [
        reference_step(description, in_buffers(work), routed)[0] for work in (first, second)
    ]
    nested: list[Tensor] = []

    def interrupted(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        if not nested:
            nested.extend(step(copies(second), routed))
        return routed(layer, rows, routing)

    for _ in range(2):
        nested.clear()
        actual = step(copies(first), interrupted)
        torch.testing.assert_close([*actual, *nested], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.deep
@torch.inference_mode()
def test_recordings_share_memory_with_the_largest() -> None:
    """A larger one takes the place of all before it. What fails gives its memory back."""
    pools: list[Tape] = []

    def capture() -> Tape:
        pools.append(Tape())
        return pools[-1]

    def failing(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    description, memory = layers_like_qwen3(1), DeviceBlocks(CPU, torch.bfloat16, 24)
    step = GraphStep(description, memory, inside, capture)
    caches, found = sequences_of(description, memory, [3] * 5, 20), []
    for count in (2, 5, 1, 2, 5, 3):
        found.append(step.inside(copies([Work([7], cache) for cache in caches[:count]]), Counted()))
        (pool,) = step._idle
        assert pool.most == (2 if len(found) == 1 else 8)
        ends = [recording._segments[-1].end.answer for recording in pool.recordings.values()]
        assert {end.untyped_storage().data_ptr() for end in ends} == {pool.shared.logits.data_ptr()}
    assert len(pools) == 2
    assert len(pool.recordings) == 4
    for some in found:
        torch.testing.assert_close(some, found[1][: len(some)], rtol=1e-2, atol=1e-2)
    gone = ref(pool)
    del pool, ends
    with pytest.raises(NotDescribed, match="recording 8 rows raised OutOfMemoryError"):
        step.inside_by([Work([7], cache) for cache in caches], "failing", failing)
    assert gone() is None


@pytest.mark.parametrize("late", [False, True])
@settings(max_examples=1)
@given(data=st.data())
@torch.inference_mode()
def test_shared_experts_run_beside_the_routed_ones(late: bool, data: st.DataObject) -> None:
    """They begin before the host runs the others, and end at the latest before the next segment,
    also where the host fails."""
    happened: list[str] = []

    class Beside(Tape):
        def beside(self, function: Any) -> Any:
            replay = super().beside(function)()

            def start() -> Any:
                happened.append("begin")
                if not late:
                    replay()
                return end

            def end() -> None:
                happened.append("end")
                if late:
                    replay()

            return start

    torch.manual_seed(0)
    maker = Maker(data, 8, whole=True)
    maker.dtype, maker.most_heads = torch.float32, (3, 2)
    description = maker.description(2)
    layers = [
        replace(
            layer,
            feed=replace(
                maker.experts(index, maker.router()), shared=maker.mlp(), shared_gate=None
            ),
        )
        for index, layer in enumerate(description.layers)
    ]
    description, memory = replace(description, layers=tuple(layers)), new_memory()
    step = GraphStep(description, memory, inside, Beside)
    work = [Work([1], cache) for cache in sequences_of(description, memory, [4], 4)]
    plain, failing = in_buffers(work), copies(work)

    def noted(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        happened.append("experts")
        if len(happened) > 6:
            raise RuntimeError("an expert is lost")
        return routed(layer, rows, routing)

    actual = step(work, noted)
    assert happened == ["begin", "experts", "end"] * 2
    torch.testing.assert_close(
        actual, reference_step(description, plain, routed), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(RuntimeError, match="an expert is lost"):
        step(failing, noted)
    assert happened[6:] == ["begin", "experts", "end"]


@settings(max_examples=2)
@given(st.data())
@torch.inference_mode()
def test_what_cannot_be_recorded_leaves_sequences_as_they_were(data: st.DataObject) -> None:
    description, memory = made(data), new_memory()
    work = [Work([1], cache) for cache in sequences_of(description, memory, [4], 1)]

    def asks(_layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return rows * float(routing.weights.sum())

    step = GraphStep(description, memory, asks, Tape)
    with pytest.raises(NotDescribed, match="recording 1 rows raised RuntimeError: item waits"):
        step.inside(work, Counted())
    assert work[0].cache.length == 4
    expected = reference_step(description, in_buffers(work), routed)
    torch.testing.assert_close(step(work, routed), expected, rtol=1e-4, atol=1e-4)


class Once:
    """Runs what is to be recorded, and replays nothing."""

    def __call__(self, function: Any) -> Any:
        return lambda: None, function()

    def beside(self, function: Any) -> Any:
        function()
        return lambda: lambda: None


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
            description, DeviceBlocks(torch.device("meta"), torch.bfloat16, 4), inside, Once
        )
        step.inside([], Counted())
    assert launches


def on_meta(part: object) -> Description:
    elsewhere: Description = moved(part, _SameOnMeta(), {}, torch.device("meta"))
    return elsewhere


class _SameOnMeta(dict[torch.nn.Module, torch.nn.Module]):
    def __missing__(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to("meta")


def layers_like_qwen3(layers: int, *, shared: bool = False) -> Description:
    """Norms of heads, rotations, experts; all weights in bf16.

    Args:
        shared: there is a shared expert, with a gate.
    """
    torch.manual_seed(0)

    def projection(rows: int, columns: int) -> Projection:
        linear = nn.Linear(columns, rows, bias=False).bfloat16().requires_grad_(False)
        return Projection(linear.weight, None, linear)

    def norm(size: int) -> Norm:
        return Norm(torch.ones(size), None, 1e-6, centered=False)

    own, made = table(16), []
    for layer in range(layers):
        heads = HeadNorm(norm(16), per_head=True)
        attention = Attention(
            layer, projection(64, 32), projection(32, 32), projection(32, 32), projection(32, 64),
            heads, heads, Rotation("half", 0, 16, own), View(scale=0.25), 4, 2, 16, 16,
        )  # fmt: skip
        router = Router(projection(12, 32), RouterRule(2, "softmax", renormalise=True))
        experts = Experts(layer, 12, router, None, None, 1.0)
        if shared:
            beside = FeedForward(projection(24, 32), projection(24, 32), projection(32, 24), "silu")
            experts = replace(experts, shared=beside, shared_gate=projection(1, 32))
        norms = norm(32), None, norm(32), None
        made.append(Layer(attention, experts, *norms, attention_scale=1.0, feed_scale=1.0))
    embedding = nn.Embedding(VOCABULARY, 32).bfloat16().requires_grad_(False)
    head = projection(VOCABULARY, 32)
    return Description(embedding, 1.0, tuple(made), norm(32), head, 1.0, None)


@torch.inference_mode()
def launches_of(layers: int, *, shared: bool = False) -> list[str]:
    """Of a recorded step, experts inside; each of our kernels may overlap with the one before."""
    description = on_meta(joined(layers_like_qwen3(layers, shared=shared)))
    launches = Launches()
    memory = DeviceBlocks(torch.device("meta"), torch.bfloat16, 4)
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    first, second = torch.empty(12, 32, 32, **made), torch.empty(12, 32, 16, **made)
    experts = ExpertWeights(first, second, gated_silu)

    def inside(_layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return experts_forward(rows, routing.expert_ids, routing.weights, experts)

    def launch(_kernel: InterpretedFunction, *_args: Any, **options: Any) -> None:
        assert {"PDL", "launch_pdl"} <= options.keys()
        launches.names.append("kernel")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr("kernels.triton.experts.route", as_on_a_device)
        step = GraphStep(description, memory, inside, Once)
        step.inside([], Counted())  # recognises the activation
        launches.names.clear()
        with launches:
            step._pool_with(1, "again", inside)
    return launches.names


def gated_silu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return nn.functional.silu(gate) * up


def as_on_a_device(ids: Tensor, *how: int) -> Blocks:
    return align(ids.flatten(), *how)


def test_a_layer_is_thirteen_launches() -> None:
    """Two sums with norms, two products, heads, attention, its splits joined, two of the router,
    and of the experts slots, two products, and their sum. All but the products are our kernels."""
    two, three = launches_of(2), launches_of(3)
    times = 2  # rehearsed, recorded
    assert len(three) - len(two) == times * 13
    assert three.count("kernel") - two.count("kernel") == times * 11
    assert three.count("_to_copy") == times  # embeddings, to float32
    assert three.count("copy_") == 1 + times  # inputs; logits


def test_a_shared_expert_with_a_gate_is_five_launches_more() -> None:
    """Two products, the activation, the gate, and what adds them to the routed experts."""
    more = [len(launches_of(layers, shared=True)) - len(launches_of(layers)) for layers in (2, 3)]
    assert more[1] - more[0] == 2 * 5  # rehearsed, recorded


@pytest.mark.parametrize(
    ("count", "rows", "halting"),
    [(1, 1, 1), (3, 4, 4), (32, 32, 32), (33, 64, 64), (100, 128, 128), (130, 160, 256)],
)
def test_rows_of_recordings(count: int, rows: int, halting: int) -> None:
    assert (rows_for(count), rows_for(count, halts=True)) == (rows, halting)
