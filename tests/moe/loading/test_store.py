"""Loading a store: what it holds, no more, and only into the model that it was made of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.models.tiny import tiny_model
from experts.manifest import MANIFEST_NAME, TRUNK_NAME, read_manifest, write_manifest
from experts.safetensors_io import Entry, write_file
from experts.store import Store
from moe import MoE
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError, ProfileError
from moe.loading.progress import LoadProgress
from moe.settings import ModelSettings
from tests.amounts import deep_except

IDS = list(range(3, 23))


@pytest.fixture(scope="module")
def store(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stores") / "store"
    return convert(tiny_checkpoint("qwen3_moe"), out, ModelSettings(expert_bits=4, group_size=32))


@pytest.fixture
def copied(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (
            {"expert_bits": 8},
            r"model\.expert_bits is 8, and the store .* holds 4 bits; set it to 4",
        ),
        ({"trunk_bits": 16}, r"model\.trunk_bits is 16, and the store .* holds 8 bits"),
        ({"head_bits": 16}, r"model\.head_bits is 16, and the store .* holds 8 bits"),
    ],
)
def test_more_bits_than_there_are(store: Path, bits: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        MoE.from_pretrained(store, model=bits)


def test_the_plan_knows_what_a_store_takes_and_reads(store: Path) -> None:
    seen: list[LoadProgress] = []
    moe = MoE.from_pretrained(store, model={"expert_bits": 2, "head_bits": 4}, progress=seen.append)
    lines = {line.name: line.bytes for line in moe._loaded.memory_plan.lines}
    assert lines["trunk"] + lines["experts"] == moe.stats()["weight_bytes"]
    reading = [now for now in seen if now.phase == "loading weights"]
    assert reading[-1].done_bytes == reading[-1].total_bytes
    assert sorted(now.done_bytes for now in reading) == [now.done_bytes for now in reading]


@pytest.mark.parametrize(
    "model",
    deep_except(
        [{}, {"expert_bits": 2, "trunk_bits": 8, "head_bits": 4}],
        [
            {},
            {"expert_dtype": "float32"},
            {"expert_bits": 8, "group_size": 32},
            {"expert_bits": 2, "trunk_bits": 8, "head_bits": 4},
        ],
    ),
)
@pytest.mark.parametrize("architecture", deep_except(["gpt_oss"], ["gpt_oss", "nemotron_h"]))
def test_a_whole_store_is_the_checkpoint_under_any_profile(
    architecture: str, model: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model(architecture).bfloat16().save_pretrained(tmp_path)
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store = MoE.from_pretrained(convert(tmp_path, tmp_path / "store", whole), model=model)
    direct = MoE.from_pretrained(tmp_path, model=model)
    assert torch.equal(store.logits(IDS), direct.logits(IDS))
    assert store.stats()["weight_bytes"] == direct.stats()["weight_bytes"]
    for moe in (store, direct):
        lines = {line.name: line.bytes for line in moe._loaded.memory_plan.lines}
        assert lines["trunk"] + lines["experts"] == moe.stats()["weight_bytes"]


def test_a_store_of_another_model(copied: Path) -> None:
    config = copied / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="4 MoE layers, the configuration says 3"):
        MoE.from_pretrained(copied)
    config.write_text(json.dumps(content | {"moe_intermediate_size": 16}))
    with pytest.raises(CheckpointError, match=r"00000\.safetensors: model\.layers\.0\.mlp"):
        MoE.from_pretrained(copied)
    config.write_text(json.dumps(content | {"head_dim": 32}))
    with pytest.raises(CheckpointError, match=r"wrong shape or dtype: model\.layers\.0\.self_attn"):
        MoE.from_pretrained(copied)


def rewrite_trunk(store: Path, **changes: torch.Tensor | None) -> None:
    """A trunk with other tensors, and a manifest that agrees with it."""
    tensors = load_file(store / TRUNK_NAME)
    for name, tensor in changes.items():
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    entries = [Entry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    record = write_file(store / TRUNK_NAME, entries, tensors.values())
    manifest = read_manifest(store)
    files = manifest.files | {TRUNK_NAME: record}
    write_manifest(store, manifest.model_copy(update={"files": files}))


def test_tensors_of_the_trunk(copied: Path) -> None:
    rewrite_trunk(copied, **{"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        MoE.from_pretrained(copied)


def test_a_scale_that_is_not_finite_is_named(copied: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.scales"
    rewrite_trunk(copied, **{name: torch.full((32,), float("nan")).half()})
    with pytest.raises(CheckpointError, match=rf"{name} in trunk\.safetensors holds NaN"):
        MoE.from_pretrained(copied, model={"check_finite": True})


def test_an_expert_that_is_not_finite_is_named(copied: Path) -> None:
    manifest = read_manifest(copied)
    record = manifest.layers[2]
    tensors = load_file(copied / record.file)
    tensors["layers.2.experts.3.scales"][5] = float("inf")
    entries = [Entry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with Store.open(copied) as store:  # in the order of the file
        entries.sort(key=lambda entry: store.file(2).tensors[entry.name].start)
    written = write_file(copied / record.file, entries, (tensors[e.name] for e in entries))
    files = manifest.files | {record.file: written}
    write_manifest(copied, manifest.model_copy(update={"files": files}))
    MoE.from_pretrained(copied)
    message = rf"model\.layers\.2\.mlp\.experts in {record.file} holds NaN or infinity"
    with pytest.raises(CheckpointError, match=message):
        MoE.from_pretrained(copied, model={"check_finite": True})


def test_linear_layers_that_are_none(copied: Path) -> None:
    manifest = read_manifest(copied)
    linears = {**manifest.linears, "model.layers.0.mlp.gate": 8, "model.embed_tokens": 8}
    write_manifest(copied, manifest.model_copy(update={"linears": linears}))
    with pytest.raises(CheckpointError, match=r"mlp\.gate is stored as planes, and the configurat"):
        MoE.from_pretrained(copied)


def test_gate_and_up_in_the_other_order(copied: Path) -> None:
    manifest = read_manifest(copied)
    layers = tuple(layer.model_copy(update={"interleaved": True}) for layer in manifest.layers)
    write_manifest(copied, manifest.model_copy(update={"layers": layers}))
    with pytest.raises(CheckpointError, match=r"gate and up of model\.layers\.\d\.mlp\.exp"):
        MoE.from_pretrained(copied)


def test_bytes_that_changed_are_found_when_asked(copied: Path) -> None:
    file = copied / "experts-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"experts-00002\.safetensors is damaged: layers\.2\."
    ):
        MoE.from_pretrained(copied)
    with pytest.raises(CheckpointError, match=r"experts-00002\.safetensors: its bytes do not have"):
        MoE.from_pretrained(copied, model={"verify": True})


def test_a_store_without_its_manifest(copied: Path) -> None:
    (copied / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"has no moe-store\.json: its conversion did not"):
        MoE.from_pretrained(copied)


def test_tied_heads(saved: Path, tmp_path: Path) -> None:
    """A head that shares the embedding is quantized apart; the embedding stays whole."""
    tensors = load_file(saved / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((saved / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for bits in (8, 16):
        settings = ModelSettings(head_bits=bits, group_size=32)
        store = convert(tmp_path, tmp_path / f"store{bits}", settings)
        direct = {"expert_bits": 8, "trunk_bits": 8, "head_bits": bits, "group_size": 32}
        expected = MoE.from_pretrained(tmp_path, model=direct).logits(IDS)
        assert torch.equal(MoE.from_pretrained(store).logits(IDS), expected)
        assert ("lm_head.plane0" in load_file(store / TRUNK_NAME)) == (bits == 8)


def test_scales_stay_as_they_are_where_an_architecture_keeps_layers_in_float32(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """DeepSeek V4 names layers that are never float16; scales of a quantised one are."""
    store = convert(tiny_checkpoint("deepseek_v4"), tmp_path / "store", ModelSettings())
    moe = MoE.from_pretrained(store, model={"dtype": "float16", "trunk_bits": 8})
    assert moe.logits(IDS).isfinite().all()
