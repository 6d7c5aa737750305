"""Conversions of models on a hub: nothing is kept of the download, and the store is the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.gguf_files import write_model
from examples.models.tiny import tiny_model
from experts import safetensors_io as blobs
from moe.cli import main
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError
from moe.loading.remote import reader
from tests.amounts import deep_except
from tests.fake_hub import ConnectionBreak, FakeHub, fake_hub
from tests.moe.convert.stores import SETTINGS, content
from tests.moe.convert.test_unfinished import Killed, killing


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny model has as many as a large one."""
    monkeypatch.setattr(reader, "BLOCK", 20_000)
    monkeypatch.setattr(reader, "GAP", 0)


def shared(hub: FakeHub, model_type: str, shard: str = "50KB") -> Path:
    """A model on the hub, in shards that are smaller than a layer."""
    path = hub.repository(f"org/{model_type}")
    tiny_model(model_type).save_pretrained(path, max_shard_size=shard)
    (path / "LICENSE").write_text("do as you like")
    return path


def copied(path: Path, to: Path) -> Path:
    """The model in a directory of its name here."""
    return Path(shutil.copytree(path, to / path.name))


@pytest.mark.parametrize(
    "model_type", deep_except(["gpt_oss"], ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
)
def test_the_store_is_that_of_a_local_checkpoint_and_each_byte_comes_once(
    hub: FakeHub, tmp_path: Path, model_type: str
) -> None:
    path = shared(hub, model_type)
    made = content(convert(f"org/{model_type}", tmp_path / "a", SETTINGS))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert hub.bytes_sent(".safetensors") <= 2 * size  # an outline's first requests take as much
    assert data_sent(hub) <= size
    assert made == content(convert(copied(path, tmp_path), tmp_path / "b", SETTINGS))
    assert made["LICENSE"] == b"do as you like"
    assert not (hub.root.parent / "cache").exists()


def data_sent(hub: FakeHub) -> int:
    """Bytes of weights that were sent, without the beginnings of files, where headers are."""
    return sum(one.nbytes for one in hub.log if one.path.endswith(".safetensors") and one.start)


def test_a_gguf_file_is_converted_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    file = hub.repository("org/gguf") / "tiny-Q8_0.gguf"
    write_model(tiny_model("qwen3_moe"), file, lambda name: "F16" if "exps" in name else "Q8_0")
    made = content(convert("org/gguf:Q8_0", tmp_path / "a", SETTINGS))
    assert made == content(convert(file, tmp_path / "b", SETTINGS))


@settings(max_examples=3)
@given(
    kills=st.lists(st.integers(0, 120), min_size=1, max_size=2),
    breaks=st.sets(st.integers(0, 60), max_size=3),
)
def test_a_conversion_killed_anywhere_goes_on_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], breaks: set[int]
) -> None:
    """Killed when the n-th tensor is about to be written; connections break off besides."""
    root = tmp_path_factory.mktemp("kills")
    with fake_hub(root) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", 20_000)
        path, pieces = shared(hub, "qwen3_moe"), 0

        def breaking(name: str) -> None:
            nonlocal pieces
            pieces += name.endswith(".safetensors")
            if pieces in breaks:
                breaks.discard(pieces)
                raise ConnectionBreak

        hub.on_piece = breaking
        out = root / "store"
        for kill in kills:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(blobs, "as_bytes", killing(blobs.as_bytes, kill))
                try:
                    convert("org/qwen3_moe", out, SETTINGS)
                except Killed:
                    assert not out.exists()
                else:
                    break
        if not out.exists():
            convert("org/qwen3_moe", out, SETTINGS)
        assert content(out) == content(convert(copied(path, root), root / "local", SETTINGS))


def test_what_is_finished_is_not_fetched_again(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared(hub, "qwen3_moe")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    with monkeypatch.context() as patch:
        patch.setattr("moe.commands.convert.convert.write_trunk", _stop)
        with pytest.raises(Killed):
            convert("org/qwen3_moe", tmp_path / "a", SETTINGS)
    first = hub.bytes_sent(".safetensors")
    convert("org/qwen3_moe", tmp_path / "a", SETTINGS)
    headers = first - size
    again = hub.bytes_sent(".safetensors") - first - headers
    assert again < size / 2  # attention, embeddings and routers, which are not kept between runs


def _stop(*_: Any) -> None:
    raise Killed


def test_a_hub_that_changes_meanwhile_begins_a_new_store(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-done conversion of one commit is not completed with another's weights."""
    path = shared(hub, "qwen3_moe")
    with monkeypatch.context() as patch:
        patch.setattr("moe.commands.convert.convert.write_trunk", _stop)
        with pytest.raises(Killed):
            convert("org/qwen3_moe", tmp_path / "a", SETTINGS)
    for file in path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1000] + bytes(1000))
    made = content(convert("org/qwen3_moe", tmp_path / "a", SETTINGS))
    assert made == content(convert(copied(path, tmp_path), tmp_path / "b", SETTINGS))


def test_a_hub_that_stops_answering_is_said(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared(hub, "qwen3_moe")
    monkeypatch.setattr("moe.loading.remote.answers.PAUSE_S", 0)

    def stop(name: str) -> None:
        hub.down = hub.bytes_sent(".safetensors") > 300_000

    hub.on_piece = stop
    assert main(["convert", "org/qwen3_moe", str(tmp_path / "a")]) == 2
    assert "gave no answer for org/qwen3_moe" in capsys.readouterr().err
    hub.on_piece, hub.down = lambda _: None, False
    assert main(["convert", "org/qwen3_moe", str(tmp_path / "a"), "--revision", "main"]) == 0


def test_a_store_on_the_hub_is_no_checkpoint(
    hub: FakeHub, tmp_path: Path, tiny_checkpoint: Callable[[str], Path]
) -> None:
    convert(tiny_checkpoint("qwen3_moe"), hub.root / "org" / "store", SETTINGS)
    with pytest.raises(CheckpointError, match="is a store already; convert the original"):
        convert("org/store", tmp_path / "a", SETTINGS)
