"""Looking ahead moves experts nearer and never changes a bit, however wrong it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from experts.manifest import read_manifest
from kernels import experts_forward
from moe import MoE, SamplingParams
from moe.calibration.files import CALIBRATION_FOLDER, save_calibration
from moe.commands.calibrate.calibrate import calibrate_model
from moe.commands.convert.convert import convert
from moe.errors import CalibrationError, ProfileError
from moe.loading.memory_plan import GIB
from moe.network.lanes import ExpertCall
from moe.settings import ModelSettings
from offload.capacity import slot_bytes
from offload.errors import OffloadError
from offload.layer import OffloadedExperts
from offload.prefetch import Prefetcher
from routing import Routing
from routing.predict import Forecast
from tests.amounts import amount
from tests.moe.parallel.test_lockstep import lossy_layers
from tests.offload.test_experts import EXPERTS, HIDDEN, LAYERS

SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 128},
    "engine": {"max_batch_size": 8},
}
PROMPTS = [[20, 7], [5] * 30, [90, 11], [64]]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)
Kind = Literal["random", "inverted", "empty"]


@pytest.fixture(scope="module")
def resident(store: Path) -> MoE:
    return MoE.from_pretrained(store, SMALL)


def offload(
    store: Path, resident: MoE, share: float, profile: dict[str, Any] = SMALL, **offload: Any
) -> MoE:
    manifest = read_manifest(store).without_drafts()
    slots = round(share * sum(layer.experts for layer in manifest.layers))
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    room = slots * slot_bytes(manifest, 8) + 16
    memory = profile["memory"] | {"device_gib": (rest + room) / GIB}
    settings = {"hot_set": False} | offload
    return MoE.from_pretrained(store, profile | {"memory": memory, "offload": settings})


class Liar:
    """Says with certainty what is random, or not what the router has said last, or nothing."""

    name, context = "liar", 3

    def __init__(self, kind: Kind, layers: int, experts: int) -> None:
        self.kind, self.layers, self.experts = kind, layers, experts
        self.random = torch.Generator().manual_seed(0)
        self.last: Tensor | None = None
        self.asked = 0

    def start(self, tokens: Tensor) -> None:
        assert tokens.shape[1] == self.context
        self.rows = tokens.shape[0]

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        assert len(hidden_states) == routing.num_tokens == self.rows
        self.last = routing.expert_ids

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        self.asked += 1
        if self.kind == "empty":
            return Forecast.empty()
        guess = torch.randperm(self.experts, generator=self.random)[:3]
        if self.kind == "inverted" and self.last is not None:
            guess = torch.tensor([e for e in range(self.experts) if e not in self.last])
        last = self.layers if depth is None else min(layer + 1 + depth, self.layers)
        rows = torch.zeros(1, self.experts)
        rows[0, guess] = 1.0
        return Forecast.of_rows(layer, {target: rows.numpy() for target in range(layer + 1, last)})


@pytest.mark.parametrize("share", [0.0625, 0.25, 0.5])
@pytest.mark.parametrize("kind", ["random", "inverted", "empty"])
def test_adversarial_predictors(store: Path, resident: MoE, kind: Kind, share: float) -> None:
    model = offload(store, resident, share)
    parts, liar = model._loaded.offloaded, Liar(kind, 4, 8)
    assert parts is not None
    prefetcher = parts.prefetch_with(liar)
    for gate in prefetcher.gates:  # who would soon have stopped it
        gate.on = True
        gate.judge = lambda *_: None  # type: ignore[method-assign]
    model.experts._prefetcher = prefetcher
    expected = [completion.token_ids for completion in resident.generate(PROMPTS, GREEDY)]
    assert [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)] == expected
    assert liar.asked > 0
    offloaded = model.stats()["offload"]
    assert model.status()["offload"]["predictor"] == "liar"
    assert offloaded["prefetch"]["layers_on"] == 4
    if kind != "empty" and share > 0.2:
        assert offloaded["prefetches"] > 0


def test_self_contrast_looks_ahead_for_both_readings(store: Path) -> None:
    contrast = {"strength": 0.5, "rank": 1}
    profile = SMALL | {"lossless": False, "methods": {"contrast": contrast}}
    resident = MoE.from_pretrained(store, profile)
    model = offload(store, resident, 0.5, profile)
    parts, liar = model._loaded.offloaded, Liar("random", 4, 8)
    assert parts is not None
    model.experts._prefetcher = parts.prefetch_with(liar)
    expected = [completion.token_ids for completion in resident.generate(PROMPTS, GREEDY)]
    assert [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)] == expected
    assert liar.last is not None, "it saw where both readings went"


def test_a_lost_expert_is_no_news_for_who_looks_ahead() -> None:
    """Those that do not need it are run again without the rows that do: no step of its own."""
    experts, layers = lossy_layers(0, 6, lost={(1, 2)})
    first, liar = experts.layers[0], Liar("random", LAYERS, EXPERTS)
    assert isinstance(first, OffloadedExperts)
    experts._prefetcher = Prefetcher(first.cache, [EXPERTS] * LAYERS, liar, load_seconds=1e-3)
    experts.begin([[1], [2], [3]])
    hidden, weights = torch.randn(3, 1, HIDDEN), torch.rand(1, 2)
    choices = torch.tensor([[[0, 2]], [[1, 3]], [[4, 5]]])
    calls = [
        ExpertCall(1, rows, Routing(ids, weights), "decode")
        for rows, ids in zip(hidden, choices, strict=True)
    ]
    lost, *others = experts.run(1, calls)
    assert isinstance(lost, OffloadError)
    for outcome, call in zip(others, calls[1:], strict=True):
        ids = call.routing.expert_ids
        whole = experts_forward(call.hidden_states, ids, weights, layers.resident[1])
        assert isinstance(outcome, Tensor)
        assert torch.equal(outcome, whole)


@pytest.mark.deep
def test_a_calibrated_model_looks_ahead_by_itself(tmp_path: Path) -> None:
    store = convert("examples/demo-model", tmp_path / "store", ModelSettings(expert_bits=8))
    resident = MoE.from_pretrained(store, SMALL)
    text = Path("tests/data/heldout_python.txt").read_text(encoding="utf-8")
    trace, fitted = calibrate_model(resident, text, tokens=amount(3072, quick=1024))
    save_calibration(store / CALIBRATION_FOLDER, resident.config, "text", trace, fitted)
    model = offload(store, resident, 0.25)
    assert model.status()["offload"]["predictor"] == "ensemble"
    assert not any("looks ahead" in notice for notice in model.notices)
    prompts = [text[1000:1400], text[5000:5200]]
    expected = [completion.token_ids for completion in resident.generate(prompts, GREEDY)]
    assert [completion.token_ids for completion in model.generate(prompts, GREEDY)] == expected
    found = model.stats()["offload"]["prefetch"]
    assert found["right"] + found["wrong"] + found["missed"] > 0
    assert offload(store, resident, 0.25, predictor="off").status()["offload"]["predictor"] is None
    named = offload(store, resident, 0.25, predictor="path")
    assert named.status()["offload"]["predictor"] == "path"


def test_without_a_calibration(store: Path, resident: MoE) -> None:
    model = offload(store, resident, 0.25)
    assert model.status()["offload"]["predictor"] is None
    assert any("run moe calibrate on this model" in notice for notice in model.notices)
    with pytest.raises(CalibrationError, match="run moe calibrate MODEL"):
        offload(store, resident, 0.25, predictor="path")
    with pytest.raises(
        ProfileError, match=r"offload\.predictor must be one of off, auto, token_ta"
    ):
        offload(store, resident, 0.25, predictor="oracle")
