"""A device beside main memory, stood in for by more main memory whose copies come late: the tokens
of a model that is resident there, whatever is where."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from examples.models.tiny import tiny_model
from experts.manifest import read_manifest
from kernels import QuantizedExperts
from kernels.triton import experts as triton_experts
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.errors import DoesNotFitError
from moe.loading.memory_plan import GIB
from moe.memory.planning import host_room
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from offload.capacity import fixed_bytes, sizes_of, slot_bytes
from offload.cpu_experts import CpuCosts
from offload.errors import OffloadError
from offload.hot_set import FILE_NAME
from tests.offload.two_queues import LateCopies

SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 128, "mode": "whole"},
    "engine": {"max_batch_size": 8},
    "offload": {"hot_set": False},
}
PROMPTS = [list(range(3, 40)), [5, 9, 2], list(range(30, 80, 2)), [7] * 6]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
EXPERTS = 32


@pytest.fixture(scope="module")
def resident(store: Path) -> MoE:
    return MoE.from_pretrained(store, SMALL)


@pytest.fixture
def load(resident: MoE, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MoE]:
    """Loads with room for so many experts on the device and in main memory."""

    def load_tiers(
        store: Path, slots: int, host_slots: int, like: MoE = resident, **changed: Any
    ) -> MoE:
        manifest = read_manifest(store)
        size, fixed = slot_bytes(manifest, manifest.bits), fixed_bytes(manifest)
        rest = sum(line.bytes for line in like.memory_plan.lines if line.name != "experts")
        memory = SMALL["memory"] | {"device_gib": (rest + slots * size + 16) / GIB}
        monkeypatch.setattr("moe.memory.planning.host_room", lambda *_: host_slots * size + fixed)
        monkeypatch.setattr("offload.open_store.open_streams", lambda _: LateCopies(Random(slots)))
        return MoE.from_pretrained(store, SMALL | changed | {"memory": memory})

    return load_tiers


def tokens(model: MoE) -> list[list[int]]:
    return [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)]


def tier_of(model: MoE, name: str) -> dict[str, Any]:
    return next(tier for tier in model.stats()["offload"]["tiers"] if tier["name"] == name)


@pytest.mark.parametrize("mode", ["whole", "layered"])
@pytest.mark.parametrize(("slots", "host_slots"), [(2, 2), (3, 32), (8, 8), (8, 28), (16, 32)])
def test_any_tiers_give_the_bits_of_a_resident_model(
    store: Path, resident: MoE, load: Callable[..., MoE], slots: int, host_slots: int, mode: str
) -> None:
    prefill = {"mode": mode, "wave_tokens": 128, "group_tokens": 16}
    model = load(store, slots, host_slots, prefill=prefill)
    assert model.status()["offload"]["tiers"] == {"cpu": slots, "host": host_slots}
    assert tokens(model) == tokens(resident)
    assert torch.equal(model.logits(PROMPTS[0]), resident.logits(PROMPTS[0]))


@pytest.mark.deep
def test_slots_are_arranged_by_the_kernel_behind_their_copies(
    store: Path, resident: MoE, load: Callable[..., MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but in the interpreter: the bits of a resident model that is not arranged."""
    came: list[int] = []

    def arrange(experts: QuantizedExperts, slots: Sequence[int]) -> None:
        came.extend(slots)
        assert triton_experts.arrange_in_place(experts, slots)

    arrangements = iter(("cuda", "cpu"))  # of the device, of main memory
    monkeypatch.setattr("offload.arena.arrangement_for", lambda _: next(arrangements))
    monkeypatch.setattr("offload.arena.arrange_for_cuda", arrange)
    model = load(store, 24, 32)
    assert torch.equal(model.logits([5, 9, 2]), resident.logits([5, 9, 2]))
    assert len(set(came)) > 4


