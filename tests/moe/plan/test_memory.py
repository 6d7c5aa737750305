"""The memory plan: equal to what is really allocated, and refused before anything is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from examples.models.tiny import tiny_model
from kernels.cpu.kv import BLOCK
from moe import MoE
from moe.describe.stateful import find_stateful
from moe.errors import DoesNotFitError, ProfileError
from moe.kv.blocks import BlockKVCache
from moe.kv.cache import KVCache, SequenceCache
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat
from moe.loading.load import WeightReader
from moe.loading.memory_plan import GIB, MemoryPlan, Offloadable
from moe.loading.meta_model import build_meta_model
from moe.memory.budget import plan_memory
from moe.memory.footprint import (
    Footprint,
    _probe,
    measure_footprint,
    stand_in_for_experts,
    tensor_bytes,
)
from moe.memory.kv_precision import choose_kv_precision
from moe.memory.planning import _free_on, _plan_waves, check_fit
from moe.network.backbone import Backbone
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.settings import Profile
from moe.settings.profile import load_profile

ARCHITECTURES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"]
MIB = 2**20
RECURRENT = ["qwen3_next", "kimi_linear", "granitemoehybrid", "jamba", "lfm2_moe"]
LENGTH = 200


def plan(
    profile: Profile | None = None, available: int | None = 100 * GIB, **changed: Any
) -> MemoryPlan:
    state, activations = changed.pop("state", 0), changed.pop("activations", GIB)
    footprint = Footprint(1000, 1000, state, activations, "by hand")
    arguments: dict[str, Any] = {
        "place": "memory",
        "context_length": 4096,
        "logits_size": 1000,
    } | changed
    weights = {"trunk": GIB, "experts": 8 * GIB}
    return plan_memory(
        weights, footprint, profile or Profile(), available_bytes=available, **arguments
    )


def sizes(of: MemoryPlan) -> dict[str, int]:
    return {line.name: line.bytes for line in of.lines}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_weights_are_predicted_exactly(tiny_moe: Callable[[str], MoE], model_type: str) -> None:
    model = tiny_moe(model_type)
    planned = sizes(model.memory_plan)
    stats = model.stats()
    assert planned["trunk"] + planned["experts"] == stats["weight_bytes"]
    assert planned["experts"] == stats["expert_bytes"]


def test_weights_in_other_dtypes(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(
        tiny_checkpoint("gpt_oss"), model={"dtype": "bfloat16", "expert_dtype": "float16"}
    )
    planned = sizes(model.memory_plan)
    assert planned["trunk"] + planned["experts"] == model.stats()["weight_bytes"]
    assert planned["experts"] == model.stats()["expert_bytes"]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_keys_and_values_of_a_token(tiny_moe: Callable[[str], MoE], model_type: str) -> None:
    model = tiny_moe(model_type)
    backbone, experts = model._loaded.backbone, model._loaded.experts
    length = 3 * BLOCK  # whole blocks
    cache = backbone.new_cache(length)
    with torch.inference_mode():
        lanes = backbone.lanes([Work([1] * length, cache)])
        run_lanes(lanes, experts.run)
        lanes[0].result()
    predicted = model.memory_plan.kv_bytes_per_token * length
    if backbone.packed and not backbone.recurrent:
        assert _bytes(cache) == predicted
    else:  # what does not grow with the sequence has a line of its own
        batch = model.profile.profile.engine.max_batch_size
        state = sizes(model.memory_plan)["states"] // batch
        assert _bytes(cache) <= predicted + state <= 1.1 * _bytes(cache)


def _bytes(cache: SequenceCache) -> int:
    """Bytes of a sequence's state."""
    pieces: list[object] = []
    if isinstance(cache, KVCache):  # without the memory that a program has spare for any sequence
        pieces += [getattr(states, "memory", states) for states in cache._states.values()]
    if isinstance(cache, BlockKVCache):
        assert isinstance(cache.memory, HostBlocks)
        held = [block for holder in cache._lists.values() for block in holder.held]
        pieces += [cache.memory._pieces[block.number] for block in held]
    return (
        tensor_bytes([vars(cache)["_layers"], pieces])
        if isinstance(cache, KVCache)
        else tensor_bytes(cache)
    )


@pytest.mark.parametrize(
    ("bits", "expected"), [(32, 196_608), (16, 98_304), (8, 52_224), (4, 27_648)]
)
def test_bytes_of_a_token_of_the_30_b_shape(bits: int, expected: int) -> None:
    """The figures of Qwen3-30B-A3B, by an eighth of its 48 layers: 4 heads of 128 numbers for keys
    and for values."""
    of_any_size: Any = Qwen3MoeConfig
    config = of_any_size(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, vocab_size=32,
    )  # fmt: skip
    network = build_meta_model(config, dtype=torch.float32)
    found = measure_footprint(network, 128, 128, form=KVFormat.of_bits(bits))
    assert 8 * found.kv_bytes_per_token == expected
    assert 8 * found.kv_plain_bytes == 196_608


