"""From a calibration to a store whose experts have the bits that they deserve."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from experts.manifest import StoreError, read_manifest
from kernels import QuantizedExperts
from moe import MoE
from moe.calibration.trace import Trace
from moe.cli import main
from moe.commands.calibrate.compression import (
    analyse,
    layer_inputs,
    layer_path,
    load_statistics,
    pieces,
)
from moe.commands.calibrate.record import record_trace
from moe.commands.convert import bit_allocation
from moe.commands.convert.bit_allocation import BitBudget
from moe.commands.convert.convert import convert
from moe.commands.convert.inspect_store import bit_map, draw, expert_bytes, layer_names
from moe.commands.evaluate.scoring import read
from moe.errors import CalibrationError, CheckpointError, ProfileError
from moe.network.seam import experts_modules
from moe.settings import ModelSettings
from offload.capacity import why_not
from tests.moe.speculate.mtp_models import with_mtp

SETTINGS = ModelSettings(group_size=32)


@pytest.fixture(scope="module")
def folder(model: MoE, trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration")
    analyse(model, trace, path, read_tokens=200, group_size=32)
    return path


@pytest.fixture
def _any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who a calibration belongs to is another test's matter."""
    monkeypatch.setattr(bit_allocation, "load_manifest", lambda *_: None)


