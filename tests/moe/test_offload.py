"""Models whose experts stay on disk: the same bits as in memory, at any size of the cache."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.models.tiny import tiny_model
from experts.manifest import read_manifest
from kernels import experts_forward
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.commands.terminal import run
from moe.errors import DoesNotFitError
from moe.loading.memory_plan import GIB
from moe.settings import ModelSettings
from offload.capacity import fixed_bytes, sizes_of, slot_bytes
from offload.hot_set import FILE_NAME
from offload.policies import POLICIES
from tests.amounts import deep_except

SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 128, "mode": "whole"},
    "engine": {"max_batch_size": 8},
    "offload": {"hot_set": False},
}
PROMPTS = [list(range(3, 40)), [5, 9, 2], list(range(30, 80, 2)), [7] * 6]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
RESIDENCIES = (0.0625, 0.125, 0.25, 0.5)


@pytest.fixture(scope="module")
def resident(store: Path) -> MoE:
    return MoE.from_pretrained(store, SMALL)


@pytest.fixture
def copied(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "copy"))


def budget(store: Path, resident: MoE, share: float, **more: Any) -> dict[str, Any]:
    """A profile whose budget holds this share of the experts, and everything else."""
    manifest = read_manifest(store)
    slots = round(share * sum(layer.experts for layer in manifest.layers))
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    room = slots * slot_bytes(manifest, manifest.bits) + fixed_bytes(manifest) + 16
    return SMALL | {"memory": SMALL["memory"] | {"device_gib": (rest + room) / GIB}} | more


def test_a_stream_keeps_its_model_open(store: Path, resident: MoE) -> None:
    """Files of experts would close with a model that nobody else holds."""
    stream = MoE.from_pretrained(store, budget(store, resident, 0.25)).stream(PROMPTS[0], GREEDY)
    gc.collect()
    said = [event.delta.token.id for event in stream]
    assert said == resident.generate(PROMPTS[0], GREEDY)[0].token_ids


def check_equal(model: MoE, resident: MoE) -> None:
    """Tokens of several sequences at once, and logits, are those of the resident model."""
    assert model.status()["offload"]["slots"] < model.status()["offload"]["experts"]
    expected = [completion.token_ids for completion in resident.generate(PROMPTS, GREEDY)]
    assert [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)] == expected
    assert torch.equal(model.logits(PROMPTS[0]), resident.logits(PROMPTS[0]))


@pytest.mark.parametrize("mode", ["whole", "chunked", "layered"])
@pytest.mark.parametrize("share", RESIDENCIES)
def test_any_cache_gives_the_bits_of_a_resident_model(
    store: Path, resident: MoE, share: float, mode: str
) -> None:
    prefill = {"mode": mode, "wave_tokens": 128, "chunk_tokens": 16, "group_tokens": 16}
    if mode == "chunked":  # which plans for shorter waves
        resident = MoE.from_pretrained(store, SMALL | {"prefill": prefill})
    model = MoE.from_pretrained(store, budget(store, resident, share, prefill=prefill))
    assert model.memory_plan.expert_slots == round(32 * share)
    check_equal(model, resident)


@pytest.mark.parametrize(
    "model_type",
    deep_except(["qwen3_next"], ["qwen3_next", "deepseek_v32", "deepseek_v4"]),
)
def test_experts_of_recurrent_and_sparse_models_stay_on_disk(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    settings = ModelSettings(expert_bits=8, group_size=32)
    store = convert(tiny_checkpoint(model_type), tmp_path / "store", settings)
    for drafts in ("off", "elastic"):  # which keep states for each drafted token
        resident = MoE.from_pretrained(store, SMALL | {"speculation": {"mode": drafts}})
        profile = budget(store, resident, 0.5, speculation={"mode": drafts})
        check_equal(MoE.from_pretrained(store, profile), resident)


def test_a_prompt_that_wants_everything_reads_the_next_layer_ahead(
    store: Path, resident: MoE
) -> None:
    read = {}
    for prefetch in (True, False):
        offload = {"hot_set": False, "prefetch": prefetch}
        model = MoE.from_pretrained(store, budget(store, resident, 0.5, offload=offload))
        assert torch.equal(model.logits(PROMPTS[0]), resident.logits(PROMPTS[0]))
        read[prefetch] = model.stats()["offload"]["prefetches"]
    assert read[True] > read[False] == 0


def test_layers_without_a_miss_are_passed_and_counted(store: Path, resident: MoE) -> None:
    """What is decided does not depend on whether Python was asked at a layer. Nothing is read
    ahead: what that finds in time is the disk's affair."""
    found, asked = list[Any](), list[int]()
    offload = SMALL["offload"] | {"prefetch": False}
    long = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
    for forward in (experts_forward, partial(experts_forward)):  # the latter is asked everywhere
        model = MoE.from_pretrained(store, budget(store, resident, 0.75, offload=offload))
        model.experts.forward, gather = forward, model.experts.gather
        layers = list[int]()

        def noted(layer: int, calls: Any, gather: Any = gather, layers: list[int] = layers) -> Any:
            layers.append(layer)
            return gather(layer, calls)

        model.experts.gather = noted  # type: ignore[method-assign]
        (done,) = model.generate([PROMPTS[0]], long)
        stats = model.stats()
        for one in (stats["offload"], *stats["offload"]["layers"], *stats["offload"]["tiers"]):
            del one["stall_seconds"]  # the disk's
        cache = model.experts.layers[0].cache  # type: ignore[union-attr]
        found.append((done.token_ids, stats["offload"], stats["layers"], cache.hot_set()))
        asked.append(len(layers))
    assert found[0] == found[1]
    assert asked[0] < asked[1]


