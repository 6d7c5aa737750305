"""GGUF files that are damaged, hostile or not supported: errors that say which file and what."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from examples.models import gguf_files
from examples.models.gguf_files import write_model
from examples.models.tiny import tiny_model
from experts.files import HeaderError
from moe import MoE
from moe.errors import CheckpointError, MoEError, UnsupportedModelError
from moe.loading.gguf.config import rotary_tensors
from moe.loading.gguf.directory import gguf_directory
from moe.loading.gguf.header import GgufTensor, open_gguf
from moe.loading.hub import read_config, resolve_model
from moe.loading.load import plan_weights
from moe.loading.meta_model import build_meta_model
from moe.loading.quantized import open_checkpoint


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write_model(tiny_model("mixtral"), file)
    return file


def planned(file: Path) -> None:
    """All that is looked at before weights are read."""
    path = resolve_model(file)
    config = read_config(path)
    with open_checkpoint(path, config) as checkpoint:
        plan_weights(build_meta_model(config), checkpoint, lambda _, stored: stored)


def patched(file: Path, out: Path, old: bytes, new: bytes) -> Path:
    """A copy with a change in its header; of the same length."""
    content = file.read_bytes()
    assert len(old) == len(new)
    assert old in content
    out.write_bytes(content.replace(old, new, 1))
    return out


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_whole(data: st.DataObject, good: Path) -> None:
    content = bytearray(good.read_bytes())
    header = min(tensor.start for tensor in opened(good).values())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header - 1))
        content[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    damaged = good.with_name("damaged.gguf")
    damaged.write_bytes(content)
    try:
        tensors = opened(damaged)
    except HeaderError:
        return
    for tensor in tensors.values():
        assert header <= tensor.start < tensor.end <= len(content) or len(content) < header + 64


def opened(file: Path) -> dict[str, Any]:
    found = open_gguf(file)
    os.close(found.fd)
    return found.tensors


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(where=st.floats(0, 1), byte=st.integers(0, 255))
@example(where=0.5, byte=255)
def test_a_damaged_byte_is_a_typed_error_or_none(where: float, byte: int, good: Path) -> None:
    content = bytearray(good.read_bytes())
    header = min(tensor.start for tensor in opened(good).values())
    content[int(where * (header - 1))] = byte
    damaged = good.with_name("damaged.gguf")
    damaged.write_bytes(content)
    with suppress(MoEError):  # anything else is a failure
        planned(damaged)


def test_a_cut_file_is_named_with_its_tensor(good: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(good.read_bytes()[:-100])
    last = max(opened(good).items(), key=lambda item: item[1].end)[0]
    with pytest.raises(CheckpointError, match=rf"cut\.gguf: is truncated: .*{re.escape(last)}"):
        planned(cut)
    cut.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        planned(cut)


@pytest.mark.parametrize("name", [".gguf", "..gguf", "...gguf", "..-00001-of-00001.gguf"])
def test_a_file_of_any_name_has_a_directory(good: Path, tmp_path: Path, name: str) -> None:
    """Hubs name files, too."""
    shutil.copy(good, tmp_path / name)
    assert gguf_directory(tmp_path / name, tokenizer=False).name == "model"


def test_without_a_temporary_folder_it_is_said_what_to_set(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(good, tmp_path / "other.gguf")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(CheckpointError, match=r"none can be written \(.*nowhere.*; set TMPDIR to"):
        gguf_directory(tmp_path / "other.gguf", tokenizer=False)


def test_what_divides_frequencies_is_small(good: Path) -> None:
    """It is read with the header, by whatever size that states."""
    tensor = GgufTensor(good, 0, (1 << 40,), 0, 4 << 40)
    with pytest.raises(HeaderError, match=r"has rope_freqs.weight of more than 1048576 bytes"):
        rotary_tensors({"rope_freqs.weight": tensor})


def test_weights_that_are_not_numbers_are_named(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    start = opened(good)["blk.1.ffn_up_exps.weight"].start
    content[start : start + 4] = torch.tensor([torch.nan]).numpy().tobytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"blk\.1\.ffn_up_exps\.weight\[0\] in bad\.gguf holds"
    ):
        MoE.from_pretrained(bad, model={"check_finite": True})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama", b"mamba", "architecture 'mamba' cannot be read, those of afmoe,"),
        (b"blk.1.ffn_up_exps", b"blk.1.ffn_uq_exps", r"unexpected: blk\.1\.ffn_uq_exps\.weight"),
        (b"blk.1.attn_q.", b"blk.1.attn_v.", "has two tensors 'blk.1.attn_v.weight'"),
        (b"token_embd", b"token_embe", r"has token_embd\.weight of \(0,\)"),
        (b"blk.0.ffn_down_exps", b"blk.0.ffn_down_expz", "no experts beside it"),
        (b"llama.block_count", b"llama.block_kount", r"does not state llama\.block_count"),
        (b"llama.rope.dimension_count", b"llama.rope.dimension_kount", "rope.dimension_kount = 16"),
        (b"GGUF\3", b"GGUF\1", "is GGUF version 1, only 2 and 3"),
        (b"GGUF\3", b"GGML\3", "is not a GGUF file"),
        (b"GGUF\3", b"versi", "is a pointer of Git LFS"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    old: bytes, new: bytes, message: str, good: Path, tmp_path: Path
) -> None:
    file = patched(good, tmp_path / "changed.gguf", old, new)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        planned(file)
    assert "changed.gguf" in str(caught.value) or "do not fit" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope.scaling.type", "longrope", "llama.rope.scaling.type = 'longrope'"),
        ("rope.scaling.attn_factor", 2.0, "rope.scaling.attn_factor = 2.0"),
        ("expert_gating_func", 2, "llama.expert_gating_func = 2"),
        ("expert_group_count", 4, "llama.expert_group_count = 4"),
        ("expert_weights_norm", False, "llama.expert_weights_norm = False"),
        ("expert_weights_scale", 2.5, "llama.expert_weights_scale = 2.5"),
        ("logit_scale", 0.5, "llama.logit_scale = 0.5"),
        ("rope.freq_base_swa", 5.0, "llama.rope.freq_base_swa = 5.0"),
        ("attention.sliding_window", float("nan"), "sliding_window = nan"),
    ],
)
def test_keys_that_change_the_model_are_understood_or_refused(
    key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = gguf_files.gguf_keys
    monkeypatch.setattr(gguf_files, "gguf_keys", lambda config: keys(config) | {key: value})
    model = tiny_model("mixtral")
    model.config.sliding_window = None
    write_model(model, tmp_path / "changed.gguf")
    with pytest.raises(UnsupportedModelError, match=message):
        planned(tmp_path / "changed.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window_pattern", [True]),
        ("attention.head_count_kv", [0] * 7),
        ("attention.head_count_kv", ["2"] * 7),
        ("rope.scaling.type", "yarn"),
    ],
)
def test_keys_of_each_layer_are_checked(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("mimo_v2_flash")
    keys = gguf_files.gguf_keys(model.config) | {key: value}
    monkeypatch.setattr(gguf_files, "gguf_keys", lambda _: keys)
    write_model(model, tmp_path / "of-layers.gguf")
    with pytest.raises(UnsupportedModelError, match=f"it states mimo2.{key} = "):
        planned(tmp_path / "of-layers.gguf")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("rope_freqs", [1.0] * 5, "rope_freqs.weight of 5 numbers, not of 8 above 0"),
        ("rope_freqs", [0.0] * 8, "rope_freqs.weight of 8 numbers, not of 8 above 0"),
        ("rope_freqs", [[1.0] * 8], "rope_freqs.weight of another type than F32, or not of one"),
        ("rope_factors_long", [2.0] * 8, "rope_factors_long.weight alone"),
    ],
)
def test_what_divides_frequencies_is_checked(
    name: str, values: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = gguf_files.gguf_tensors
    own = {f"{name}.weight": torch.tensor(values)}
    monkeypatch.setattr(gguf_files, "gguf_tensors", lambda model: tensors(model) | own)
    write_model(tiny_model("mixtral"), tmp_path / "changed.gguf")
    with pytest.raises(CheckpointError, match=f"changed.gguf has {message}"):
        planned(tmp_path / "changed.gguf")


def test_without_the_package_it_is_said_what_to_install(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'gguf>=0.18' 'trans"):
        resolve_model(good)
