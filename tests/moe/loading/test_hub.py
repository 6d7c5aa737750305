"""From a model's name to its directory: local ones, hub ids, and what is said when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import moe.loading.hub
from moe.errors import CheckpointError
from moe.loading.hub import public_name, resolve_model


def test_a_directory_is_found_through_links(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    assert resolve_model(str(tmp_path / "link")) == real.resolve()


def test_clients_call_a_model_by_the_name_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert public_name("~/mine") == public_name(tmp_path / "mine") == "mine"
    assert public_name("org/name") == "org/name"


@pytest.mark.parametrize(
    "name",
    ["no-slash", "../a/b", "a/../b", "/no/such/dir", "a/b/c", "a/b\n", "-x/y", "a--b/c"],
)
def test_unknown_path_is_no_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        moe.loading.hub, "snapshot_download", lambda *_, **__: pytest.fail("downloaded")
    )
    with pytest.raises(CheckpointError, match=r"no model directory .*not a hub id.*check the path"):
        resolve_model(name)


def test_unusable_names(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; give the directory that holds config"):
        resolve_model(file)
    with pytest.raises(CheckpointError, match="no model directory"):
        resolve_model(tmp_path / "absent")
    for name in ("x" * 5000, "~no-such-user/x"):
        for look in (resolve_model, public_name):
            with pytest.raises(CheckpointError, match=r"^.{,210}' is not a usable model name: "):
                look(name)
    with pytest.raises(CheckpointError, match="no model directory"):
        resolve_model("a\0b")
    with pytest.raises(CheckpointError, match="the model name is empty; give a directory"):
        resolve_model("")


def test_hub_ids_download_safetensors_and_never_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}

    def download(name: str, **patterns: list[str]) -> str:
        asked.update(patterns)
        return str(tmp_path)

    monkeypatch.setattr(moe.loading.hub, "snapshot_download", download)
    assert resolve_model("Org-1/model_2.5") == tmp_path
    ours = ["config.json", "model-00001-of-00002.safetensors", "moe-calibration/trace.safetensors"]
    copies = ["original/model-00001.safetensors", "consolidated.safetensors"]
    code = ["pytorch_model.bin", "model.pt", "modeling_x.py", "metal/model.bin"]
    wanted = filter_repo_objects(
        [*ours, *copies, *code],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(wanted) == ours


def test_a_failed_download_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: list[str]) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nmore")

    monkeypatch.setattr(moe.loading.hub, "snapshot_download", download)
    message = r"(?s)'org/name' .*LocalEntryNotFoundError: Cannot find .*folder\. Check the spelling"
    with pytest.raises(CheckpointError, match=message):
        resolve_model("org/name")