def test_threads_take_turns(store: Path, resident: MoE) -> None:
    """They share the cache: a step of one must not evict what a step of another has begun with."""
    model = MoE.from_pretrained(store, budget(store, resident, 0.1))
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    expected = [resident.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = pool.map(lambda prompt: model.generate([prompt], params), PROMPTS)
            assert [done[0].token_ids for done in found] == expected
        rows = pool.map(model.logits, PROMPTS)
        assert all(map(torch.equal, rows, map(resident.logits, PROMPTS)))


def test_what_fits_is_resident(store: Path, resident: MoE) -> None:
    model = MoE.from_pretrained(store, budget(store, resident, 1.0))
    assert model.status()["offload"] is None
    assert model.stats()["offload"] is None


@pytest.mark.parametrize("fused", ["auto", "off"])
@pytest.mark.parametrize("bits", deep_except([4], [4, 16]))
@pytest.mark.parametrize(
    "architecture", deep_except(["deepseek_v3"], ["gpt_oss", "nemotron_h", "deepseek_v3"])
)
def test_biases_whole_weights_and_other_architectures(
    architecture: str, bits: int, fused: str, tmp_path: Path
) -> None:
    network = tiny_model(architecture).bfloat16()
    for name, parameter in network.named_parameters():
        if "experts" in name and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    network.save_pretrained(tmp_path)
    settings = ModelSettings.model_validate({"expert_bits": bits, "group_size": 32})
    store = convert(tmp_path, tmp_path / "store", settings)
    engine = {"max_batch_size": 8, "fused": fused}
    resident = MoE.from_pretrained(store, SMALL | {"engine": engine})
    check_equal(MoE.from_pretrained(store, budget(store, resident, 0.15, engine=engine)), resident)


@pytest.mark.parametrize("bits", [2, 3])
def test_a_coarser_prefix_of_the_store(store: Path, bits: int) -> None:
    coarse = {"expert_bits": bits}
    resident = MoE.from_pretrained(store, SMALL | {"model": coarse})
    model = MoE.from_pretrained(store, budget(store, resident, 0.1, model=coarse))
    check_equal(model, resident)


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_with_bits_of_their_own(mixed_store: Path, bits: int) -> None:
    own = {"model": {"expert_bits": bits}}
    resident = MoE.from_pretrained(mixed_store, SMALL | own)
    sizes = sizes_of(read_manifest(mixed_store), bits)
    for share in (0.125, 0.25, 0.5):
        model = MoE.from_pretrained(mixed_store, budget(mixed_store, resident, share, **own))
        check_equal(model, resident)
        cache = model._loaded.offloaded.cache  # type: ignore[union-attr]
        nbytes = np.array(sizes.nbytes)
        assert cache.slots == model.memory_plan.expert_slots
        assert cache.slots >= round(32 * share)
        assert nbytes[cache.present].sum() >= 0.7 * cache.slots * sizes.mean_bytes


def late(bits: int, share: float) -> dict[str, Any]:
    method = {"late_prefix": {"bits": bits, "share": share}}
    own = {"late": "prefix", "hot_set": False}
    return {"lossless": False, "offload": own, "methods": method}


@pytest.mark.parametrize(("bits", "mixed"), [(2, False), (4, False), (3, True)])
def test_a_prefix_of_all_is_the_model_of_fewer_bits(
    store: Path, mixed_store: Path, resident: MoE, bits: int, mixed: bool
) -> None:
    """Where nobody is heavy, and no expert is there whole from before."""
    store = mixed_store if mixed else store
    coarse = MoE.from_pretrained(store, SMALL | {"model": {"expert_bits": bits}})
    model = MoE.from_pretrained(store, budget(store, resident, 0.15, **late(bits, 0.0)))
    check_equal(model, coarse)
    served = model.stats()["offload"]
    assert mixed or served["prefixes"] == served["hits"] + served["misses"]


def test_who_waits_for_all_of_every_expert_gets_the_bits_of_a_resident_model(
    store: Path, resident: MoE
) -> None:
    model = MoE.from_pretrained(store, budget(store, resident, 0.25, **late(4, 1.0)))
    check_equal(model, resident)
    assert model.stats()["offload"]["prefixes"] == 0


def test_late_prefixes_are_counted_or_said_to_change_nothing(store: Path, resident: MoE) -> None:
    model = MoE.from_pretrained(store, budget(store, resident, 0.25, **late(4, 0.5)))
    model.generate(PROMPTS, GREEDY)
    served = model.stats()["offload"]
    assert 0 < served["prefixes"] < served["hits"] + served["misses"]
    few = budget(store, resident, 0.25, **late(4, 0.5), model={"expert_bits": 4})
    assert "no expert has more than 4 bits" in str(MoE.from_pretrained(store, few).status())
    at_hand = MoE.from_pretrained(store, SMALL | late(4, 0.5))
    assert "all experts are in memory" in str(at_hand.status())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policies_do_not_change_a_bit(store: Path, resident: MoE, policy: str) -> None:
    offload = {"policy": policy, "hot_set": False}
    model = MoE.from_pretrained(store, budget(store, resident, 0.25, offload=offload))
    assert model.status()["offload"]["policy"] == policy
    check_equal(model, resident)


def test_without_compiled_kernels_a_learning_policy_gives_way_to_lru(
    store: Path, resident: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.policies.choose_kernel", lambda: (None, "no compiler"))
    model = MoE.from_pretrained(store, budget(store, resident, 0.25, offload={"hot_set": False}))
    assert model.status()["offload"]["policy"] == "lru"
    assert any("offload.policy: forecast needs the compiled" in text for text in model.notices)
    check_equal(model, resident)


def test_the_plan_shows_the_tiers_and_what_is_read(store: Path, resident: MoE) -> None:
    model = MoE.from_pretrained(store, budget(store, resident, 0.25))
    plan = model.memory_plan
    memory, disk = plan.tiers
    assert (memory.experts, disk.experts) == (8, 32)
    assert "8 of 32 at a time (25.0%), the others on disk" in str(plan)
    assert "disk:" in str(plan)
    assert plan.fits
    size = next(line.bytes for line in plan.lines if line.name == "experts")
    assert size == 8 * slot_bytes(read_manifest(store), 8)
    json.dumps(plan.as_dict())
    model.generate(PROMPTS, GREEDY)
    stats = model.stats()["offload"]
    assert stats["hits"] + stats["misses"] == sum(model.stats()["expert_loads_by"].values())
    assert stats["bytes_read"] >= stats["misses"] * stats["expert_bytes"] > 0
    assert 0 < stats["hit_ratio"] < 1
    json.dumps([stats, model.status()])
    model.reset_stats()
    assert model.stats()["offload"]["misses"] == 0


def test_a_budget_below_the_least_is_refused_with_numbers(store: Path, resident: MoE) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        MoE.from_pretrained(store, budget(store, resident, 1 / 32))
    text = str(caught.value)
    assert "2 of 32 at a time" in text
    assert "memory.device_gib of at least 0.00" in text
    assert "are the least for this model and profile: 2 experts in memory" in text


def test_a_checkpoint_is_refused_with_the_remedy(
    store: Path, resident: MoE, tiny_checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(DoesNotFitError, match="moe convert writes a store, whose experts may stay"):
        MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), budget(store, resident, 0.25))


def test_whole_weights_that_the_profile_changes_cannot_stay_on_disk(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    whole = ModelSettings.model_validate({"expert_bits": 16})
    store = convert(tmp_path, tmp_path / "store", whole)
    resident = MoE.from_pretrained(store, SMALL)
    with pytest.raises(DoesNotFitError, match=r"leave model\.expert_bits and"):
        MoE.from_pretrained(store, budget(store, resident, 0.1, model={"expert_dtype": "bfloat16"}))


def test_the_hot_set_survives(copied: Path, resident: MoE) -> None:
    store, profile = copied, budget(copied, resident, 0.25, offload={})
    model = MoE.from_pretrained(store, profile)
    assert model.stats()["offload"]["restored_bytes"] == 0
    model.generate(PROMPTS, GREEDY)
    hot = model._loaded.offloaded.cache.hot_set()  # type: ignore[union-attr]
    model.close()
    model.close()
    again = MoE.from_pretrained(store, profile)
    cache = again._loaded.offloaded.cache  # type: ignore[union-attr]
    assert sorted(cache.hot_set()) == sorted(hot)
    assert again.stats()["offload"]["restored_bytes"] == 8 * cache.expert_bytes
    check_equal(again, resident)
    none = MoE.from_pretrained(store, profile | {"offload": {"hot_set": False}})
    assert none.stats()["offload"]["restored_bytes"] == 0


@pytest.mark.parametrize("content", ["[[0, 99]]", "[[0]]", "{", "7", "[[true, 0]]"])
def test_a_hot_set_of_something_else_is_not_used(
    copied: Path, resident: MoE, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (copied / FILE_NAME).write_text(content)
    model = MoE.from_pretrained(copied, budget(copied, resident, 0.25, offload={}))
    assert model.stats()["offload"]["restored_bytes"] == 0
    assert "is no hot set of this model" in caplog.text


def test_the_border_moves_while_requests_run(store: Path, resident: MoE) -> None:
    profile = budget(store, resident, 0.125)
    profile["memory"]["kv_tokens"] = 128  # whose bytes hold 15 experts
    kv = 128 * resident.memory_plan.kv_bytes_per_token
    profile["memory"]["device_gib"] -= (resident.memory_plan.lines[-1].bytes - kv) / GIB
    offload = {"hot_set": False, "borrow": True}
    model = MoE.from_pretrained(store, profile | {"offload": offload})
    cache = model._loaded.offloaded.cache  # type: ignore[union-attr]
    sizes = set()
    expected = {i: c.token_ids for i, c in enumerate(resident.generate(PROMPTS, GREEDY))}
    found: dict[int, list[int]] = {i: [] for i in expected}
    for event in model.stream(PROMPTS, GREEDY):
        sizes.add(cache.slots)
        found[event.prompt].append(event.delta.token.id)
    assert found == expected
    assert model.memory_plan.expert_slots == 4 <= min(sizes)
    assert len(sizes) > 2


def test_the_summary_of_a_generation_says_what_came_from_disk(store: Path, resident: MoE) -> None:
    model = MoE.from_pretrained(store, budget(store, resident, 0.25))
    _, stats = run(model, PROMPTS[0], lambda _: None)
    assert stats.hit_ratio is not None
    assert 0 < stats.hit_ratio < 1
    assert stats.disk_bytes_read == model.stats()["offload"]["bytes_read"] > 0
    assert f"{stats.hit_ratio:.1%} of them in memory, " in stats.summary()
    assert stats.summary().endswith("MB from disk")
    assert "disk" not in run(resident, PROMPTS[0], lambda _: None)[1].summary()
