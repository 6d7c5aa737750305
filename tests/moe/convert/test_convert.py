"""From a checkpoint to a store: the same model, and never half of one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.architectures import tiny_model
from experts import blobs
from experts.linear import QuantizedLinear
from experts.manifest import JOURNAL_NAME, MANIFEST_NAME
from moe import MoE
from moe.cli import main
from moe.convert.convert import convert
from moe.convert.journal import Journal
from moe.errors import CheckpointError, UnsupportedModelError
from moe.settings import ModelSettings
from moe.weights import takeover
from moe.weights.takeover import Takeover

IDS = list(range(3, 23))
SETTINGS = ModelSettings(group_size=32)
ARCHITECTURES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


def logits(path: Path, **model: Any) -> Tensor:
    return MoE.from_pretrained(path, model=model).logits(IDS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_store_is_the_model_quantized_while_loading(
    architecture: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_checkpoint(architecture)
    store = convert(model, tmp_path / "store", SETTINGS)
    direct: dict[str, Any] = {"head_bits": 8, "group_size": 32}
    for expert_bits, trunk_bits in ((3, 4), (2, 4), (8, 8)):
        bits = {"expert_bits": expert_bits, "trunk_bits": trunk_bits}
        expected = logits(model, **bits, **direct)
        assert torch.equal(logits(store, **bits), expected)
    assert torch.equal(logits(store), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_weights_stay_what_they_are(
    architecture: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_checkpoint(architecture)
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store = convert(model, tmp_path / "store", whole)
    assert torch.equal(logits(store), logits(model))
    bits: dict[str, Any] = {"expert_bits": 4, "trunk_bits": 8, "head_bits": 8}
    assert torch.equal(logits(store, **bits), logits(model, **bits))


def dense_routing(architecture: str, folder: Path) -> Path:
    """Every token to every expert, so that no near tie in a router turns the comparison over."""
    model = tiny_model(architecture)
    for name in ("num_experts_per_tok", "n_group", "topk_group"):
        if hasattr(model.config, name):
            setattr(model.config, name, 8 if name == "num_experts_per_tok" else 1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_eight_bits_are_close_to_whole_weights(architecture: str, tmp_path: Path) -> None:
    """Within 5 % of the logits' own size, root mean square, where routing cannot flip."""
    model = dense_routing(architecture, tmp_path / "model")
    store = convert(model, tmp_path / "store", SETTINGS)
    whole, at8, at4 = logits(model), logits(store), logits(store, expert_bits=4)
    size = whole.square().mean().sqrt()
    error8, error4 = ((got - whole).square().mean().sqrt() / size for got in (at8, at4))
    assert error8 < 0.05
    assert error8 < error4 < 0.6


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def saved(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def finished(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return content(convert(saved, tmp_path_factory.mktemp("finished") / "store", SETTINGS))


class Killed(BaseException):
    """What no code of ours catches."""


def killing(function: Callable[[Tensor], memoryview], after: int) -> Callable[[Tensor], memoryview]:
    """The function, which works so many times."""
    left = after

    def count(tensor: Tensor) -> memoryview:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return function(tensor)

    return count


def test_an_interrupt_says_what_is_kept(
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    assert main(["convert", str(saved), str(tmp_path / "store")]) == 130
    work = tmp_path / "store.unfinished"
    assert capsys.readouterr().err.lstrip() == (
        f"moe: interrupted; what is finished is kept in {work}, and the same command goes on from "
        "there\n"
    )


@settings(max_examples=8)
@given(kills=st.lists(st.integers(0, 120), min_size=1, max_size=3))
def test_a_conversion_killed_anywhere_goes_on_to_the_same_bytes(
    saved: Path,
    finished: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[int],
) -> None:
    """Killed when the n-th tensor is about to be written, then again, then not."""
    out = tmp_path_factory.mktemp("killed") / "store"
    for kill in kills:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blobs, "as_bytes", killing(blobs.as_bytes, kill))
            try:
                convert(saved, out, SETTINGS)
            except Killed:
                assert not out.exists()
            else:
                break
    if not out.exists():
        convert(saved, out, SETTINGS)
    assert content(out) == finished
    assert not out.with_name("store.unfinished").exists()


def half_done(saved: Path, out: Path, patch: pytest.MonkeyPatch) -> Path:
    """A conversion that stopped after two layers."""
    write, done = blobs.write_file, 0

    def two(path: Path, *rest: Any) -> blobs.FileRecord:
        nonlocal done
        if done == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        done += 1
        return write(path, *rest)

    with patch.context() as inner:
        inner.setattr("experts.layer_file.write_file", two)
        message = r"cannot write .*00002\.safetensors: No space left.*goes on from there"
        with pytest.raises(CheckpointError, match=message):
            convert(saved, out, SETTINGS)
    return out.with_name(f"{out.name}.unfinished")


@pytest.mark.parametrize("synced", [0, 1, 3, 8, 12, 16, 17])
def test_a_disk_that_is_full_at_any_file_leaves_no_store_and_goes_on(
    saved: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    synced: int,
) -> None:  # fmt: skip
    """Journal, layers, trunk, what is copied, manifest: whichever file cannot be finished."""
    fsync, out, left = os.fsync, tmp_path / "store", synced

    def full(fd: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device; what"):
            convert(saved, out, SETTINGS)
    assert not out.exists()
    work = out.with_name("store.unfinished")
    assert not [file for file in work.iterdir() if file.name.endswith(".unfinished")]
    assert content(convert(saved, out, SETTINGS)) == finished


def test_where_nothing_can_be_written_nothing_is_said_to_be_kept(
    saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^cannot write \S+: Not a directory$"):
        convert(saved, tmp_path / "file" / "store", SETTINGS)


def test_finished_layers_are_not_read_again(
    saved: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = half_done(saved, tmp_path / "store", monkeypatch)
    assert sorted(content(work)) == [
        JOURNAL_NAME, "experts-00000.safetensors", "experts-00001.safetensors",
    ]  # fmt: skip
    taken: list[int] = []
    take = Takeover.__call__

    def spy(self: Takeover, name: str) -> None:
        taken.append(name.count(".mlp.experts"))
        take(self, name)

    monkeypatch.setattr(Takeover, "__call__", spy)
    convert(saved, tmp_path / "store", SETTINGS)
    assert sum(taken) == 2  # of four layers
    assert content(tmp_path / "store") == finished


def test_a_damaged_layer_is_made_again(
    saved: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = half_done(saved, tmp_path / "store", monkeypatch)
    file = work / "experts-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with (work / JOURNAL_NAME).open("a") as journal:
        journal.write('{"layer": {"torn')
    convert(saved, tmp_path / "store", SETTINGS)
    assert content(tmp_path / "store") == finished


def test_what_a_kill_leaves_is_neither_lost_nor_taken_over(
    saved: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it writes a file, and again when it has begun to go on."""
    work = half_done(saved, tmp_path / "store", monkeypatch)
    journal = (work / JOURNAL_NAME).read_bytes()
    for name in (f"{MANIFEST_NAME}.0.unfinished", "experts-00002.safetensors.unfinished"):
        (work / name).write_bytes(b"x")

    def kill(_: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", kill)
        with pytest.raises(Killed):
            convert(saved, tmp_path / "store", SETTINGS)
    assert (work / JOURNAL_NAME).read_bytes() == journal
    assert content(convert(saved, tmp_path / "store", SETTINGS)) == finished


def test_other_settings_start_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(saved, tmp_path / "store", monkeypatch)
    other = ModelSettings(expert_bits=4)
    expected = content(convert(saved, tmp_path / "direct", other))
    assert content(convert(saved, tmp_path / "store", other)) == expected


def test_an_unfinished_store_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = half_done(saved, tmp_path / "store", monkeypatch)
    shutil.copy(saved / "config.json", work)
    with pytest.raises(CheckpointError, match=r"has no moe-store\.json: its conversion did not"):
        MoE.from_pretrained(work)


def test_two_conversions_at_once(saved: Path, tmp_path: Path) -> None:
    work = tmp_path / "store.unfinished"
    work.mkdir()
    with Journal(work, {}), pytest.raises(CheckpointError, match="another process is converting"):
        convert(saved, tmp_path / "store", SETTINGS)


def test_what_is_refused_before_anything_is_written(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already; remove it or choose another"):
        convert(saved, tmp_path, SETTINGS)
    store = convert(saved, tmp_path / "store", SETTINGS)
    with pytest.raises(CheckpointError, match="is a store already"):
        convert(store, tmp_path / "again", SETTINGS)


def test_a_disk_that_is_too_small(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("moe.convert.convert.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"needs 0\.\d\d MiB more, and .* has 0\.00 MiB free"):
        convert(saved, tmp_path / "store", SETTINGS)


def test_dense_models_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8,
        num_hidden_layers=1,
        vocab_size=8,
        intermediate_size=8,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no experts that dispatch"):
        convert(tmp_path, tmp_path / "store", SETTINGS)


def test_weights_that_are_not_finite_are_named(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(saved / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts cannot be quantized"):
        convert(tmp_path, tmp_path / "store", SETTINGS)


def test_one_layer_is_in_memory_at_a_time_however_the_files_are_cut(
    saved: Path, finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of every layer in one file, the other half in another."""
    tensors = load_file(saved / "model.safetensors")
    first = {n: t for n, t in tensors.items() if "down_proj" in n}
    save_file(first, tmp_path / "a.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in first}, tmp_path / "b.safetensors")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(saved / name, tmp_path)
    take, most = Takeover.__call__, 0

    def spy(self: Takeover, name: str) -> None:
        nonlocal most
        modules = [module for _, module in takeover.experts_modules(self.network)]
        there = [m for m in modules if any(not p.is_meta for p in m._parameters.values())]
        most = max(most, len(there))
        take(self, name)

    monkeypatch.setattr(Takeover, "__call__", spy)
    store = content(convert(tmp_path, tmp_path / "store", SETTINGS))
    assert most == 1
    store.pop(MANIFEST_NAME)  # names the source
    assert store.items() <= finished.items()


def test_routers_and_embeddings_stay_whole(saved: Path, tmp_path: Path) -> None:
    moe = MoE.from_pretrained(convert(saved, tmp_path / "store", SETTINGS))
    model = moe.trunk.model
    planes = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert {name.rpartition(".")[2] for name in planes} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "lm_head",
    }  # fmt: skip
    assert len(planes) == 4 * 4 + 1
    assert "17 linear layers of the trunk run at 8 bits" in moe.notices
    assert "experts run at 8 bits" in moe.notices


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    out = str(tmp_path / "store")
    assert main(["convert", str(saved), out, "--bits", "3", "--group-size", "32"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert torch.equal(
        logits(Path(out)),
        logits(saved, expert_bits=3, trunk_bits=8, head_bits=8, group_size=32),
    )
    assert main(["convert", str(saved), out]) == 2
    assert "exists already" in capsys.readouterr().err
