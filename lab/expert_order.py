"""Do sequences that are predicted to need the same experts read fewer of them together?

    python -m lab.expert_order [--quick]

Held-out sequences of three kinds wait in random order; batches are taken from the queue in order,
or by `choose_batch` from what the token table and the path predictor expect
of the prompt, from the prompt's true routing, or from the true routing of what is read next (which
nobody can know). Then every batch reads its sequences in step, and distinct experts a step and
layer are counted, after the prompt, and how many batches the unluckiest in a hundred wait. The
predictors come from `lab.offload.predict`'s calibration. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.texts import ROOT, TEXTS, calibration_text, heldout
from moe import MoE
from moe.calibration.trace import Trace
from moe.commands.calibrate.calibrate import calibrate_model
from moe.commands.calibrate.record import record_trace
from moe.methods.expert_order.order import choose_batch
from routing.predict.calibrated import CalibratedPredictors
from routing.predict.forecast import Floats

PROMPT, ANSWER = 64, 64
BATCHES = (2, 4, 8, 16, 32, 64)
PATIENCE = 4
Visits = NDArray[np.bool_]


def visits_of(trace: Trace) -> Visits:
    """``(S, T, L, E)``: which experts each token of each sequence visits."""
    layers = []
    for ids, experts in zip(trace.expert_ids, trace.num_experts, strict=True):
        visits = np.zeros((trace.num_tokens, experts), bool)
        np.put_along_axis(visits, ids.numpy().astype(np.int64), True, 1)
        layers.append(visits)
    return np.stack(layers, 1).reshape(len(trace.lengths), -1, len(layers), layers[0].shape[1])


def expected_needs(calibrated: CalibratedPredictors, name: str, trace: Trace) -> Floats:
    """``(S, L x E)``: how often a predictor expects each unit, on average over the prompt."""
    predictor = calibrated.predictor(name)
    predictor.start(trace.contexts(predictor.context))
    rows = [predictor.rows(-1, layer) for layer in range(len(trace.num_experts))]
    found = np.stack([row for row in rows if row is not None], 1)
    by_sequence = found.reshape(len(trace.lengths), -1, *found.shape[1:])[:, :PROMPT]
    mean: Floats = by_sequence.mean(1).reshape(len(by_sequence), -1)
    return mean


def usage(visits: Visits) -> Floats:
    """``(S, L x E)``: how often each unit is visited."""
    return visits.mean(1).reshape(len(visits), -1).astype(np.float32)


def distinct(
    visits: Visits, needs: Floats | None, batch: int, queue: int
) -> tuple[float, list[int]]:
    """Experts a step and layer where batches are taken from a queue of this many sequences, and how
    many batches each sequence has waited."""
    arrivals = list(range(len(visits)))
    waiting, overtaken, counts = arrivals[:queue], [0] * len(visits), []
    since, waits = [0] * len(visits), []
    arrivals = arrivals[queue:]
    while len(waiting) >= batch:
        if needs is None:
            chosen = list(range(batch))
        else:
            chosen = choose_batch(needs[waiting], batch, [overtaken[i] for i in waiting], PATIENCE)
        taken = [waiting[index] for index in chosen]
        for index in range(max(chosen)):
            overtaken[waiting[index]] += 1
        counts.append(visits[taken, PROMPT:].any(0).sum(-1).mean())
        waits += [len(counts) - since[name] for name in taken]
        for name in arrivals[:batch]:
            since[name] = len(counts)
        waiting = [name for name in waiting if name not in taken] + arrivals[:batch]
        arrivals = arrivals[batch:]
        if not arrivals:  # the last ones have no choice left
            break
    return float(np.mean(counts)), waits


def measure(visits: Visits, ways: dict[str, Floats | None], rounds: int) -> list[dict[str, Any]]:
    records = []
    for batch in BATCHES:
        if 4 * batch > len(visits):
            continue
        totals = dict.fromkeys(ways, 0.0)
        waits: dict[str, list[int]] = {name: [] for name in ways}
        for seed in range(rounds):
            order = np.random.default_rng(seed).permutation(len(visits))
            for name, needs in ways.items():
                own = None if needs is None else needs[order]
                found, waited = distinct(visits[order], own, batch, 4 * batch)
                totals[name] += found / rounds
                waits[name] += waited
        first = totals["in order"]
        records += [
            {
                "batch": batch,
                "way": name,
                "distinct": round(total, 3),
                "fewer_percent": round(100 * (1 - total / first), 2),
                "waits_p99": float(np.percentile(waits[name], 99)),
            }
            for name, total in totals.items()
        ]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    model = MoE.from_pretrained(options.model)
    learnt = 16_000 if options.quick else 100_000
    _, fitted = calibrate_model(model, calibration_text(6 * learnt), tokens=learnt)
    windows = []
    for name in TEXTS:
        ids = model.codec.encode(heldout(name))
        size, count = PROMPT + ANSWER, 40 if options.quick else 160
        windows += [ids[at * size : (at + 1) * size] for at in range(min(count, len(ids) // size))]
    trace = record_trace(model.backbone, model.experts, windows, row_bytes=0)
    visits = visits_of(trace)
    ways: dict[str, Floats | None] = {
        "in order": None,
        "token table": expected_needs(fitted.calibrated, "token_table", trace),
        "path": expected_needs(fitted.calibrated, "path", trace),
        "prompt's routing": usage(visits[:, :PROMPT]),
        "answer's routing": usage(visits[:, PROMPT:]),
    }
    records = measure(visits, ways, 2 if options.quick else 5)
    print_table(
        f"Distinct experts a step and layer, of {trace.num_experts[0]}",
        ("batch", "needs by", "experts", "fewer by %", "waits, p99"),
        [
            [r["batch"], r["way"], r["distinct"], r["fewer_percent"], r["waits_p99"]]
            for r in records
        ],
    )
    print_json({**facts, "records": records})


if __name__ == "__main__":
    main()