def test_auto_is_bf16_where_experts_are_quantised(tiny_checkpoint: Callable[[str], Path]) -> None:
    bits = {}
    cases: dict[str, dict[str, Any]] = {
        "whole": {},
        "quantised": {"model": {"expert_bits": 4}},
        "asked": {"memory": {"kv_bits": 8}},
        "not fused": {"engine": {"fused": "off"}, "memory": {"kv_bits": 8}},
    }
    for name, settings in cases.items():
        with MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), settings) as model:
            status = model.status()
            bits[name] = status["keys_and_values"]["bits"]
            told = [notice for notice in status["notices"] if "keys and values" in notice]
            assert bool(told) == (name == "not fused")
            cache = model.backbone.new_cache(1)
            assert isinstance(cache, BlockKVCache) == (name != "not fused")
    assert bits == {"whole": 32, "quantised": 16, "asked": 8, "not fused": 32}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", *RECURRENT])
def test_activations_are_those_of_a_real_pass(model_type: str) -> None:
    """The same count over the same model with memory behind it."""
    real = tiny_model(model_type)
    predicted = measure_footprint(build_meta_model(real.config), LENGTH, LENGTH)
    stand_in_for_experts(real)
    backbone = Backbone(real)
    backbone.serve_each(find_stateful(real, range(8)))
    backbone.set_packed(True)
    run = _probe(backbone, [LENGTH])
    assert run.kept == predicted.bytes_per_sequence + predicted.kv_bytes_per_token * LENGTH
    assert (predicted.bytes_per_sequence > 0) == (model_type in RECURRENT)
    assert 0.8 * (run.peak - run.kept) <= predicted.activation_bytes
    assert predicted.activation_bytes <= 1.5 * (run.peak - run.kept)


def test_longer_waves_take_more_and_windows_are_seen() -> None:
    network = build_meta_model(tiny_model("gpt_oss").config)
    on_cuda = [measure_footprint(network, n, n, on_cuda=True).activation_bytes for n in (128, 256)]
    assert on_cuda[1] > 3 * on_cuda[0]  # attention sinks: all scores of a prompt are in memory
    here = [measure_footprint(network, n, n).activation_bytes for n in (128, 256)]
    assert 1.5 * here[0] < here[1] <= on_cuda[1]


def test_an_architecture_that_cannot_be_probed_is_estimated() -> None:
    network = build_meta_model(tiny_model("qwen4_exp_text").config)
    footprint = measure_footprint(network, 64, 64)
    assert "estimated from the configuration, as a probe failed" in footprint.how
    assert footprint.kv_bytes_per_token > 0


def test_nothing_is_read_of_a_model_that_does_not_fit(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.memory.planning.memory_available", lambda: 1_000_000)
    monkeypatch.setattr(WeightReader, "fill", lambda *_: pytest.fail("something was read"))
    seen: list[MemoryPlan] = []
    with pytest.raises(DoesNotFitError, match=r"it needs [\d.]+ MiB and +0.95 MiB are available"):
        MoE.from_pretrained(tiny_checkpoint("mixtral"), on_plan=seen.append)
    assert not seen[0].fits


def test_what_torch_keeps_of_closed_models_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [3 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * GIB - sum(kept), 8 * GIB))
    assert _free_on(torch.device("cuda")) == 8 * GIB


