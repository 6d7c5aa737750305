"""Calibration end to end, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import MoE
from moe.calibration.files import (
    CALIBRATION_FOLDER,
    MANIFEST_FILE,
    PREDICTORS_FILE,
    TRACE_FILE,
    CalibrationManifest,
    FittedPredictors,
    load_calibration,
    load_trace,
    save_calibration,
)
from moe.cli import main
from moe.commands.calibrate.calibrate import LEAST_TOKENS, calibrate_model, token_vectors
from moe.commands.calibrate.fit import HELD_OUT_EVERY
from moe.commands.calibrate.record import record_trace
from moe.errors import CalibrationError
from moe.kv.visibility import VISIBILITIES
from routing import Routing
from routing.predict.calibrated import PREDICTORS

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/demo-model"
TEXT = (ROOT / "routing/routing.py").read_text() + (ROOT / "moe/model.py").read_text()


@pytest.fixture(scope="module")
def demo() -> MoE:
    return MoE.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration made by the command."""
    path = tmp_path_factory.mktemp("calibration")
    (path / "text").write_text(TEXT)
    arguments = ["--text", str(path / "text"), "--tokens", "4000", "--out", str(path / "out")]
    assert main(["calibrate", str(DEMO), *arguments]) == 0
    return path / "out"


def experts(model: MoE) -> list[int]:
    return [layer.num_experts for layer in model.experts.layers]


@pytest.mark.deep
def test_every_predictor_of_the_shipped_model_guesses_better_than_chance(
    demo: MoE, folder: Path
) -> None:
    calibrated = load_calibration(folder, demo.config, experts(demo))
    assert calibrated.weights.keys() == PREDICTORS.keys()
    text = (ROOT / "tests/data/heldout_python.txt").read_text()[:3000]
    trace = record_trace(demo.backbone, demo.experts, [demo.codec.encode(text)[:400]])
    assert trace.rows is not None
    for name in PREDICTORS:
        predictor = calibrated.predictor(name)
        recalls = []
        for row in range(20, 400, 8):
            predictor.start(trace.contexts(predictor.context)[row : row + 1])
            for layer in range(6):
                forecast = predictor.forecast(layer - 1, 1).validate(experts(demo))
                ids = trace.expert_ids[layer][row].tolist()
                if len(forecast):
                    recalls.append(len(set(ids) & set(forecast.expert[:4].tolist())) / 4)
                routing = Routing(torch.tensor([ids]), torch.ones(1, 4))
                predictor.observe(layer, trace.rows.expert_inputs[layer][row : row + 1], routing)
        recall = sum(recalls) / len(recalls)
        assert recall > (0.65 if name == "ensemble" else 0.3), (name, recall)  # chance: 0.125


def test_the_trace_comes_back(demo: MoE, folder: Path) -> None:
    trace = load_trace(folder, demo.config, experts(demo))
    assert (
        trace.num_tokens
        == sum(trace.lengths)
        == json.loads((folder / MANIFEST_FILE).read_text())["tokens"]
    )
    tokens, layers = next(trace.sequences())
    alone = record_trace(demo.backbone, demo.experts, [tokens.tolist()])
    agreed = torch.stack([a == b for a, b in zip(alone.expert_ids, layers, strict=True)])
    assert float(agreed.float().mean()) > 0.99


NEEDS_HEADS = pytest.mark.skipif(
    "heads" not in VISIBILITIES.names(), reason="the method that scores heads is not there"
)


@NEEDS_HEADS
def test_key_heads_that_look_up_earlier_text_have_the_highest_scores(folder: Path) -> None:
    manifest = CalibrationManifest.model_validate_json((folder / MANIFEST_FILE).read_text())
    scores = {
        (layer, head): score
        for layer, own in manifest.head_scores.items()
        for head, score in enumerate(own)
    }
    assert set(sorted(scores, key=scores.__getitem__)[-2:]) == {(3, 0), (4, 0)}