@pytest.mark.parametrize("budget", ["nan", "inf", "-1", "0"])
def test_a_budget_is_a_finite_number(
    budget: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, unit in (("--target-bits", "bits"), ("--target-gib", "GiB")):
        assert main(["convert", str(path), str(tmp_path / "store"), option, budget]) == 2
        said = capsys.readouterr().err
        assert said == f"moe: the budget is {budget} {unit}; it must be a finite number above 0\n"


def test_coarser_layers_lose_more(model: MoE, folder: Path) -> None:
    layers = load_statistics(folder, len(model.experts.layers))
    for layer in layers:
        assert layer.kl_W[0] > layer.kl_W[1] > layer.kl_W[2] > layer.kl_W[3]
        assert (layer.error_EW[:, 0] > layer.error_EW[:, 1]).all()
        assert layer.frequency_E.sum() == pytest.approx(model.config.num_experts_per_tok)


def test_a_stopped_analysis_goes_on(
    model: MoE, trace: Trace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are there are not measured again, one that is damaged is."""
    before = [layer_path(folder, layer).read_bytes() for layer in range(2)]
    layer_path(folder, 1).write_bytes(before[1][:-8])
    measured: list[int] = []

    def spy(experts: Any) -> Any:
        measured.append(model.experts.layers.index(experts))
        return pieces(experts)

    monkeypatch.setattr("moe.commands.calibrate.compression.pieces", spy)
    analyse(model, trace, folder, read_tokens=200, group_size=32)
    assert measured == [1]
    assert [layer_path(folder, layer).read_bytes() for layer in range(2)] == before


def test_experts_with_few_tokens_are_named(model: MoE, trace: Trace, tmp_path: Path) -> None:
    short = record_trace(model.backbone, model.experts, [trace.token_ids[:60].tolist()])
    notices = analyse(model, short, tmp_path, read_tokens=60, group_size=32)
    assert len(notices) == len(model.experts.layers)
    assert notices[0].startswith("layer 0: 8 experts have fewer than 128 tokens and are rounded")


@pytest.mark.usefixtures("_any_model")
def test_a_budget_is_kept_and_spent(path: Path, folder: Path, tmp_path: Path) -> None:
    store = convert(path, tmp_path / "s", SETTINGS, calibration=folder, budget=BitBudget(bits=5.5))
    manifest = read_manifest(store)
    bits = [width for layer in bit_map(manifest) for width in layer]
    assert {2, 3} <= set(bits) <= {2, 3, 4, 8}
    sizes = [layer.experts * layer.hidden * layer.intermediate * 3 for layer in manifest.layers]
    assert 5.2 < 8 * sum(expert_bytes(manifest)) / sum(sizes) <= 5.5
    assert manifest.bits == max(bits)
    loaded = MoE.from_pretrained(store)
    layers = quantized(loaded)
    assert [layer.bits_of(e) for layer in layers for e in range(layer.num_experts)] == bits
    assert any(notice.startswith("experts run at 2 or 3") for notice in loaded.notices)
    (planned,) = (line.bytes for line in loaded.memory_plan.lines if line.name == "experts")
    assert planned == sum(blob.nbytes for layer in layers for blob in blobs(layer))
    coarse = MoE.from_pretrained(store, model={"expert_bits": 2})
    assert {layer.bits_of(0) for layer in quantized(coarse)} == {2}
    assert why_not(manifest) == ""


def quantized(model: MoE) -> list[QuantizedExperts]:
    layers = [layer for layer in model.experts.layers if isinstance(layer, QuantizedExperts)]
    assert len(layers) == len(model.experts.layers)
    return layers


def blobs(layer: QuantizedExperts) -> list[torch.Tensor]:
    return [*(plane for planes in layer.planes for plane in planes), *layer.scales]


@pytest.mark.usefixtures("_any_model")
def test_more_bits_are_closer_to_the_original(
    path: Path, folder: Path, tmp_path: Path, model: MoE
) -> None:
    ids = list(range(3, 90))
    original, losses = read(model, ids).logprobs_TV, []
    for bits in (3.4, 5.5, 11.3):
        settings = SETTINGS.model_copy(update={"trunk_bits": 16, "head_bits": 16})
        out = tmp_path / f"{bits}"
        store = convert(path, out, settings, calibration=folder, budget=BitBudget(bits=bits))
        other = read(MoE.from_pretrained(store), ids).logprobs_TV
        losses.append(float((original.exp() * (original - other)).sum(-1).mean()))
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.usefixtures("_any_model")
def test_a_calibrated_store_without_a_budget(path: Path, folder: Path, tmp_path: Path) -> None:
    store = convert(path, tmp_path / "store", SETTINGS, calibration=folder)
    assert {layer.bits for layer in read_manifest(store).layers} == {None}
    plain = convert(path, tmp_path / "plain", SETTINGS)
    name = "experts-00000.safetensors"
    assert (store / name).stat().st_size == (plain / name).stat().st_size
    assert (store / name).read_bytes() != (plain / name).read_bytes()


@pytest.mark.usefixtures("_any_model")
def test_what_a_budget_cannot_be(path: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    refused = {
        # these tiny matrices are padded: 3.33 bits a weight for codes of 2
        BitBudget(
            bits=2.4
        ): r"at their fewest bits: between 3\.33 and 11\.3 bits per weight are possible, "
        r"scales included, and the budget is 2\.4",
        BitBudget(gib=1.0): r"the budget is 1,073,741,824 bytes, .* at their most bits",
    }
    for budget, message in refused.items():
        with pytest.raises(CalibrationError, match=message):
            convert(path, out, SETTINGS, calibration=folder, budget=budget)
    with pytest.raises(CalibrationError, match="16 bits are not quantised"):
        convert(path, out, ModelSettings(expert_bits=16), calibration=folder)
    with pytest.raises(CalibrationError, match="needs a calibration: run"):
        convert(path, out, SETTINGS, budget=BitBudget(bits=5.5))
    layer_path(folder, 0).rename(tmp_path / "aside")
    try:
        with pytest.raises(CalibrationError, match="run moe calibrate MODEL --text FILE --compr"):
            convert(path, out, SETTINGS, calibration=folder)
    finally:
        (tmp_path / "aside").rename(layer_path(folder, 0))
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_without_its_description(path: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"has no calibration\.json"):
        convert(path, tmp_path / "store", SETTINGS, calibration=folder)


@pytest.mark.usefixtures("_any_model")
def test_inspect_shows_and_draws_the_bits(
    path: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = convert(
        path, tmp_path / "store", SETTINGS, calibration=folder, budget=BitBudget(bits=5.5)
    )
    image = tmp_path / "bits.png"
    assert main(["inspect", str(store), "--image", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "bits a weight" in shown
    assert "smaller than bfloat16" in " ".join(shown.split())
    with pytest.raises(ProfileError, match="cannot write"):
        draw([[2, 4]], ["0"], tmp_path / "nowhere" / "bits.png")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is no store; moe convert MODEL STORE makes one" in capsys.readouterr().err


def test_inspect_tells_the_layer_that_drafts_from_the_model_s_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, _ = with_mtp("glm4_moe", tmp_path / "model")
    store = convert(tmp_path / "model", tmp_path / "store", ModelSettings(expert_bits=8))
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    assert main(["inspect", str(store), "--image", str(tmp_path / "bits.png")]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    layers = len(experts_modules(network))
    names = [*map(str, range(layers)), "mtp"]
    assert layer_names(read_manifest(store)) == names
    assert re.findall(r"(\d+|mtp) \d+ 8\.00 ", shown) == names
    assert [tick.get_text() for tick in saved[0].axes[0].get_yticklabels()] == names
    sizes = expert_bytes(read_manifest(store))
    assert f"{sum(sizes[:-1]) / 1e9:.2f} GB of experts: " in shown
    assert f"beside them {sizes[-1] / 1e9:.2f} GB of experts that draft (mtp)" in shown


def test_a_manifest_with_bits_that_do_not_fit_is_refused(
    path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bit_allocation, "load_manifest", lambda *_: None)
    monkeypatch.setattr("experts.manifest._digest", lambda _: "")
    store = convert(
        path, tmp_path / "store", SETTINGS, calibration=folder, budget=BitBudget(bits=5.5)
    )
    file = store / "moe-store.json"
    content = json.loads(file.read_text())
    for bits, message in (([2], "1 numbers of bits for 8 experts"), ([8] * 8, "more bits than")):
        content["store"]["layers"][0]["bits"] = bits
        content["store"]["bits"] = 4
        file.write_text(json.dumps(content))
        with pytest.raises(StoreError, match=message):
            read_manifest(store)
    with pytest.raises(CheckpointError, match="more bits than"):
        MoE.from_pretrained(store)


def test_analysis_needs_rows(model: MoE, trace: Trace, tmp_path: Path) -> None:
    bare = record_trace(model.backbone, model.experts, [[3, 4, 5]], row_bytes=0)
    with pytest.raises(CalibrationError, match="needs the rows that experts read"):
        analyse(model, bare, tmp_path)
    assert layer_inputs(trace, 0).hidden_TH.shape[0] == trace.num_tokens


def test_analysis_is_for_the_cpu(
    model: MoE, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.backbone, "device", torch.device("cuda:1"))
    with pytest.raises(CalibrationError, match="the model is on cuda:1: add --set device=cpu"):
        analyse(model, trace, tmp_path)
