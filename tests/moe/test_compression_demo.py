"""The shipped model calibrated, converted under a budget of bits, loaded and asked, by command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experts.manifest import read_manifest
from kernels import QuantizedExperts
from moe import MoE
from moe.calibration.files import PREDICTORS_FILE
from moe.cli import main
from moe.commands.calibrate.compression import LayerSensitivity, layer_path
from moe.commands.convert.inspect_store import bit_map, expert_bytes
from moe.sampling.params import SamplingParams

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "examples/demo-model")
TEXT = str(ROOT / "tests/data/heldout_prose.txt")
BF16 = 6 * 32 * 3 * 256 * 128 * 2
"""Bytes of its experts as they are shipped."""


def calibrate(folder: Path) -> int:
    sizes = ["--tokens", "1200", "--compression", "100"]
    return main(["calibrate", DEMO, "--text", TEXT, *sizes, "--out", str(folder)])


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration") / "of-demo"
    assert calibrate(folder) == 0
    return folder


def test_a_store_within_its_bits(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bits = 2.54
    store = tmp_path / "store"
    about = ["--calibration", str(calibration), "--target-bits", str(bits)]
    assert main(["convert", DEMO, str(store), *about]) == 0
    manifest = read_manifest(store).without_drafts()
    budget = bits / 16 * BF16
    assert 0.99 * budget < sum(expert_bytes(manifest)) <= budget
    assert sum(expert_bytes(manifest)) <= (1 - 0.83) * BF16
    widths = [width for layer in bit_map(manifest) for width in layer]
    assert {2, 3} <= set(widths) <= {2, 3, 4, 8}
    assert main(["inspect", str(store)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{bits:.2f} bits a weight, scales included" in shown
    assert f"{100 - 100 * bits / 16:.1f} % smaller than bfloat16" in shown

    model = MoE.from_pretrained(store)
    layers = [layer for layer in model.experts.layers if isinstance(layer, QuantizedExperts)]
    assert [layer.bits_of(e) for layer in layers for e in range(32)] == widths
    (answer,) = model.generate("The old house", SamplingParams(max_new_tokens=8))
    assert len(answer.token_ids) == 8


def test_a_run_that_was_stopped_goes_on(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictors are not fitted again, and layers that are there are not measured again."""
    layers = [layer_path(calibration, layer) for layer in range(6)]
    before = [path.read_bytes() for path in layers]
    for path in layers[4:]:
        path.unlink()
    measured: list[int] = []
    losses = LayerSensitivity.losses

    def spy(self: LayerSensitivity, layer: int, versions: Any) -> Any:
        measured.append(layer)
        return losses(self, layer, versions)

    monkeypatch.setattr(LayerSensitivity, "losses", spy)
    monkeypatch.setattr("moe.commands.calibrate.calibrate.fit_predictors", None)
    assert calibrate(calibration) == 0
    assert measured == [4, 5]
    assert [path.read_bytes() for path in layers] == before
    (calibration / PREDICTORS_FILE).write_bytes(b"")  # damaged: it is fitted again
    with pytest.raises(TypeError, match="NoneType"):
        calibrate(calibration)
