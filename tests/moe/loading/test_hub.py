"""From a model's name to its directory: local ones, hub ids, and what is said when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.errors import CheckpointError
from moe.loading.hub import resolve_model
from moe.loading.local import public_name
from moe.loading.remote.names import HubName, at_revision, choose_files
from moe.loading.remote.repository import Repository

PART = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_]|[.-][a-z]){0,20}", fullmatch=True)
QUANT = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_]{0,9}", fullmatch=True)
REVISION = st.sampled_from(["main", "v1.0", "refs/pr/3", "0" * 40])


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
    assert public_name("org/name") == public_name("org/name@v1") == "org/name"
    assert public_name("org/name:Q4_K_M@refs/pr/3") == "org/name:Q4_K_M"


@pytest.mark.parametrize(
    "name",
    [
        *("no-slash", "../a/b", "a/../b", "/no/such/dir", "a/b/c", "a/b\n", "-x/y", "a--b/c"),
        *("a/b:", "a/b:-Q4", "a/b@", "a/b@..", "a/b@main:Q4", "a/b:Q4:Q5", "a/b@-f"),
    ],
)
def test_unknown_path_is_no_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Repository, "find", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=r"no model directory .*not a hub id.*check the path"):
        resolve_model(name)


def test_unusable_names(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; give the directory that holds config"):
        resolve_model(file)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="cannot use these GGUF files"):
        resolve_model(tmp_path / "model.gguf")
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


@given(PART, PART, st.just("") | QUANT, st.none() | REVISION)
def test_a_name_is_spelled_as_it_is_read(
    org: str, model: str, quant: str, revision: str | None
) -> None:
    name = HubName(f"{org}/{model}", quant, revision)
    assert HubName.parse(str(name)) == name
    if revision is not None:
        assert at_revision(name.public, revision) == str(name)


def test_a_revision_is_of_a_hub_id() -> None:
    assert at_revision("examples/demo-model", None) == "examples/demo-model"
    assert at_revision("./mine", None) == "./mine"
    with pytest.raises(CheckpointError, match=r"--revision v1 .* ./mine is no hub id; leave one"):
        at_revision("./mine", "v1")
    with pytest.raises(CheckpointError, match=r"names revision v2 itself; leave one out"):
        at_revision("org/name@v2", "v1")
    with pytest.raises(CheckpointError, match=r"--revision 'a b' is no name of a branch"):
        at_revision("org/name", "a b")


def chosen(name: str, *files: str) -> list[str]:
    parsed = HubName.parse(name)
    assert parsed is not None
    choice = choose_files(parsed, dict.fromkeys(files, 1))
    return [*choice.weights, *choice.others]


def test_safetensors_are_chosen_and_never_pickles() -> None:
    ours = ["model-00001-of-00002.safetensors", "config.json", "moe-calibration/trace.safetensors"]
    copies = ["original/model-00001.safetensors", "consolidated.safetensors", "onnx/config.json"]
    code = ["pytorch_model.bin", "model.pt", "modeling_x.py", "metal/model.bin", "x-Q4_0.gguf"]
    assert chosen("org/name", *copies, *ours, *code) == ours
    with pytest.raises(CheckpointError, match=r"org/name has no weights .* only pickles \(mod"):
        chosen("org/name", "config.json", "model.pt")
    with pytest.raises(CheckpointError, match="org/name has no weights that can be read: it has a"):
        chosen("org/name", "a.txt")


GGUF = [
    "Big-30B-Q4_K_M.gguf",
    "Big-30B-UD-Q4_K_XL.gguf",
    "BF16/Big-30B-BF16-00002-of-00002.gguf",
    "BF16/Big-30B-BF16-00001-of-00002.gguf",
    "mmproj-Big-F16.gguf",
    "imatrix_unsloth.gguf",
    "config.json",
]


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        ("Q4_K_M", ["Big-30B-Q4_K_M.gguf"]),
        ("q4_k_m", ["Big-30B-Q4_K_M.gguf"]),
        ("UD-Q4_K_XL", ["Big-30B-UD-Q4_K_XL.gguf"]),
        ("BF16", [f"BF16/Big-30B-BF16-0000{part}-of-00002.gguf" for part in (1, 2)]),
    ],
)
def test_a_gguf_file_is_chosen_by_its_quantisation(quant: str, files: list[str]) -> None:
    assert chosen(f"org/name:{quant}", *GGUF) == files


def test_gguf_files_are_listed_where_the_name_leaves_open_which() -> None:
    for name, why in (("org/name", "has several GGUF files"), ("org/name:Q8_0", "has no Q8_0")):
        listed = r"(\n  org/name:(Q4_K_M|UD-Q4_K_XL|BF16) +0\.00 MiB){3}$"
        with pytest.raises(CheckpointError, match=rf"^org/name {why}; name one of them:{listed}"):
            chosen(name, *GGUF)
    assert chosen("org/name", "only.gguf", "mmproj-F16.gguf") == ["only.gguf"]
    assert chosen("org/name:b-Q4_0", "a-Q4_0.gguf", "b-Q4_0.gguf") == ["b-Q4_0.gguf"]
    with pytest.raises(
        CheckpointError,
        match=r"no GGUF files.*: it has safetensors; leave out",
    ):
        chosen("org/name:Q4_0", "model.safetensors")
