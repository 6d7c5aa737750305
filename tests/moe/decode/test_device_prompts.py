"""Prompts through described layers, as on a GPU: against the plain step and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from examples.models.tiny import tiny_model
from kernels.cpu.kv import BLOCK
from kernels.reference import ExpertWeights
from kernels.triton.experts import experts_forward
from kernels.triton.language import INTERPRETED
from kernels.triton.routing import Blocks, sort_slots
from moe import MoE, SamplingParams
from moe.decode import device_prompts, recorded, reference
from moe.decode.device_prompts import DeviceAngles, DevicePrompts, PromptOperations
from moe.decode.reference import _shared as shared_of
from moe.decode.reference import reference_step
from moe.decode.step import RoutedExperts
from moe.describe.description import Attention, View
from moe.describe.routers import by_kernel
from moe.kv.blocks import BlockPool
from moe.kv.cache import KVCache
from moe.kv.device_blocks import DeviceBlocks, DevicePass
from moe.kv.hidden import HiddenRows
from moe.kv.layout import Shape
from moe.memory.footprint import StorageCounter
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.packed_pass import Work
from moe.settings.device import to_device
from routing import Routing, RoutingStatistics
from tests.amounts import amount
from tests.launches import Launches
from tests.moe.decode.description_cases import VOCABULARY, Maker, routed, table
from tests.moe.decode.tape import Tape
from tests.moe.decode.test_compiled_prompts import logits_of
from tests.moe.decode.test_graphs import (
    gated_silu,
    joined,
    layers_like_qwen3,
    made,
    new_memory,
    on_meta,
)
from tests.moe.decode.test_recorded import parts_of
from tests.readbacks import readbacks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")

CPU = torch.device("cpu")
PROMPT = [(7 * i * i) % 90 + 3 for i in range(80)]  # of two blocks
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)


def read(
    step: Callable[[Sequence[Work], Any], list[Tensor]],
    caches: Sequence[KVCache],
    pieces: Sequence[Sequence[list[int]]],
) -> list[Tensor]:
    """All logits of sequences, read piece by piece, those of several in one pass."""
    found: list[list[Tensor]] = [[] for _ in caches]
    for tokens in pieces:
        work = [Work(t, c, all_logits=True) for t, c in zip(tokens, caches, strict=True)]
        for own, rows in zip(found, step(work, routed), strict=True):
            own.append(rows)
    return [torch.cat(own) for own in found]


@settings(max_examples=amount(12, quick=2))
@given(st.data())
@torch.inference_mode()
def test_rows_are_those_of_the_plain_step(data: st.DataObject) -> None:
    """However prompts are cut, whatever is beside them, whatever heads share what is expanded."""
    description, memory = made(data), new_memory()
    prompts, pool = DevicePrompts(description, memory), BlockPool(memory)
    assert prompts.why_not == ""
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 5, 70]), min_size=1, max_size=3))
    ids = [torch.randint(VOCABULARY, (length + 3,)).tolist() for length in lengths]
    cuts = [data.draw(st.integers(1, length)) for length in lengths]
    pieces = [[own[:cut] for own, cut in zip(ids, cuts, strict=True)]]
    pieces += [[own[cut:] for own, cut in zip(ids, cuts, strict=True)]]
    caches = [pool.new_cache(len(own)) for own in ids]
    with pytest.MonkeyPatch.context() as patch:
        expanded = data.draw(st.sampled_from([1, device_prompts.EXPANDED_BYTES]))
        patch.setattr(device_prompts, "EXPANDED_BYTES", expanded)
        found = read(prompts, caches, pieces)
    plain = [KVCache(len(own)) for own in ids]
    expected = read(lambda *given: reference_step(description, *given), plain, [ids])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    for mine, other in zip(caches, plain, strict=True):
        assert mine.length == other.length
        for layer in other.layers:
            theirs = other.read(layer, other.length)
            torch.testing.assert_close(mine.read(layer, mine.length), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.deep
@settings(max_examples=3)
@given(st.data())
@torch.inference_mode()
def test_last_rows_are_those_of_all(data: st.DataObject) -> None:
    """Sequences that keep final hidden states get them."""
    description, memory = made(data), new_memory()
    prompts, pool = DevicePrompts(description, memory), BlockPool(memory)
    caches = [pool.new_cache(8) for _ in range(4)]
    for cache in caches[2:]:
        cache.hidden = HiddenRows()
    ids = [[1, 2, 3, 4, 5], [6, 7]]
    whole = prompts([Work(t, c, True) for t, c in zip(ids, caches[:2], strict=True)], routed)
    work = [Work(ids[0], caches[2]), Work(ids[1], caches[3], all_logits=True)]
    some = prompts(work, routed)
    assert [len(rows) for rows in some] == [1, 2]
    torch.testing.assert_close(some, [whole[0][-1:], whole[1]])
    for cache, tokens in zip(caches[2:], ids, strict=True):
        assert cache.hidden is not None
        assert len(cache.hidden) == len(tokens)
    logits = torch.nn.functional.linear(
        caches[3].hidden.joined(),  # type: ignore[union-attr]
        description.head.weight,  # type: ignore[arg-type]
        description.head.bias,
    )
    logits *= description.logit_scale
    if (cap := description.logit_softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(logits, whole[1], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@settings(max_examples=2)
@given(data=st.data())
@torch.inference_mode()
def test_a_shared_expert_runs_once_and_when_a_lane_waits(data: st.DataObject) -> None:
    """With the bits that it has behind the routed ones."""
    maker = Maker(data, 8, whole=True)
    description = maker.description(2)
    layers = [
        replace(layer, feed=replace(maker.experts(at, maker.router()), shared=maker.mlp()))
        for at, layer in enumerate(description.layers)
    ]
    description, memory = replace(description, layers=tuple(layers)), new_memory()
    prompts, pool = DevicePrompts(description, memory), BlockPool(memory)
    happened: list[str] = []

    def run(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        (call,) = calls
        happened.append("experts")
        assert call.beside is not None
        call.beside()
        return [routed(layer, call.hidden_states, call.routing)]

    def noted(*given: Any) -> tuple[Tensor, Tensor | None]:
        happened.append("shared")
        return shared_of(*given)

    plain = prompts([Work([1, 2, 3], pool.new_cache(3), True)], routed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_shared", noted)
        found = prompts.in_lane([Work([1, 2, 3], pool.new_cache(3), True)], run)
    assert torch.equal(found[0], plain[0])
    assert happened == ["experts", "shared"] * 2


@pytest.mark.deep
def test_nothing_is_read_back() -> None:
    description, memory = layers_like_qwen3(2), DeviceBlocks(CPU, torch.bfloat16, 24)
    prompts, pool = DevicePrompts(description, memory), BlockPool(memory)
    caches = [pool.new_cache(90) for _ in range(2)]

    def run() -> None:
        work = [Work([1, 2, 3], caches[0]), Work([*range(40)], caches[1])]
        prompts(work, lambda _, rows, routing: rows * routing.weights.sum(1, keepdim=True))

    run()
    assert readbacks(run) == []


def test_tables_of_angles_are_sent_when_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def noted(values: Tensor, device: torch.device) -> Tensor:
        sent.append(len(values))
        return to_device(values, device)

    monkeypatch.setattr("moe.decode.device_prompts.to_device", noted)
    own, angles = table(16), DeviceAngles(CPU)
    for most in (3, 1024, 1030, 2000):
        at = torch.tensor([most - 1, 0, most - 1])
        cos, sin = angles.at(own, at, most)
        assert torch.equal(cos, own.cos[at])
        assert torch.equal(sin, own.sin[at])
    assert sent == [1024, 1024, 2048, 2048]


def loaded(folder: Path, kind: str, settings: dict[str, Any] | None = None) -> MoE:
    if not (folder / "config.json").exists():
        tiny_model(kind).save_pretrained(folder)
    return MoE.from_pretrained(folder, settings or {})


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_whole_models_agree_with_transformers(on_tape: None, kind: str, tmp_path: Path) -> None:
    """Groups of queries, sinks and windows, latents; whole, cut and in company."""
    model = loaded(tmp_path, kind)
    assert "; prompts described; " in model.status()["fused"]["why"]
    pieces = [PROMPT[:1], PROMPT[1:70], PROMPT[70:71], PROMPT[71:]]
    (whole,), (cut,) = logits_of(model, [PROMPT]), logits_of(model, pieces)
    beside, _ = logits_of(model, [PROMPT[:70], PROMPT[70:]], [[3, 4, 5], [*range(3, 20)]])
    model.backbone.prompt_forward = None
    (theirs,) = logits_of(model, [PROMPT])
    for found in (whole, cut, beside):
        torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.deep
def test_ways_to_read_prompts_give_the_tokens_of_transformers(
    on_tape: None, tmp_path: Path
) -> None:
    """The second prompt begins like the first, and finds its blocks."""
    ways: list[dict[str, Any]] = [
        {"engine.fused": "off"},
        {},
        {"prefill.mode": "layered", "prefill.group_tokens": 16},
        {"prefill.mode": "chunked", "prefill.chunk_tokens": 40},
    ]
    prompts, found = [PROMPT, PROMPT[:66] + PROMPT[:9], PROMPT[:7]], []
    for way in ways:
        model = loaded(tmp_path, "qwen3_moe", way)
        whole = [model.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        together = [made.token_ids for made in model.generate(prompts, GREEDY)]
        found.append((whole, together))
    assert found[1:] == found[:1] * 3


@pytest.mark.deep
def test_a_pass_of_prompts_of_a_model_reads_nothing_back(on_tape: None, tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen3_moe")
    caches = [model.backbone.new_cache(80) for _ in range(2)]

    @torch.inference_mode()
    def run() -> None:
        work = [Work([1, 2, 3], caches[0]), Work([*range(3, 20)], caches[1])]
        run_lanes(model.backbone.lanes(work), model.experts.run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe.describe.routers.decide", by_kernel)
        run()
        assert readbacks(run) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"wide": True}, "heads of more than 256 numbers"),
        ({"of_length": True}, "rotary tables that depend on the length"),
    ],
)
def test_what_is_left_to_transformers(change: dict[str, bool], why: str) -> None:
    description = layers_like_qwen3(1)
    (layer,) = description.layers
    a = layer.attention
    assert isinstance(a, Attention)
    assert a.rotation is not None
    if "wide" in change:
        other = replace(a, value_dim=300)
    else:
        other = replace(a, rotation=replace(a.rotation, table=table(16, of_length=True)))
    description = replace(description, layers=(replace(layer, attention=other),))
    assert DevicePrompts(description, new_memory()).why_not == why


@pytest.mark.deep
def test_what_has_rows_of_its_own_goes_through_transformers(on_tape: None, tmp_path: Path) -> None:
    model = loaded(tmp_path, "mixtral")
    backbone, read = model.backbone, list[int]()
    plain = backbone.forward_packed

    def noted(work: Sequence[Work], **how: Any) -> list[Tensor]:
        read.append(len(work))
        return plain(work, **how)

    backbone.forward_packed = noted  # type: ignore[method-assign]

    def asked(item: Work) -> int:
        read.clear()
        with torch.inference_mode():
            run_lanes(backbone.lanes([item]), model.experts.run)
        return len(read)

    assert asked(Work([1, 2], backbone.new_cache(9))) == 0
    assert asked(Work([1, 2], backbone.new_cache(9), rows={})) == 1


@pytest.mark.deep
def test_prompts_that_are_wrong_on_the_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps stay recorded."""
    monkeypatch.setattr(recorded, "TRIES", 1)
    call = DevicePrompts.__call__
    monkeypatch.setattr(
        DevicePrompts, "__call__", lambda *given: [1.02 * rows for rows in call(*given)]
    )
    backbone, experts = parts_of("mixtral")
    _, reason = recorded.recorded_step(backbone, experts, Tape)
    assert backbone.prompt_forward is None
    assert "; prompts by transformers (NotDescribed: logits differ by" in reason


