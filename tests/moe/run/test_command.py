"""``moe run``: what it says, what it asks, what it converts, and what it then serves."""

from __future__ import annotations

import io
import itertools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.models.gguf_files import write_model
from examples.models.tiny import tiny_model
from experts.manifest import is_store, read_manifest
from moe.cli import main
from moe.commands.plan.decode_speed import Bandwidths
from moe.commands.plan.speeds import MachineSpeeds
from moe.commands.run import choice, command, facts
from moe.settings.profile import load_profile, parse_assignments
from tests.fake_hub import FakeHub

Served = list[tuple[Any, ...]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Served:
    """What would be served; the cache directory is the test's own, and nothing counts as small."""
    calls: Served = []

    def serve(*arguments: Any, log: object, **secured: Any) -> int:
        assert log
        assert not any(secured.values())
        calls.append(arguments)
        return 0

    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(MachineSpeeds, "steps", lambda *_: Bandwidths(1e10, 1e9))
    monkeypatch.setattr(choice, "SMALL", {"checkpoint": 0, "GGUF file": 0})
    monkeypatch.setattr(choice, "LIKE_A_STORE", 0)
    monkeypatch.setattr(facts, "cache_root", lambda: tmp_path / "cache")
    return calls


def test_the_shipped_model_is_served_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineSpeeds, "steps", lambda *_: Bandwidths(1e10, 1e9))
    demo = str(Path(__file__).parents[3] / "examples" / "demo-model")
    assert main(["run", demo, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["model", "runs", "store", "context", "speed"]
    assert "checkpoint, 47.08 MiB (qwen3_moe, 6 layers of 32 experts)" in lines[0]
    assert "experts as they are, all in memory: " in lines[1]
    assert "none: it is small enough to load as it is" in lines[2]
    assert lines[5:] == ["the same in single commands:", f"  moe serve {demo}"]


def test_a_checkpoint_is_converted_once_and_served(
    tiny_checkpoint: Callable[[str], Path], served: Served, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = str(tiny_checkpoint("qwen3_moe"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["run", name]) == 2
    assert "converts it first, as said above; add --yes to do so" in capsys.readouterr().err
    assert not served
    assert main(["run", name, "--yes", "--port", "0"]) == 0
    said = capsys.readouterr().err
    assert "8-bit experts, all in memory" in said
    store, profile, *_, names = served.pop()
    assert is_store(Path(store))
    assert read_manifest(Path(store)).bits == 8
    assert profile.profile.model.expert_bits == 8
    assert names == [Path(name).name]
    assert main(["run", name]) == 0
    assert f"{store}, made before" in capsys.readouterr().err
    assert served[0][0] == store


def test_a_terminal_is_asked(
    tiny_checkpoint: Callable[[str], Path], served: Served, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = str(tiny_checkpoint("qwen3_moe"))
    for answer, code in (("n\n", 2), ("\n", 0)):
        stdin = io.StringIO(answer)
        monkeypatch.setattr(stdin, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["run", name]) == code
    said = capsys.readouterr().err
    assert said.count("Convert now? [Y/n] ") == 2
    assert "nothing was converted; --dry-run shows the commands" in said
    assert len(served) == 1


def test_what_the_user_sets_is_kept(
    tiny_checkpoint: Callable[[str], Path], served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tiny_checkpoint("qwen3_moe"))
    overrides = ["--set", "engine.max_batch_size=3", "--set", "memory.device_gib=2"]
    assert main(["run", name, "--dry-run", *overrides]) == 0
    convert, serve = capsys.readouterr().out.splitlines()[-2:]
    assert convert.split()[:2] == ["moe", "convert"]
    assert convert.endswith("--bits 8")
    assert "--set engine.max_batch_size=3 --set memory.device_gib=2" in serve
    assert serve.endswith(f"--served-model-name {Path(name).name}")
    assert not served


def test_the_command_that_is_shown_sets_what_the_user_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineSpeeds, "steps", lambda *_: Bandwidths(1e10, 1e9))
    values = ["memory.device_gib=null", "lossless=false", "generation.temperature=1.0e-7"]
    values += ["routing.policies=[top_k:2, top_p:0.5]", "server.page=true"]
    overrides = [part for value in values for part in ("--set", value)]
    demo = str(Path(__file__).parents[3] / "examples" / "demo-model")
    assert main(["run", demo, "--dry-run", *overrides]) == 0
    shown = shlex.split(capsys.readouterr().out.splitlines()[-1])
    given = [value for flag, value in itertools.pairwise(shown) if flag == "--set"]
    profiles = [load_profile(None, parse_assignments(each)).profile for each in (given, values)]
    assert profiles[0] == profiles[1]


def test_a_hub_model_is_converted_from_there_and_found_again_without_it(
    hub: FakeHub, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("qwen3_moe").save_pretrained(hub.repository("org/tiny"), max_shard_size="100KB")
    assert main(["run", "org/tiny", "--yes"]) == 0
    assert " from the hub, writes " in capsys.readouterr().err
    store, *_, names = served.pop()
    assert names == ["org/tiny"]
    assert not (hub.root.parent / "cache").exists()
    assert main(["run", "org/tiny"]) == 0
    assert served.pop()[0] == store
    hub.down = True
    assert main(["run", "org/tiny"]) == 0
    assert served.pop()[0] == store
    assert main(["run", "org/other"]) == 2


def test_a_gguf_file_is_converted_and_served(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny-F16.gguf"
    write_model(tiny_model("qwen3_moe"), file, lambda _: "F16")
    assert main(["run", str(file), "--yes"]) == 0
    assert "GGUF file, " in capsys.readouterr().err
    assert is_store(Path(served[0][0]))
    assert served[0][-1] == ["tiny-F16"]
