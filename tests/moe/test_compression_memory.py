"""What compression holds in memory: a few whole experts, wherever the model's experts are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.manifest import read_manifest
from kernels import ExpertWeights
from moe import MoE
from moe.calibration.trace import Trace
from moe.commands.calibrate import compression as pieces
from moe.commands.calibrate import compression as sensitivity
from moe.commands.calibrate.compression import LayerSensitivity, analyse, load_statistics, spread
from moe.commands.calibrate.record import record_trace
from moe.commands.convert.convert import convert
from moe.commands.evaluate.scoring import Score, read
from moe.errors import CalibrationError
from moe.loading.memory_plan import GIB
from moe.settings import ModelSettings
from offload.capacity import fixed_bytes, slot_bytes
from offload.layer import OffloadedExperts

SMALL: dict[str, Any] = {"kv_tokens": 1024, "reserve_gib": 0.0}
PREFILL: dict[str, Any] = {"wave_tokens": 128, "mode": "whole"}


@pytest.fixture(scope="module", params=[8, 16])
def store(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    settings = ModelSettings(expert_bits=request.param, group_size=32)
    return convert(
        tiny_checkpoint("qwen3_moe"), tmp_path_factory.mktemp("stores") / "store", settings
    )


@pytest.fixture(scope="module")
def resident(store: Path) -> MoE:
    return MoE.from_pretrained(store, {"memory": SMALL, "prefill": PREFILL})


@pytest.fixture(scope="module")
def on_disk(store: Path, resident: MoE) -> MoE:
    """With room for a quarter of the experts."""
    manifest = read_manifest(store)
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    room = 8 * slot_bytes(manifest, manifest.bits) + fixed_bytes(manifest) + 16
    memory = SMALL | {"device_gib": (rest + room) / GIB}
    model = MoE.from_pretrained(store, {"memory": memory, "prefill": PREFILL})
    assert all(isinstance(layer, OffloadedExperts) for layer in model.experts.layers)
    return model


@pytest.fixture(scope="module")
def trace(resident: MoE) -> Trace:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, resident.config.vocab_size, (6, 100), generator=generator)
    return record_trace(resident.backbone, resident.experts, ids.tolist())


@pytest.mark.deep
def test_experts_on_disk_are_measured_as_those_in_memory(
    resident: MoE, on_disk: MoE, trace: Trace, tmp_path: Path
) -> None:
    found = []
    for name, model in (("resident", resident), ("on disk", on_disk)):
        assert trace.rows is not None
        own = record_trace(model.backbone, model.experts, spread(trace, trace.num_tokens))
        analyse(model, own, tmp_path / name, read_tokens=100, group_size=32)
        found.append(load_statistics(tmp_path / name, len(model.experts.layers)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.error_EW, other.error_EW)
        assert torch.equal(one.kl_W, other.kl_W)


def test_pieces_are_the_layer(resident: MoE, on_disk: MoE, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts at a time, the last piece smaller."""
    one = on_disk.experts.layers[1]
    monkeypatch.setattr(
        pieces, "PIECE_WEIGHTS", 3 * 3 * one.hidden_size * one.intermediate_size + 1
    )
    whole = pieces.copied_experts(resident.experts.layers[1], range(8))
    for model in (resident, on_disk):
        found = list(pieces.pieces(model.experts.layers[1]))
        assert [len(ids) for ids, _ in found] == [3, 3, 2]
        assert torch.equal(torch.cat([own.gate_up_EGH for _, own in found]), whole.gate_up_EGH)
        assert torch.equal(torch.cat([own.down_EHF for _, own in found]), whole.down_EHF)


def test_one_piece_is_in_memory_at_a_time(
    on_disk: MoE, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all layers: what is whole does not add up."""
    taken: list[weakref.ref[ExpertWeights]] = []
    monkeypatch.setattr(pieces, "PIECE_WEIGHTS", 1)
    take = pieces.copied_experts

    def spy(layer: Any, experts: Sequence[int]) -> ExpertWeights:
        assert sum(one() is not None for one in taken) <= 1, "the piece before, at most"
        own = take(layer, experts)
        assert own.num_experts == 1
        taken.append(weakref.ref(own))
        return own

    monkeypatch.setattr(pieces, "copied_experts", spy)
    analyse(on_disk, trace, tmp_path, read_tokens=100, group_size=32)
    assert len(taken) == 4 * 8


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_versions_side_by_side_lose_what_they_lose_alone(
    resident: MoE, on_disk: MoE, trace: Trace, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """Whether there is room for what the original's experts gave, for some of it, or none."""
    monkeypatch.setattr(sensitivity, "LANE_TOKENS", 600)
    versions = [pieces.copied_experts(resident.experts.layers[other], range(8)) for other in (1, 2)]
    windows = spread(trace, 300)
    expected = []
    for version in versions:
        score = Score()
        for window in windows:
            score.add(read(resident, window, {layer: version}), read(resident, window))
        expected.append(score.difference().kl)
    for room, model in product((1 << 28, 100_000, 0), (resident, on_disk)):
        monkeypatch.setattr(sensitivity, "KEPT_BYTES", room)
        original = LayerSensitivity(model, windows)
        for _ in range(2):
            found = original.losses(layer, versions)
            assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_experts_before_a_layer_run_once(
    resident: MoE, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LayerSensitivity(resident, spread(trace, 300))
    original.losses(0, [])
    run, layers = resident.experts.run, []

    def spy(layer: int, visits: Sequence[Any]) -> Any:
        layers.append((layer, len(visits)))
        return run(layer, visits)

    monkeypatch.setattr(resident.experts, "run", spy)
    coarse = pieces.copied_experts(resident.experts.layers[1], range(8))
    original.losses(2, [coarse, coarse])
    assert layers == [(3, 2 * len(original._windows))]


def test_rounding_does_not_make_a_loss_negative(
    resident: MoE, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "divergence", lambda *_: -1e-9)
    same = pieces.copied_experts(resident.experts.layers[1], range(8))
    assert LayerSensitivity(resident, spread(trace, 100)).losses(1, [same]).tolist() == [0.0]


def test_losses_that_are_not_finite(
    resident: MoE, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LayerSensitivity, "losses", lambda *_: torch.tensor([0.1, torch.nan, 0.0]).double()
    )
    with pytest.raises(
        CalibrationError,
        match=r"MoE layer 0: what it loses at \(2, 3, 4, 8\) bits is not finite \(KL \[0\.1.*nan",
    ):
        analyse(resident, trace, tmp_path, read_tokens=100, group_size=32)
    assert not list(tmp_path.rglob("*.safetensors"))
