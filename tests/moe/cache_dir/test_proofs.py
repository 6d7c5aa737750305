"""Kept proofs: a load that recalls them goes the ways of one that proves, and any change proves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.models.tiny import moe_architectures, tiny_model
from moe import MoE, machine
from moe.cache_dir import files, proofs
from moe.cache_dir.proofs import Proofs, outline, proof_key
from moe.cli import build_parser, main
from moe.commands.subcommands import load_settings
from moe.describe import probe
from moe.describe.description import NotDescribed
from moe.errors import MoEError
from moe.settings import Profile
from moe.settings.profile import load_profile

TODAY = f"proven on {date.today().isoformat()}"
NOW = "proven now"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of proofs of this test."""
    monkeypatch.setenv(files.ENVIRONMENT, str(tmp_path / "proofs"))
    return tmp_path / "proofs"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_moe").save_pretrained(path)
    return path


def ways(path: Path, **overrides: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
    """When a model's ways were proven, all else of its status, and logits."""
    model = MoE.from_pretrained(path, **overrides)
    status = model.status()
    found = status.pop("proofs"), status, model.logits(TOKENS)
    model.close()
    return found


def change_byte(file: Path, position: int) -> None:
    """Change a byte; size and time of the file stay."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(position)
        (byte,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_second_load_recalls_all_and_goes_the_same_ways(
    checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ways(checkpoint, model={"proof_cache": False})
    assert not store.exists()
    first = ways(checkpoint)
    assert store.stat().st_mode & 0o777 == 0o700

    def nothing(*_: object) -> None:
        raise AssertionError("proven again")

    for place in ("moe.decode.enable.prove", "moe.describe.probe._probe"):
        monkeypatch.setattr(place, nothing)
    monkeypatch.setattr("moe.memory.footprint._measured", nothing)
    second = ways(checkpoint)
    assert (plain[0], first[0], second[0]) == (NOW, NOW, TODAY)
    assert plain[1] == first[1] == second[1]
    assert torch.equal(plain[2], first[2])
    assert torch.equal(first[2], second[2])


def test_a_changed_weight_proves_anew(checkpoint: Path, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(checkpoint, path)
    assert ways(checkpoint)[0] == NOW
    assert ways(path)[0] == TODAY  # the same bytes in another place
    change_byte(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1)
    assert ways(path)[0] == NOW


def _byte_of_code(root: Path, path: Path) -> None:
    change_byte(root / "kernels" / "cpu" / "decode.h", 100)


def _setting(root: Path, path: Path) -> Profile:
    return load_profile(None, {"engine.fused": "off"}).profile


def _configuration(root: Path, path: Path) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))


CHANGES: dict[str, Callable[[Path, Path], Profile | None]] = {
    "code": _byte_of_code,
    "setting": _setting,
    "configuration": _configuration,
    "weight": lambda _, path: change_byte(path / "model.safetensors", 50_000),
    "environment": lambda *_: os.environ.update(MKL_CBWR="COMPATIBLE"),
    "library": lambda *_: None,
    "threads": lambda *_: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("whole", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("what", CHANGES)
def test_each_change_gives_another_key(
    what: str, whole: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, path, threads = tmp_path / "code", tmp_path / "model", torch.get_num_threads()
    shutil.copytree(Path(__file__).parents[3] / "kernels", root / "kernels")
    shutil.copytree(checkpoint, path)
    monkeypatch.setattr(files, "code_digest", lambda: machine.code_digest(root))
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    if not whole:  # and between the samples
        monkeypatch.setattr(proofs, "WHOLE_BYTES", 0)
        monkeypatch.setattr(proofs, "_SAMPLES", 1)
    before = proof_key(path, Profile())
    assert proof_key(path, Profile()) == before
    if what == "library":
        monkeypatch.setattr(files, "_version", lambda name: f"{name} of tomorrow")
    try:
        profile = CHANGES[what](root, path)
        assert proof_key(path, profile or Profile()) != before
    finally:
        torch.set_num_threads(threads)


def test_what_no_proof_depends_on_changes_no_key(checkpoint: Path) -> None:
    asked = {"generation.temperature": 0.5, "server.max_waiting": 3}
    other = load_profile(None, asked).profile
    assert proof_key(checkpoint, other) == proof_key(checkpoint, Profile())


def test_ranks_have_verdicts_of_their_own_whatever_memory_is_free(checkpoint: Path) -> None:
    shares = [load_profile(None, {"memory.device_gib": gib}).profile for gib in (1.0, 2.0)]
    alone, of_two, of_four = (
        {proof_key(checkpoint, share, ranks) for share in shares} for ranks in (1, 2, 4)
    )
    assert (len(alone), len(of_two), len(of_four)) == (2, 1, 1)
    assert len(alone | of_two | of_four) == 4


def test_a_gpu_has_verdicts_of_its_own(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, keys = torch.device("cuda", 0), {proof_key(checkpoint, Profile())}
    chip = {"major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 2**37}
    for changed in ({}, {"multi_processor_count": 114}, {"name": "another"}):
        found = SimpleNamespace(**{"name": "H200", **chip, **changed})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        keys.add(proof_key(checkpoint, Profile(), device=gpu))
    assert len(keys) == 4


def test_memory_that_runs_out_is_no_verdict(
    checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, failing = probe._logits, [torch.OutOfMemoryError("of the moment")]

    def short(*args: Any, packed: bool) -> Any:
        if packed and failing:
            raise failing.pop()
        return logits(*args, packed=packed)

    monkeypatch.setattr(probe, "_logits", short)
    first, second, third = (ways(checkpoint) for _ in range(3))
    assert "of the moment" in str(first[1]["packing"])
    assert (second[0], second[1]["packing"]["enabled"], third[0]) == (NOW, True, TODAY)


def test_a_refusal_is_kept_and_other_errors_are_not(tmp_path: Path) -> None:
    def refuse(error: Exception) -> str:
        raise error

    def asked(loaded: Proofs, prove: Callable[[], str]) -> str:
        return loaded.recall("step", [1], str, prove, NotDescribed)

    file = tmp_path / "key.json"
    for error in (ValueError("by chance"), NotDescribed("layer 3 differs")):
        first = Proofs("key", file)
        with pytest.raises(type(error)):
            asked(first, lambda error=error: refuse(error))  # type: ignore[misc]
        first.keep()
        again = Proofs("key", file)
        if isinstance(error, NotDescribed):
            with pytest.raises(NotDescribed, match="layer 3 differs"):
                asked(again, lambda: "equal")
        else:
            assert asked(again, lambda: "equal") == "equal"
            assert again.status == NOW


def test_a_verdict_counts_for_its_subject_and_turn_only(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    first = Proofs("key", file)
    assert first.recall("step", "model", bool, lambda: True)
    assert not first.recall("step", "model", bool, lambda: False)  # its drafting layer
    first.keep()
    again = Proofs("key", file)
    assert again.recall("step", "model", bool, lambda: False)
    assert not again.recall("step", "model", bool, lambda: True)
    assert again.status == TODAY
    assert again.recall("step", "model", bool, lambda: True)
    assert again.recall("step", "other", str, lambda: "x") == "x"
    assert again.status == NOW


def _entry(file: Path) -> bytes:
    proven = Proofs("key", file)
    proven.recall("step", [1], str, lambda: "kept")
    proven.keep()
    return file.read_bytes()


def test_damaged_entries_are_proven_anew(tmp_path: Path) -> None:
    """With any byte changed, the verdict is the one that was kept, or it is asked for again."""
    file = tmp_path / "key.json"
    content = _entry(file)
    for position in range(len(content)):
        for damage in (b"\x00", bytes([content[position] ^ 1])):
            file.write_bytes(content[:position] + damage + content[position + 1 :])
            assert Proofs("key", file).recall("step", [1], str, lambda: "new") in ("kept", "new")
    for end in range(len(content)):
        file.write_bytes(content[:end])
        assert Proofs("key", file).recall("step", [1], str, lambda: "new") == "new"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"key": "other"},
        {"sum": ""},
        {"content": []},
        {"time": "yesterday"},
        {"time": 1.0},
    ],
    ids=str,
)
def test_entries_of_others_count_for_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(json.loads(_entry(file)) | change))
    assert Proofs("key", file).recall("step", [1], str, lambda: "new") == "new"


def test_a_directory_that_others_can_write_to_is_not_used(checkpoint: Path, store: Path) -> None:
    store.mkdir(mode=0o700)
    store.chmod(0o770)
    assert [ways(checkpoint)[0] for _ in range(2)] == [NOW, NOW]
    assert not list(store.iterdir())


def test_files_of_another_user_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.json"
    _entry(file)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert Proofs("key", file).recall("step", [1], str, lambda: "new") == "new"


def test_there_are_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    for number in range(5):
        _entry(tmp_path / f"{number}.json")
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert len(list(tmp_path.iterdir())) <= 3
    proven = Proofs("key", tmp_path / "large.json")
    proven.recall("step", [1], str, lambda: "x" * files.MOST_BYTES)
    proven.keep()
    assert not (tmp_path / "large.json").exists()


def test_a_way_that_is_refused_is_not_gone_after_a_recall(
    checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that fails is recalled as one: the way stays closed."""
    with monkeypatch.context() as patch:
        patch.setattr(probe, "difference", lambda *_: 1.0)
        first = ways(checkpoint)
    second = ways(checkpoint)
    assert second[0] == TODAY
    assert first[1] == second[1]
    assert not second[1]["packing"]["enabled"]


def test_doctor_forgets(checkpoint: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways(checkpoint)
    assert main(["doctor", "--forget"]) == 0
    assert capsys.readouterr().out == f"forgot 1 proofs and trials in {store}\n"
    assert not list(store.iterdir())


def test_the_command_can_do_without() -> None:
    options = build_parser().parse_args(["serve", "x", "--no-proof-cache"])
    assert not load_settings(options).profile.model.proof_cache


def test_outlines_have_no_addresses() -> None:
    part = {"a": [torch.zeros(2, 3), torch.nn.Linear(2, 3), None, {3, 4}, outline, object()]}
    assert json.dumps(outline(part)) == json.dumps(outline(part))
    assert "0x" not in json.dumps(outline(part))


@pytest.mark.deep
@pytest.mark.parametrize("model_type", moe_architectures())
def test_loads_with_and_without_go_the_same_ways(
    model_type: str, tmp_path: Path, store: Path
) -> None:
    """Of each architecture one load that keeps nothing, one that keeps and one that recalls: more
    than 100 in all."""
    path = tmp_path / "model"
    tiny_model(model_type).save_pretrained(path)
    try:
        plain = ways(path, model={"proof_cache": False})
    except MoEError as error:
        with pytest.raises(type(error)):
            ways(path)
        return
    first, second = ways(path), ways(path)
    assert second[0] == TODAY
    assert plain[1] == first[1] == second[1]
    assert torch.equal(plain[2], second[2])
