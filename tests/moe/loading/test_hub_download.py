"""Downloads from a hub on localhost: complete, continued, counted, and refused in clear words."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.errors import CheckpointError
from moe.loading.hub import read_config, resolve_model
from moe.loading.progress import LoadProgress
from moe.loading.remote import answers
from moe.loading.remote import download as downloading
from moe.loading.remote.download import fetch
from moe.loading.remote.names import HubName
from moe.loading.remote.repository import Repository
from tests.fake_hub import CHUNK, ConnectionBreak, FakeHub

NAME = "org/small"
SIZES = {"model-00001-of-00002.safetensors": 300_000, "model-00002-of-00002.safetensors": 200_001}
SMALL = {"config.json": b'{"model_type": "qwen3_moe"}', "tokenizer.json": b"{}" * 1000}


class Killed(BaseException):
    """What no code of ours catches."""


@pytest.fixture
def repository(hub: FakeHub) -> dict[str, bytes]:
    """Files of a repository, by name."""
    files = {name: os.urandom(size) for name, size in SIZES.items()} | SMALL
    for name, content in files.items():
        (hub.repository(NAME) / name).write_bytes(content)
    (hub.repository(NAME) / "pytorch_model.bin").write_bytes(b"pickle")
    return files


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_download_is_complete_and_made_once(hub: FakeHub, repository: dict[str, bytes]) -> None:
    seen: list[LoadProgress] = []
    path = resolve_model(NAME, seen.append)
    assert content(path) == repository
    total = sum(map(len, repository.values()))
    assert {one.total_bytes for one in seen} == {total}
    counted = [one.done_bytes for one in seen]
    assert counted == sorted(counted)
    assert counted[-1] == total
    assert {one.phase for one in seen} == {f"downloading {NAME}"}
    before = hub.bytes_sent("/resolve/")
    assert before == total
    assert resolve_model(NAME) == path
    assert hub.bytes_sent("/resolve/") == before
    assert not list(path.parents[1].rglob("*.part"))


def test_what_is_here_serves_without_the_hub(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve_model(f"{NAME}@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(f"{NAME}@v1") == path
    asked = r"no model directory 'org/small'.*no complete copy of it, and HF_HUB_OFFLINE is set"
    with pytest.raises(CheckpointError, match=asked):
        resolve_model(NAME)  # another revision was downloaded
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.down = True
    assert resolve_model(f"{NAME}@v1") == path
    with pytest.raises(CheckpointError, match=r"no complete copy.*gave no answer for org/small: "):
        resolve_model(NAME)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no complete copy of it, and http://127.0.0.1:\d+ "):
        resolve_model(f"{NAME}@v1")


@settings(max_examples=6)
@given(
    kills=st.lists(st.integers(0, 310_000), max_size=3),
    breaks=st.sets(st.integers(0, 12), max_size=4),
)
def test_a_download_killed_anywhere_goes_on_where_it_stopped(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], breaks: set[int]
) -> None:
    """Killed when so many bytes have come, and with connections that break off meanwhile."""
    from tests.fake_hub import fake_hub

    root = tmp_path_factory.mktemp("kills")
    with fake_hub(root) as hub:
        expected = os.urandom(300_000)
        (hub.repository(NAME) / "model.safetensors").write_bytes(expected)
        file = Repository.find(HubName(NAME)).files["model.safetensors"]
        pieces = 0

        def breaking(_: str) -> None:
            nonlocal pieces
            pieces += 1
            if pieces in breaks:
                raise ConnectionBreak

        hub.on_piece = breaking
        for kill in [*kills, 1 << 30]:
            came = 0

            def advance(count: int, kill: int = kill) -> None:
                nonlocal came
                came += count
                if came > kill:
                    raise Killed

            try:
                fetch(file, root / "target", advance)
            except Killed:
                assert not (root / "target").exists()
            else:
                break
        assert (root / "target").read_bytes() == expected
        # What was under way when it stopped comes again, and not more.
        wasted = hub.bytes_sent("/resolve/") - len(expected)
        assert wasted <= len(kills) * 5 * CHUNK


def test_two_that_want_the_same_file_download_it_once(hub: FakeHub, tmp_path: Path) -> None:
    (hub.repository(NAME) / "model.safetensors").write_bytes(os.urandom(1_000_000))
    file = Repository.find(HubName(NAME)).files["model.safetensors"]
    both = [Thread(target=fetch, args=(file, tmp_path / "x", lambda _: None)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert hub.bytes_sent("/resolve/") == 1_000_000
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_gated_repository_opens_with_a_token(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add(NAME)
    message = r"org/small is gated: accept its conditions at http://[\d.:]+/org/small, then set"
    with pytest.raises(CheckpointError, match=message):
        resolve_model(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert read_config(resolve_model(NAME)).model_type == "qwen3_moe"
    assert hub.bytes_sent("/resolve/") == sum(map(len, repository.values()))


def test_what_is_not_there_is_said(hub: FakeHub, repository: dict[str, bytes]) -> None:
    with pytest.raises(CheckpointError, match=r"has no model of that id .* check the spelling"):
        resolve_model("org/absent")
    with pytest.raises(CheckpointError, match=r"org/small has no revision v9; http:.* lists its"):
        resolve_model(f"{NAME}@v9")


def test_a_hub_without_ranges_serves_downloads_that_did_not_stop(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.ranges = False
    monkeypatch.setattr(answers, "PAUSE_S", 0)

    def breaking(name: str) -> None:
        if hub.bytes_sent(name) == 0 and name == "model-00001-of-00002.safetensors":
            pieces.append(name)
            if len(pieces) == 3:
                raise ConnectionBreak

    pieces: list[str] = []
    hub.on_piece = breaking
    with pytest.raises(CheckpointError, match=r"does not answer range requests \(status 200\)"):
        resolve_model(NAME)
    hub.on_piece = lambda _: None
    for part in (hub.root.parent / "cache").rglob("*.part"):
        part.unlink()
    assert content(resolve_model(NAME)) == repository


def test_a_disk_that_is_too_small_is_said_before_and_after(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    message = r"org/small needs 0.48 MiB more, and .*cache has 0.10 MiB free; make room, set HF_"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 100_000))
        with pytest.raises(CheckpointError, match=message):
            resolve_model(NAME)
    assert not hub.bytes_sent("/resolve/")

    class Full:
        def __init__(self, *_: Any) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloading, "fetch", Full)
    with pytest.raises(CheckpointError, match=r"the disk of .*cache is full; .* goes on where"):
        resolve_model(NAME)