@pytest.mark.deep
def test_layers_in_memory_are_arranged_by_one_launch_a_projection(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are read from a store: the planes that torch arranges."""
    settings: dict[str, Any] = SMALL | {"model": {"expert_bits": 2}}
    plain = MoE.from_pretrained(store, settings)._loaded.experts.layers
    launches, run = [], InterpretedFunction.run

    def counted(kernel: Any, *args: Any, **options: Any) -> object:
        launches.append(kernel)
        return run(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    monkeypatch.setattr("moe.loading.store.READERS", 1)  # Triton's interpreter has one thread
    monkeypatch.setattr("kernels.arrangement_for", lambda _: "cuda")
    monkeypatch.setattr(
        "kernels.arrange_for_cuda", lambda experts: triton_experts.arrange_in_place(experts, None)
    )
    settings = settings | {"engine": SMALL["engine"] | {"fused": "off"}}
    made = MoE.from_pretrained(store, settings)._loaded.experts.layers
    assert len(launches) == 2 * len(plain)
    for one, own in zip(plain, made, strict=True):
        assert isinstance(one, QuantizedExperts)
        assert isinstance(own, QuantizedExperts)
        expected = one.for_device(torch.device("cuda"))
        assert (own.first, own.second) == (expected.first, expected.second)
        for planes, wanted in zip(own.planes, expected.planes, strict=True):
            assert all(map(torch.equal, planes, wanted))


def test_each_expert_is_on_the_device_in_host_memory_or_on_disk(
    store: Path, load: Callable[..., MoE]
) -> None:
    model = load(store, 3, 8)
    tokens(model)
    places = model.expert_layout()["places"]
    digits = "".join(layer["where"] for layer in model.expert_activity()["layers"])
    names = [places[int(digit)] for digit in digits]
    device, host = (tier.cache.present for tier in model._loaded.offloaded.tiers)  # type: ignore[union-attr]
    for name, on_device, in_host in zip(names, device.tolist(), host.tolist(), strict=True):
        assert name == "loading" or name == (
            "memory" if on_device else "host" if in_host else "disk"
        )
    assert {"memory", "host", "disk"} <= set(names)


@pytest.mark.deep
def test_biases_come_along(load: Callable[..., MoE], tmp_path: Path) -> None:
    network = tiny_model("gpt_oss").bfloat16()
    for name, parameter in network.named_parameters():
        if "experts" in name and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    network.save_pretrained(tmp_path)
    for bits in (4, 16):
        settings = ModelSettings.model_validate({"expert_bits": bits, "group_size": 32})
        store = convert(tmp_path, tmp_path / f"store{bits}", settings)
        all_near = MoE.from_pretrained(store, SMALL)
        assert tokens(load(store, 3, 6, like=all_near)) == tokens(all_near)


@pytest.mark.parametrize("host_slots", [9, EXPERTS])
def test_experts_with_bits_of_their_own(
    mixed_store: Path, load: Callable[..., MoE], host_slots: int
) -> None:
    all_near = MoE.from_pretrained(mixed_store, SMALL)
    model = load(mixed_store, 5, host_slots, like=all_near)
    size = sum(sizes_of(read_manifest(mixed_store), 8).nbytes)
    assert host_slots < EXPERTS or model.stats()["offload"]["bytes_read"] == size
    assert tokens(model) == tokens(all_near)
    assert torch.equal(model.logits(PROMPTS[0]), all_near.logits(PROMPTS[0]))
    assert host_slots < EXPERTS or model.stats()["offload"]["bytes_read"] == size


@pytest.mark.parametrize("host_slots", [8, EXPERTS])
def test_prefixes_alone_are_copied_of_whole_experts(
    store: Path, load: Callable[..., MoE], host_slots: int
) -> None:
    coarse = MoE.from_pretrained(store, SMALL | {"model": {"expert_bits": 4}})
    late = {"late": "prefix", "hot_set": False}
    method = {"late_prefix": {"bits": 4, "share": 0.0}}
    model = load(store, 6, host_slots, lossless=False, offload=late, methods=method)
    assert tokens(model) == tokens(coarse)
    assert torch.equal(model.logits(PROMPTS[0]), coarse.logits(PROMPTS[0]))
    device, prefix = tier_of(model, "cpu"), sizes_of(read_manifest(store), 4).mean_bytes
    assert device["bytes_in"] == device["misses"] * prefix


def test_a_store_that_host_memory_holds_is_read_once(store: Path, load: Callable[..., MoE]) -> None:
    model = load(store, 8, EXPERTS)
    before = model.stats()["offload"]["bytes_read"]
    size = model.stats()["offload"]["expert_bytes"]
    assert before == EXPERTS * size
    tokens(model)
    stats = model.stats()["offload"]
    assert stats["bytes_read"] == before
    assert stats["hits"] + stats["misses"] == sum(model.stats()["expert_loads_by"].values())
    host, device = tier_of(model, "host"), tier_of(model, "cpu")
    assert device["misses"] == stats["misses"] > 0
    assert host["hit_ratio"] == 1.0
    assert device["bytes_in"] >= device["misses"] * size
    assert "the others in host memory" in str(model.memory_plan)
    model.reset_stats()
    assert tier_of(model, "host")["hits"] == tier_of(model, "cpu")["hits"] == 0


@pytest.mark.parametrize(("way", "row_bits"), [("host", 24), ("host_int8", 8)])
def test_late_experts_may_be_computed_by_the_processor(
    store: Path,
    resident: MoE,
    load: Callable[..., MoE],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    row_bits: int,
) -> None:
    """The kernels of the device round activations here, as no device does: with them, only the
    order of sums changes. Whole activations are allowed while nothing else may change answers."""
    monkeypatch.setattr("offload.open_store.measure_costs", lambda *_: CpuCosts(1.0, 0.5, 0.0))
    offload = {"hot_set": False, "late": way}
    model = load(store, 8, EXPERTS, lossless=way == "host", offload=offload)
    waiting = load(store, 8, EXPERTS)
    costs = {"copy": 1.0, "expert": 0.5, "row": 0.0}
    assert model.status()["offload"]["late"] == costs | {"row_bits": row_bits}
    assert waiting.status()["offload"]["late"] is None
    for prompt in PROMPTS:
        off = (model.logits(prompt) - resident.logits(prompt)).abs()
        if way == "host_int8":
            assert off.max() < 1e-3
        assert off.mean() < 0.05
        waiting.logits(prompt)
    assert 0 < tier_of(model, "cpu")["bytes_in"] < tier_of(waiting, "cpu")["bytes_in"]


def test_the_plan_has_a_row_for_each_tier(store: Path, load: Callable[..., MoE]) -> None:
    plan = load(store, 8, 20).memory_plan
    device, host, disk = plan.tiers
    size = slot_bytes(read_manifest(store), 8)
    assert (device.experts, host.experts, disk.experts) == (8, 20, EXPERTS)
    assert host.bytes == plan.host_needed_bytes == 20 * size
    assert [tier.name for tier in plan.tiers] == ["memory", "host", "disk"]


def test_too_little_host_memory_is_refused_with_numbers(
    store: Path, load: Callable[..., MoE]
) -> None:
    with pytest.raises(DoesNotFitError, match=r"too little to bring them there.*\n.*(\n.*)*") as it:
        load(store, 8, 1)
    assert "memory.host_gib of at least " in str(it.value)


def test_what_fits_on_the_device_needs_no_host_memory(
    store: Path, load: Callable[..., MoE]
) -> None:
    assert load(store, EXPERTS + 1, 0).status()["offload"] is None


def test_the_hot_set_fills_the_device_first(
    store: Path, resident: MoE, load: Callable[..., MoE], tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(store, tmp_path / "copy"))
    model = load(copied, 6, 12, offload={})
    tokens(model)
    near, far = (tier.cache for tier in model._loaded.offloaded.tiers)  # type: ignore[union-attr]
    hot = near.hot_set()
    both = {*hot, *far.hot_set()}
    model.close()
    assert (copied / FILE_NAME).exists()
    again = load(copied, 6, 12, offload={})
    near, far = (tier.cache for tier in again._loaded.offloaded.tiers)  # type: ignore[union-attr]
    assert sorted(near.hot_set()) == sorted(hot)
    assert set(far.hot_set()) <= both
    assert tier_of(again, "cpu")["bytes_in"] == 6 * near.expert_bytes
    assert tokens(again) == tokens(resident)


def test_slots_of_a_device_are_not_lent_to_keys(store: Path, load: Callable[..., MoE]) -> None:
    model = load(store, 6, 12, offload={"borrow": True, "hot_set": False})
    assert any(notice.startswith("offload.borrow changes nothing") for notice in model.notices)
    cache = model._loaded.offloaded.cache  # type: ignore[union-attr]
    tokens(model)
    assert cache.slots == 6


def test_memory_is_unlocked_at_the_end(store: Path, load: Callable[..., MoE]) -> None:
    model = load(store, 6, 12)
    cache: Any = model._loaded.offloaded.cache  # type: ignore[union-attr]
    streams = cache._manager._source.streams
    model.generate([5, 9, 2], GREEDY)
    for expert in range(8):
        cache.prefetch(1, expert)
    assert streams.locked
    model.close()
    assert not streams.locked
    assert not streams._copies


def test_a_read_that_fails_costs_those_who_need_it(
    store: Path, resident: MoE, load: Callable[..., MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(store, 4, 6)
    host: Any = model._loaded.offloaded.tiers[1].cache  # type: ignore[union-attr]
    with monkeypatch.context() as broken:

        def fail(*_: Any, **__: Any) -> None:
            raise OffloadError("Input/output error")

        broken.setattr(host._manager._source._reader, "submit", fail)
        with pytest.raises(OffloadError, match="Input/output error"):
            tokens(model)
    assert tokens(model) == tokens(resident)


@pytest.mark.deep
def test_interpreted_triton_kernels_find_what_is_in_the_slots(
    store: Path, load: Callable[..., MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pytest.importorskip("kernels.triton.language").INTERPRETED:
        pytest.skip("TRITON_INTERPRET=0: kernels need a GPU")
    triton = pytest.importorskip("kernels.triton.experts")
    engine = {"max_batch_size": 8, "fused": "off"}
    expected = MoE.from_pretrained(store, SMALL | {"engine": engine})
    model = load(store, 8, 20, like=expected, engine=engine)
    for either in (model, expected):  # once loaded, which reads some prompts
        monkeypatch.setattr(either.experts, "forward", triton.experts_forward)
    for ids in ([5, 9, 2], [7]):
        assert torch.equal(model.logits(ids), expected.logits(ids))
    assert 0 < model.stats()["offload"]["hit_ratio"] < 1


def test_host_memory_for_experts_follows_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.memory.planning.memory_available", lambda: 100 * GIB)
    cuda = torch.device("cuda")

    def room(ranks: int = 1, **memory: Any) -> int | None:
        return host_room(load_profile({"memory": memory}).profile, cuda, ranks)

    assert room() == 90 * GIB
    assert room(ranks=2) == 45 * GIB
    assert room(host_gib=20) == 20 * GIB
    assert room(host_gib=200) == 100 * GIB  # never more than is free
    assert host_room(load_profile().profile, torch.device("cpu"), 1) is None
