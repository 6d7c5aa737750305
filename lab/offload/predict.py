"""Which experts come next? Recall and precision of every predictor on held-out text.

    python -m lab.offload.predict [--quick] [--calibration DIR]

The shipped model is calibrated on text that this machine has anyway: the Python standard library,
the C++ headers of torch, and the descriptions of installed packages, without any file that shares
much with the held-out text in tests/data (some of it is what the model was trained on; what
predictors learn from is where its tokens went). Then it reads the held-out text, and each predictor
says which experts each layer will need: the same number of guesses for all, as many as the rows of
the step need at least (batch x top_k, at most half of the experts), so that recall and precision
can be compared. Rows of a step come from different sequences. Expected against observed: mean
probability of what was forecast, and how much of it came. Microseconds are for one layer of one
step, events and forecast together, of this thread's processor time. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.texts import ROOT, TEXTS, calibration_text, heldout
from moe import MoE
from moe.calibration.files import load_calibration
from moe.calibration.trace import Trace
from moe.commands.calibrate.calibrate import calibrate_model
from moe.commands.calibrate.record import record_trace
from routing import Routing
from routing.predict.calibrated import PREDICTORS, CalibratedPredictors
from routing.predict.ensemble import Ensemble
from routing.predict.forecast import Forecast

BATCHES = (1, 4, 16)
WINDOW = 512
START = 1 << 10
BINS = torch.tensor([0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0001])


class Score:
    """What one predictor said of one layer, and what came."""

    def __init__(self) -> None:
        self.hits = self.guesses = self.needed = 0
        self.expected = torch.zeros(len(BINS))
        self.observed = torch.zeros(len(BINS))
        self.count = torch.zeros(len(BINS))

    def add(self, forecast: Forecast, target: int, visited: Tensor, guesses: int) -> None:
        """Take in a forecast of ``target``, whose experts ``visited`` (E,) bool were needed."""
        own = forecast.layer == target
        expert, probability = forecast.expert[own], forecast.probability[own]
        came = visited[expert]
        self.hits += int(came[:guesses].sum())
        self.guesses += min(guesses, len(expert))
        self.needed += int(visited.sum())
        place = torch.bucketize(probability, BINS)
        self.expected.index_add_(0, place, probability)
        self.observed.index_add_(0, place, came.float())
        self.count.index_add_(0, place, torch.ones(len(place)))

    @property
    def recall(self) -> float:
        return self.hits / max(self.needed, 1)

    @property
    def precision(self) -> float:
        return self.hits / max(self.guesses, 1)


class Setting:
    """A predictor, and how many layers before a layer it is asked about it.

    Args:
        ahead: layers, or `START` for before the first.
    """

    def __init__(self, predictor: Ensemble, ahead: int = 1) -> None:
        self.predictor, self.ahead = predictor, ahead
        when = {1: "", START: ", at the start"}.get(ahead, f", {ahead} ahead")
        self.name = f"{predictor.name}{when}"
        self.seconds = 0.0
        self.events = 0


def settings(calibrated: CalibratedPredictors) -> list[Setting]:
    found = [Setting(calibrated.predictor(name)) for name in calibrated.weights]
    return [*found, *(Setting(calibrated.predictor("ensemble"), ahead) for ahead in (2, START))]


class Held:
    """Held-out tokens in an order in which neighbours belong to different sequences."""

    def __init__(self, trace: Trace, calibrated: CalibratedPredictors) -> None:
        assert trace.rows is not None
        assert len(trace.rows.tokens) == trace.num_tokens
        self.trace, self.rows = trace, trace.rows
        width = max(calibrated.predictor(name).context for name in calibrated.weights)
        self.contexts = trace.contexts(width)
        generator = torch.Generator().manual_seed(0)
        self.order = torch.randperm(trace.num_tokens, generator=generator)

    def steps(self, batch: int, tokens: int) -> Iterator[Tensor]:
        return (rows for rows in self.order[:tokens].split(batch) if len(rows) == batch)


def follow(held: Held, setting: Setting, rows: Tensor, scores: Sequence[Score]) -> None:
    """One step of the model, as the predictor sees it."""
    predictor, ahead = setting.predictor, setting.ahead
    layers = len(held.trace.num_experts)
    began = time.thread_time()
    predictor.start(held.contexts[rows])
    forecasts = [predictor.forecast(-1, ahead)] * min(ahead, layers)
    setting.seconds += time.thread_time() - began
    for layer in range(layers):
        read = held.rows.expert_inputs[layer][rows].float()
        ids, weights = held.trace.expert_ids[layer][rows], held.trace.weights[layer][rows]
        routing = Routing(ids.long(), weights.float())
        began = time.thread_time()
        if ahead < START:
            predictor.observe(layer, read, routing)
            forecasts.append(predictor.forecast(layer, ahead))
        setting.seconds += time.thread_time() - began
        visited = torch.zeros(held.trace.num_experts[layer], dtype=torch.bool)
        visited[routing.expert_ids.flatten()] = True
        guesses = min(len(rows) * routing.top_k, held.trace.num_experts[layer] // 2)
        scores[layer].add(forecasts[layer], layer, visited, guesses)
    setting.events += layers


def measure(held: Held, options: Sequence[Setting], tokens: int) -> list[dict[str, Any]]:
    """One record for each predictor and batch."""
    records = []
    for batch in BATCHES:
        for setting in options:
            scores = [Score() for _ in held.trace.num_experts]
            setting.seconds, setting.events = 0.0, 0
            for rows in held.steps(batch, tokens):
                follow(held, setting, rows, scores)
            records.append(_record(setting, batch, scores))
    return records


def _record(setting: Setting, batch: int, scores: Sequence[Score]) -> dict[str, Any]:
    expected, observed, count = (
        torch.stack([getattr(score, name) for score in scores]).sum(0)
        for name in ("expected", "observed", "count")
    )
    said = float(count.sum())
    error = float((expected - observed).abs().sum()) / said if said else 0.0
    return {
        "predictor": setting.name,
        "batch": batch,
        "recall": round(sum(s.hits for s in scores) / sum(s.needed for s in scores), 4),
        "precision": round(sum(s.hits for s in scores) / max(sum(s.guesses for s in scores), 1), 4),
        "recall_by_layer": [round(score.recall, 3) for score in scores],
        "precision_by_layer": [round(score.precision, 3) for score in scores],
        "expected": _means(expected, count),
        "observed": _means(observed, count),
        "calibration_error": round(error, 4),
        "microseconds_a_layer": round(1e6 * setting.seconds / setting.events, 1),
    }


def _means(sums: Tensor, counts: Tensor) -> list[float | None]:
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    return [round(total / count, 3) if count else None for total, count in pairs]


def show(records: Sequence[dict[str, Any]]) -> None:
    layers = range(len(records[0]["recall_by_layer"]))
    for batch in BATCHES:
        print_table(
            f"Batch {batch}: recall / precision by layer, error of probabilities, time a layer",
            ("predictor", "all", *(str(i) for i in layers), "error", "us"),
            [
                [
                    r["predictor"],
                    f"{r['recall']:.2f}/{r['precision']:.2f}",
                    *(
                        f"{a:.2f}/{b:.2f}"
                        for a, b in zip(r["recall_by_layer"], r["precision_by_layer"], strict=True)
                    ),
                    f"{r['calibration_error']:.3f}",
                    f"{r['microseconds_a_layer']:.0f}",
                ]
                for r in records
                if r["batch"] == batch
            ],
        )
    ensemble = [r for r in records if r["predictor"] == "ensemble"]
    print_table(
        "Ensemble: expected / observed share of visits, by forecast probability",
        ("batch", *(f"to {float(b):.2f}" for b in BINS)),
        [
            [
                r["batch"],
                *(
                    "-" if e is None else f"{e:.2f}/{o:.2f}"
                    for e, o in zip(r["expected"], r["observed"], strict=True)
                ),
            ]
            for r in ensemble
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text to learn and to score")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    parser.add_argument("--calibration", type=Path, help="use this one; else one is made")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    model = MoE.from_pretrained(options.model)
    began = time.perf_counter()
    if options.calibration is None:
        learnt = 8_000 if options.quick else 100_000
        text = calibration_text(6 * learnt)
        _, fitted = calibrate_model(model, text, tokens=learnt)
        calibrated, missing = fitted.calibrated, fitted.unavailable
    else:
        experts = [layer.num_experts for layer in model.experts.layers]
        calibrated, missing = load_calibration(options.calibration, model.config, experts), {}
    seconds = time.perf_counter() - began
    tokens = 500 if options.quick else 3_000
    windows = []
    for name in TEXTS:
        ids = model.codec.encode(heldout(name))[: 4 * tokens]
        windows += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, 4 * WINDOW)]
    held = Held(record_trace(model.backbone, model.experts, windows), calibrated)
    records = measure(held, settings(calibrated), tokens)
    show(records)
    print_json(
        {
            **facts,
            "calibration_seconds": round(seconds, 1),
            "unavailable": missing,
            "predictors": {name: list(PREDICTORS[name]) for name in calibrated.weights},
            "records": records,
        }
    )


if __name__ == "__main__":
    main()