@NEEDS_HEADS
def test_a_model_loads_with_the_key_heads_that_look_up_the_most(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    shutil.copytree(folder, tmp_path / "model" / CALIBRATION_FOLDER)
    settings = {"lossless": False, "memory.kv_policy": "heads:256:2"}
    with MoE.from_pretrained(tmp_path / "model", settings) as model:
        status = model.status()["keys_and_values"]
        assert status["policy"] == "heads:256:2"
        assert "attend by heads:256:2, equal to trans" in status["why"]
        assert model.memory_plan.kv_policy is not None
        assert model.memory_plan.kv_policy.share == pytest.approx(1 / 6)  # rows fill pages
        kept = model.memory_plan.kv_bytes(2048) / model.memory_plan.kv_bytes_per_token
        assert kept == pytest.approx(2048 / 6 + 320 * 5 / 6, abs=1)


def test_only_what_is_asked_for_is_read(demo: MoE, folder: Path) -> None:
    calibrated = load_calibration(folder, demo.config, experts(demo), ["token_table"])
    assert calibrated.sources.keys() == calibrated.weights.keys() == {"token_table"}


@pytest.mark.parametrize("file", [PREDICTORS_FILE, TRACE_FILE, MANIFEST_FILE])
def test_a_full_disk_costs_the_new_calibration_and_not_the_old(
    demo: MoE, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    begin = {path.name: path.read_bytes() for path in folder.iterdir()}
    trace = load_trace(old, demo.config, experts(demo))
    fitted = FittedPredictors(load_calibration(old, demo.config, experts(demo)), {})
    opened = Path.open

    def full(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(CalibrationError, match="No space left on device"):
            save_calibration(old, demo.config, "text", trace, fitted)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == begin
    save_calibration(old, demo.config, "text", trace, fitted)
    assert load_trace(old, demo.config, experts(demo)).num_tokens == trace.num_tokens


def test_what_an_older_calibration_left_for_the_cache_is_ignored(
    demo: MoE, folder: Path, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    shutil.copytree(folder, older)
    (older / "next_use.safetensors").write_bytes(b"not read")
    about = json.loads((older / MANIFEST_FILE).read_text())
    about["files"]["next_use.safetensors"] = "0" * 64
    (older / MANIFEST_FILE).write_text(json.dumps(about))
    calibrated = load_calibration(older, demo.config, experts(demo), ["token_table"])
    assert calibrated.sources.keys() == {"token_table"}


def test_a_calibration_of_another_model_is_refused(
    folder: Path, tiny_moe: Callable[[str], MoE]
) -> None:
    other = tiny_moe("qwen3_moe")
    with pytest.raises(CalibrationError, match=r"made for another model \(Qwen3MoeForCausalLM, 6"):
        load_calibration(folder, other.config, experts(other))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            MANIFEST_FILE,
            lambda data: data.replace(b'"version":', b'"defalt_version":'),
            "cannot be used: defalt_version",
        ),
        (MANIFEST_FILE, lambda data: data[:200], "cannot be used: it: Invalid JSON"),
        (MANIFEST_FILE, None, f"has no {MANIFEST_FILE}: run moe calibrate"),
        (PREDICTORS_FILE, lambda data: data[:-7] + b"1234567", "is not the file that"),
        (PREDICTORS_FILE, None, "cannot be read: .*No such file"),
    ],
)
def test_damaged_files_are_refused(
    demo: MoE,
    folder: Path,
    tmp_path: Path,
    file: str,
    change: Callable[[bytes], bytes] | None,
    message: str,
) -> None:
    for source in folder.iterdir():
        data = source.read_bytes()
        if source.name == file and change is None:
            continue
        changed = change(data) if source.name == file and change is not None else data
        (tmp_path / source.name).write_bytes(changed)
    with pytest.raises(CalibrationError, match=message):
        load_calibration(tmp_path, demo.config, experts(demo))


@pytest.mark.parametrize(
    ("text", "tokens", "message"),
    [
        ("", 5000, "the text is empty"),
        (" \n ", 5000, "the text is empty"),
        ("def f(): pass\n" * 5, 5000, rf"gives \d+ tokens .* needs at least {LEAST_TOKENS}"),
        (TEXT, 100, rf"--tokens is 100\) and calibration needs at least {LEAST_TOKENS}"),
    ],
)
def test_too_little_text_is_refused(demo: MoE, text: str, tokens: int, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibrate_model(demo, text, tokens=tokens)


@pytest.mark.parametrize("tokens", [LEAST_TOKENS, LEAST_TOKENS + 200])
def test_a_long_text_gives_enough_sequences_however_few_tokens_are_read(
    demo: MoE, tokens: int
) -> None:
    trace, _ = calibrate_model(demo, TEXT * 4, tokens=tokens)
    assert trace.num_tokens == tokens
    assert len(trace.lengths) >= HELD_OUT_EVERY


def test_an_absent_text_and_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MoE, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["calibrate", str(DEMO), "--text", str(tmp_path / "absent")]) == 2
    assert "cannot read the text" in capsys.readouterr().err
    (tmp_path / "text").write_text("some text")
    some = ["calibrate", str(DEMO), "--text", str(tmp_path / "text"), "--compression", "0"]
    assert main(some) == 2
    assert "--compression must be at least 1 token, got 0" in capsys.readouterr().err
    place = ["--out", str(tmp_path / "text" / "below")]
    assert main(["calibrate", str(DEMO), "--text", str(tmp_path / "text"), *place]) == 2
    assert "cannot write the calibration to" in capsys.readouterr().err


def test_a_run_that_fails_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("too short")
    shutil.copytree(DEMO, tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    for place in ([], ["--out", str(tmp_path / "new/folder")]):
        command = ["calibrate", str(tmp_path / "model"), "--text", str(tmp_path / "text"), *place]
        assert main(command) == 2
        assert "calibration needs at least" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_what_a_stopped_run_leaves_is_no_calibration_to_moe_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest is written last."""
    shutil.copytree(DEMO, tmp_path / "model")
    beside = tmp_path / "model" / CALIBRATION_FOLDER
    beside.mkdir()
    (beside / PREDICTORS_FILE).write_bytes(b"cut off")
    assert main(["plan", str(tmp_path / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["routing"].startswith("every expert taken")


def test_activations_that_are_not_finite_are_refused_with_numbers(
    demo: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = demo.experts.run

    def damaged(layer, visits):  # type: ignore[no-untyped-def]
        if layer == 2:
            return [torch.full_like(visit.hidden_states, torch.nan) for visit in visits]
        return run(layer, visits)

    monkeypatch.setattr(demo.experts, "run", damaged)
    with pytest.raises(
        CalibrationError, match=r"MoE layer 3: 30 of 30 rows are not finite after 0"
    ):
        record_trace(demo.backbone, demo.experts, [list(range(30))])


def test_token_vectors_keep_what_differs_most() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 3, generator=generator) @ torch.randn(3, 20, generator=generator)
    vectors = token_vectors(torch.nn.Embedding.from_pretrained(table), 8)
    assert vectors.shape == (50, 8)
    distances, kept = (torch.cdist(rows, rows) for rows in (table, vectors))
    assert float(torch.corrcoef(torch.stack([distances.flatten(), kept.flatten()]))[0, 1]) > 0.99
    assert float(vectors[:, 3:].abs().max()) < 1e-3
    assert bool((token_vectors(torch.nn.Embedding(9, 4), 8)[:, 4:] == 0).all())
