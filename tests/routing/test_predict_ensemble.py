"""Clues weighed: probabilities mean what they say, alone and together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from routing import Routing
from routing.predict.calibrated import (
    PREDICTORS,
    CalibratedPredictors,
    PredictedModel,
)
from routing.predict.ensemble import (
    Ensemble,
    EvidenceSource,
    Situation,
    Tensors,
    fit_logistic,
    fit_situation,
)
from routing.predict.forecast import Floats
from routing.predict.lookahead import Gate, Lookahead
from routing.predict.token_table import fit_token_table
from routing.routers import RouterRule
from routing.routing import RoutingError

E, R = 6, 20_000


class FixedEvidence(EvidenceSource):
    """Says what the test tells it to, about every layer, from a layer on."""

    def __init__(self, name: str, evidence: Floats, since: int = -1) -> None:
        self.name, self.reach = name, None if since < 0 else 9
        self._evidence, self._since = evidence, since

    def evidence(self, layer: int, target: int) -> Floats | None:
        return self._evidence if layer >= self._since else None

    def tensors(self) -> Tensors:
        return {}


def world(noise: float) -> tuple[Floats, Floats, torch.Tensor]:
    """Two noisy views of log odds, and visits by those odds."""
    generator = np.random.default_rng(0)
    odds = generator.normal(-1, 2, (R, E))
    visits = torch.from_numpy(generator.random((R, E)) < 1 / (1 + np.exp(-odds))).float()
    views = (odds + noise * generator.normal(size=(R, E)) for _ in range(2))
    first, second = (3 * view.astype(np.float32) + 1 for view in views)
    return first, second, visits


def loss(probability: Floats, visits: torch.Tensor) -> float:
    rows = torch.from_numpy(probability).clamp(1e-6, 1 - 1e-6)
    return float(torch.nn.functional.binary_cross_entropy(rows.float(), visits))


def test_probabilities_are_calibrated_and_two_clues_beat_one() -> None:
    first, second, visits = world(1.5)
    sources = [FixedEvidence("a", first), FixedEvidence("b", second)]
    losses = []
    for own in ([sources[0]], sources):
        weights: dict[Situation, torch.Tensor] = {}
        fit_situation(weights, own, -1, 0, visits)
        rows = Ensemble("x", own, weights, 1).rows(-1, 0)
        assert rows is not None
        losses.append(loss(rows, visits))
        for low in (0.1, 0.3, 0.5, 0.7):
            place = (rows >= low) & (rows < low + 0.2)
            assert rows[place].mean() == pytest.approx(visits.numpy()[place].mean(), abs=0.06)
    assert losses[1] < losses[0] - 0.01


def test_logistic_regression_finds_the_weights_that_made_the_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50_000, 2, generator=generator)
    odds = features @ torch.tensor([2.0, -1.0]) - 1.5
    labels = (torch.rand(50_000, generator=generator) < odds.sigmoid()).float()
    assert fit_logistic(features, labels).tolist() == pytest.approx([2, -1, -1.5], abs=0.08)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_logistic_regression_of_what_always_or_never_is(label: float) -> None:
    weights = fit_logistic(torch.randn(100, 1), torch.full((100,), label))
    assert bool(weights.isfinite().all())
    assert (float(weights[-1]) > 0) == (label == 1.0)


def test_each_situation_has_its_own_weights() -> None:
    first, second, visits = world(1.0)
    sources = [FixedEvidence("early", first), FixedEvidence("late", second, since=0)]
    weights: dict[Situation, torch.Tensor] = {}
    for layer in (-1, 0):
        fit_situation(weights, sources, layer, 1, visits)
    assert set(weights) == {(1, 0, 1), (1, 1, 3)}
    predictor = Ensemble("x", sources, weights, 3)
    early, late = predictor.rows(-1, 1), predictor.rows(0, 1)
    assert early is not None
    assert late is not None
    assert loss(late, visits) < loss(early, visits)
    assert predictor.rows(0, 2) is None, "never fitted"
    forecast = predictor.forecast(0).validate([E] * 3)
    assert set(forecast.layer.tolist()) == {1}
    assert set(predictor.forecast(0, depth=1).layer.tolist()) == {1}
    assert len(predictor.forecast(2)) == 0


def calibrated() -> CalibratedPredictors:
    generator = torch.Generator().manual_seed(1)
    rules = (RouterRule(2), RouterRule(2, "sigmoid", torch.rand(E, generator=generator)))
    ids = [torch.rand(50, E, generator=generator).topk(2).indices for _ in rules]
    tokens = torch.randint(9, (50, 2), generator=generator)
    table = fit_token_table(tokens, ids, [E, E], 9)
    gate = Gate(torch.randn(E, 3), rules[1], torch.randn(E), torch.randn(3, 8))
    weights = {
        "token_table": {(0, 0, 1): torch.rand(2), (1, 0, 1): torch.rand(2)},
        "lookahead": {(1, 1, 1): torch.rand(2)},
        "ensemble": {(1, 1, 3): torch.rand(3)},
    }
    model = PredictedModel((E, E), 9, rules)
    return CalibratedPredictors(
        model, {"token_table": table, "lookahead": Lookahead("lookahead", {(1, 1): gate})}, weights
    )


def test_a_calibration_comes_back_from_its_tensors() -> None:
    before = calibrated()
    after = CalibratedPredictors.restore(before.tensors(), before.model)
    assert after.weights.keys() == before.weights.keys()
    rows, tokens = torch.randn(3, 8), torch.tensor([[1, 2], [3, 4], [-1, 8]])
    for name in before.weights:
        forecasts = []
        for one in (before, after):
            predictor = one.predictor(name)
            assert predictor.name == name
            predictor.start(tokens)
            predictor.observe(0, rows, Routing(torch.zeros(3, 1).long(), torch.ones(3, 1)))
            forecasts.append(predictor.forecast(0).validate([E, E]))
        assert len(forecasts[0]) > 0
        assert torch.equal(forecasts[0].expert, forecasts[1].expert)
        assert torch.equal(forecasts[0].probability, forecasts[1].probability)


def test_pre_attention_gates_of_an_older_calibration_are_ignored() -> None:
    now = calibrated()
    older = now.tensors()
    for key in [key for key in older if key.startswith("weights.lookahead.")]:
        older[key.replace("lookahead", "pre_attention")] = older[key]
    older["pre_attention.1.weight"] = torch.randn(E, 8)
    (spoken,) = older["weights.ensemble.values"]
    widened = torch.stack([spoken[0], spoken[1], torch.zeros(()), spoken[2]])
    older["weights.ensemble.situations"] = torch.tensor([(1, 1, 3), (1, 1, 7)])
    older["weights.ensemble.values"] = torch.stack([widened, torch.rand(4)])
    restored = CalibratedPredictors.restore(older, now.model)
    assert restored.weights.keys() == now.weights.keys()
    rows, tokens = torch.randn(3, 8), torch.tensor([[1, 2], [3, 4], [-1, 8]])
    said = []
    for one in (now, restored):
        predictor = one.predictor("ensemble")
        predictor.start(tokens)
        predictor.observe(0, rows, Routing(torch.zeros(3, 1).long(), torch.ones(3, 1)))
        said.append(predictor.forecast(0))
    assert len(said[0]) > 0
    assert torch.equal(said[0].probability, said[1].probability)


def test_a_predictor_that_is_not_there() -> None:
    with pytest.raises(RoutingError, match="no predictor 'path' for this model; there are ensem"):
        calibrated().predictor("path")
    assert "path" in PREDICTORS


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("token_table.experts", lambda t: t + E, "names experts that there are not"),
        ("token_table.experts", lambda t: t[1:], "a token table of"),
        ("token_table.keys", lambda t: t.flip(0), "rows are not in order"),
        ("lookahead.1.1.weight", lambda t: t[:-1], "a gate of 5 experts for layer 1"),
    ],
)
def test_tensors_that_do_not_belong_to_the_model(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    whole = calibrated()
    tensors = whole.tensors()
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        CalibratedPredictors.restore(tensors, whole.model)