def no_experts(_layer: int, rows: Tensor, _routing: Routing) -> Tensor:
    return torch.empty_like(rows)


def launches_of(layers: int, rows: int, routed: RoutedExperts = no_experts) -> list[str]:
    """Of a pass of so many rows."""
    description, launches = on_meta(joined(layers_like_qwen3(layers))), Launches()
    memory = DeviceBlocks(torch.device("meta"), torch.bfloat16, 8)
    prompts, cache = DevicePrompts(description, memory), BlockPool(memory).new_cache(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpretedFunction, "run", lambda kernel, *_a, **_k: launches.names.append("kernel")
        )
        with launches:
            prompts([Work([1] * rows, cache)], routed)
    return launches.names


@pytest.mark.parametrize("rows", [40, 300])
def test_a_layer_is_few_launches_beside_its_experts(rows: int) -> None:
    """Two sums with norms, two products, heads, attention, and two of the router."""
    one, two = launches_of(1, rows), launches_of(2, rows)
    assert len(two) - len(one) == 6 + 2


def test_experts_of_a_layer_are_five_launches_and_counting_them_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sort slots, two are products, and one adds the results."""
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    first, second = torch.empty(12, 32, 32, **made), torch.empty(12, 32, 16, **made)
    experts, statistics = ExpertWeights(first, second, gated_silu), RoutingStatistics([12] * 3)

    def sorted_slots(ids: Tensor, *how: int) -> Blocks:
        return sort_slots(ids.flatten(), *how)

    def routed(layer: int, rows: Tensor, routing: Routing) -> Tensor:
        statistics.record(layer, {"prefill": routing})
        return experts_forward(rows, routing.expert_ids, routing.weights, experts)

    monkeypatch.setattr("kernels.triton.experts.route", sorted_slots)
    launches_of(1, 300, routed)  # recognises the activation
    two, three = launches_of(2, 300, routed), launches_of(3, 300, routed)
    assert len(three) - len(two) == 8 + 5


@torch.inference_mode()
def test_latents_of_a_long_context_are_expanded_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, size, latent, turned, rows = 32, 128, 512, 64, 8
    attention: Any = SimpleNamespace(
        heads=heads, plain_dim=size, value_dim=size, view=View(1.0),
        kv_b=torch.zeros(heads, 2 * size, latent, dtype=torch.bfloat16),
        o=SimpleNamespace(weight=torch.zeros(1, 1, dtype=torch.bfloat16)),
    )  # fmt: skip

    def attend(_: object, query: Tensor, *__: object) -> Tensor:
        return query.new_zeros(query.shape)

    monkeypatch.setattr(PromptOperations, "_attend", attend)
    monkeypatch.setattr(device_prompts, "EXPANDED_BYTES", 2**20)
    peaks = []
    for tokens in (1024, 2048):
        memory = DeviceBlocks(CPU, torch.bfloat16, tokens // BLOCK + 2)
        cache = BlockPool(memory).new_cache(tokens)
        cache.reserve(tokens)
        cache.length = tokens - rows
        places = DevicePass(memory, [cache], [rows])
        places.give_shape(0, Shape(1, latent, turned))
        operations = PromptOperations(SimpleNamespace(places=places), memory)  # type: ignore[arg-type]
        plain, second = torch.zeros(rows, heads, size), torch.zeros(rows, heads, turned)
        own = memory.layer_rows(0, Shape(1, latent, turned))
        with StorageCounter() as counter:
            out = operations._attend_latents(attention, plain, second, own)
        assert out.shape == (rows, heads, size)
        peaks.append(counter.peak)
    # The pool and a copy of the latents; keys and values of all heads would be 32 KiB a token.
    assert peaks[1] - peaks[0] < 1024 * 4 * 2**10