def test_the_refusal_says_what_to_change() -> None:
    profile = load_profile(
        {"memory": {"kv_gib": 4}, "model": {"expert_dtype": "float32"}}, environ={}
    ).profile
    refused = plan(profile, 12 * GIB)
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(refused, profile)
    text = str(caught.value)
    tokens = sizes(refused)["keys and values"] // 1000
    fit = tokens - -(-(refused.needed_bytes - 12 * GIB) // 1000)
    assert f"memory.kv_tokens={fit} would fit" in text
    assert "a smaller prefill.wave_tokens lowers the activations (it is 8192)" in text
    assert "model.expert_dtype=bfloat16 lowers the experts to 4.00 GiB" in text
    assert "a machine with 15 GiB of free memory" in text
    assert plan(profile.model_copy(update={"memory": memory(kv_tokens=fit)}), 12 * GIB).fits


@given(
    available=st.integers(GIB // 8, GIB),
    activations=st.integers(0, 40 * GIB),
    given_reserve=st.sampled_from([None, 0.25]),
    on_disk=st.booleans(),
)
def test_the_limit_that_a_refusal_asks_for_is_enough(
    available: int, activations: int, given_reserve: float | None, on_disk: bool
) -> None:
    offloadable = Offloadable(64, 8 * GIB // 64, 2) if on_disk else None

    def planned(device_gib: float) -> tuple[Profile, MemoryPlan]:
        settings = memory(device_gib=device_gib, reserve_gib=given_reserve)
        profile = Profile(memory=settings)
        return profile, plan(profile, activations=activations, offloadable=offloadable)

    profile, refused = planned(available / GIB)
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(refused, profile)
    asked = re.search(r"memory.device_gib of at least ([\d.e+]+)", str(caught.value))
    assert asked is not None
    assert planned(float(asked[1]))[1].fits
    assert not planned(float(asked[1]) - 0.003)[1].fits


def test_free_memory_is_not_blamed_on_the_limit() -> None:
    profile = Profile(memory=memory(device_gib=50))
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(plan(profile, GIB), profile)
    assert "memory.device_gib" not in str(caught.value)


def memory(**settings: Any) -> Any:
    return load_profile({"memory": settings}, environ={}).profile.memory


@given(available=st.integers(9 * GIB, 40 * GIB))
def test_the_pool_is_finite_and_takes_what_is_left(available: int) -> None:
    found = plan(available=available)
    most = 64 * 4096
    assert 2048 <= found.kv_tokens <= most
    if found.fits and found.kv_tokens < most:
        assert 0 <= available - found.needed_bytes < max(1000, 2048 * 1000)
    if not found.fits:
        assert found.kv_tokens == 2048


def test_where_free_memory_cannot_be_read_everything_fits_and_the_pool_is_finite() -> None:
    found = plan(available=None, context_length=None)
    assert found.fits
    assert found.kv_tokens == 64 * 2**17
    assert "of an unknown number available" in str(found)


def test_a_small_model_is_not_refused_for_the_reserve() -> None:
    found = plan(available=12 * GIB, activations=0)
    assert sizes(found)["reserve"] == 12 * GIB // 20
    given_one = plan(Profile(memory=memory(reserve_gib=0.25)), 12 * GIB)
    assert sizes(given_one)["reserve"] == GIB // 4


def test_states_of_a_full_batch_have_a_line() -> None:
    """With a prefix cache, a sequence has two snapshots beside its own."""
    assert sizes(plan(state=7))["states"] == 64 * 3 * 7
    assert sizes(plan(Profile(memory=memory(prefix_tokens=0)), state=7))["states"] == 64 * 7


def test_both_ways_to_set_the_pool_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"kv_gib and memory.kv_tokens are two ways to set one"):
        load_profile({"memory": {"kv_tokens": 5, "kv_gib": 1}}, environ={})


def test_the_prefix_cache_is_part_of_the_pool() -> None:
    for wanted, kept in ((50, 50), (500, 100)):
        found = plan(Profile(memory=memory(kv_tokens=100, prefix_tokens=wanted)))
        assert (found.kv_tokens, found.prefix_tokens) == (100, kept)


def test_the_engine_gets_the_pool_of_the_plan(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory={"kv_gib": 0.001})
    assert model.memory_plan.kv_tokens == int(0.001 * GIB) // 512
    assert model.engine().scheduler.kv_tokens == model.memory_plan.kv_tokens
    json.dumps(model.memory_plan.as_dict())


@pytest.mark.parametrize(("wave", "fits"), [(8192, False), ("auto", True)])
def test_a_shorter_prefill_batch_leaves_room_for_experts(wave: int | str, fits: bool) -> None:
    """A store with .2 GiB of trunk in .6 GiB: 8192 prompt tokens would take nearly all of it."""
    of_any_size: Any = Qwen3MoeConfig
    config = of_any_size(
        hidden_size=2048, num_hidden_layers=2, num_experts=32, num_experts_per_tok=8,
        moe_intermediate_size=768, num_attention_heads=32, num_key_value_heads=4, head_dim=64,
        vocab_size=32000, max_position_embeddings=32768,
    )  # fmt: skip
    settings = {"memory.device_gib": 0.6, "prefill.wave_tokens": wave}
    profile, cpu = load_profile(settings, environ={}).profile, torch.device("cpu")
    network = build_meta_model(config, dtype=torch.float32)
    experts = {f"model.layers.{at}.mlp.experts.down_proj": 400 * MIB for at in range(2)}
    weights: Any = SimpleNamespace(nbytes={"trunk": 200 * MIB} | experts)
    kv = choose_kv_precision(profile, cpu, torch.float32, quantized=True)
    towers, offloadable = "no images", Offloadable(320, 800 * MIB // 320, 16)
    _, found = _plan_waves(network, weights, towers, profile, cpu, kv, offloadable, None, 1)
    assert found.fits is fits
    if fits:
        assert 64 <= found.wave_tokens <= 1024
        assert found.tiers[0].experts > 320 // 3
        assert found.prefix_tokens == found.kv_tokens // 2


def test_the_least_memory_is_a_block_of_keys_and_few_experts() -> None:
    profile, offloadable = Profile(memory=memory(reserve_gib=0.0)), Offloadable(8, GIB, 3)
    rest = GIB + 2 * 4 * 64 * 1000 + 3 * GIB
    for missing, fits in ((0, True), (1, False)):
        available = rest + BLOCK * 1000 - missing
        found = plan(profile, available, activations=0, offloadable=offloadable)
        assert (found.fits, found.kv_tokens, found.tiers[0].experts) == (fits, BLOCK, 3)
    assert plan(profile, rest + GIB, activations=0, offloadable=offloadable).kv_tokens > 2048
