"""How level are ranks that share the experts of a model: linear, EPLB, our packing and sharing?

    python -m benchmarks.placement [--quick] [--ranks 2 4 8] [--step 512]

Traces are the tokens that each expert of each layer gets in each step of `--step` tokens: the
shipped model's on the held-out texts, and drawn ones with popularity by Zipf's law (64 experts,
top-8). A step of a text is a piece of it, as when a prompt is read; a "mixed" one has tokens of as
many places, as when so many sequences decode. Placements are made from the first half of a trace
and judged on the second. Linear and EPLB share an expert's tokens evenly among its copies (the best
that taking turns can do); ours chooses whole tokens by price for each step. "Unseen" is ours before
anything has run, "in hindsight" as if it had been made for the steps that it is judged on: what no
forecast can better. On some of the steps the choice is held against programs for the same
placement: "over cut tokens" is the most by which it exceeds a linear program's answer, which may
cut a token in parts, "over whole tokens" the same for an integer program's.

"Rebalanced" is ours as it changes between steps (`benchmarks.placement_online`), on the same
steps; "moved" are experts that go to another rank, a layer and step. Of a text that is read as a
prompt the tokens are known, and a table says what to expect of them, made from other texts.

Imbalance is the heaviest rank's tokens over the mean, averaged over steps and layers. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import environment, print_header, print_json, print_table, several
from benchmarks.offload_routing import Record
from benchmarks.placement_online import Reader, online, token_table
from experts.placement import (
    Placement,
    eplb,
    first_placement,
    linear,
    pack,
    slots_for,
)
from experts.placement.evenness import share_evenly
from moe import MoE
from routing import PolicyChain
from tests.oracles.balance import choose_counts
from tests.oracles.sharing_optimum import imbalance, optimum

ROOT = Path(__file__).parents[1]
TEXTS = ("prose", "python", "cpp")
OPTIMA = 4
"""Steps of a layer whose optimum is computed."""

Trace = NDArray[np.int64]
"""``(layers, steps, experts)`` tokens."""


def text_trace(model: MoE, text: str, step: int, steps: int, *, mixed: bool = False) -> Trace:
    """Return what the model routes of a text, so many tokens at once: neighbours, or from all over
    it."""
    ids = model.codec.encode(text)
    steps = min(steps, len(ids) // step)
    sequences = np.array(ids[: step * steps]).reshape((step, steps) if mixed else (steps, step))
    record, experts = Record(), model.experts.layers[0].num_experts
    model.experts.set_policies(PolicyChain((record,)))
    for sequence in sequences.tolist():
        model.batch_logits([sequence])
    chosen = record.trace.reshape(*sequences.shape, *record.trace.shape[1:])
    chosen_SBLK = chosen.swapaxes(0, 1) if mixed else chosen
    counts_SLE = (chosen_SBLK[..., None] == np.arange(experts)).sum((1, 3))
    return np.asarray(counts_SLE.swapaxes(0, 1))


def zipf_trace(exponent: float, step: int, steps: int, seed: int = 0) -> Trace:
    """Two layers of 64 experts, top-8, drawn without replacement by popularity."""
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(2):
        popularity = -exponent * np.log(rng.permutation(64) + 1)
        keys = popularity + rng.gumbel(size=(steps, step, 64))
        ids = np.argpartition(-keys, 7, axis=2)[:, :, :8].reshape(steps, -1)
        layers.append([np.bincount(one, minlength=64) for one in ids])
    return np.array(layers)


def judge(trace: Trace, ranks: int, *, replicas: float, optima: int = OPTIMA) -> dict[str, float]:
    """Mean imbalance of each way over the second half of a trace, and our distance to optimum,
    which is computed for so many steps of a layer."""
    found: dict[str, list[NDArray[np.float64]]] = {
        name: [] for name in ("linear", "eplb", "unseen", "ours", "hindsight")
    }
    experts = trace.shape[2]
    slots = slots_for(experts, ranks, replicas)
    unseen_ER = first_placement("packed", experts, ranks, replicas).copies_ER
    over: dict[str, list[float]] = {"over_cut": [], "over_whole": []}
    for steps_SE in trace:
        half = len(steps_SE) // 2
        seen_SE, next_SE = steps_SE[:half].astype(np.float64), steps_SE[half:]
        plain: dict[str, Placement] = {
            "linear": linear(experts, slots, ranks),
            "eplb": eplb(seen_SE.mean(0), slots, ranks),
        }
        for name, placement in plain.items():
            loads_SR = share_evenly(next_SE.astype(np.float64), placement.copies_ER).sum(1)
            found[name].append(imbalance(loads_SR))
        copies_ER = pack(seen_SE, slots, ranks).copies_ER
        best_ER = pack(next_SE.astype(np.float64), slots, ranks).copies_ER
        loads_SR = _chosen(next_SE, copies_ER)
        found["unseen"].append(imbalance(_chosen(next_SE, unseen_ER)))
        found["ours"].append(imbalance(loads_SR))
        found["hindsight"].append(imbalance(_chosen(next_SE, best_ER)))
        for step in np.linspace(0, len(next_SE) - 1, optima).astype(int):
            for way, found_over in over.items():
                loads_E = next_SE[step].astype(np.float64)
                least = optimum(loads_E, copies_ER, whole=way == "over_whole")
                found_over.append(float(loads_SR[step].max() / least - 1))
    figures = {name: float(np.mean(values)) for name, values in found.items()}
    return figures | {way: max(all_over) for way, all_over in over.items() if all_over}


def rebalanced(
    trace: Trace, ranks: int, replicas: float, reader: Reader | None
) -> dict[str, float]:
    """As `judge`, of placements that change between steps, and how many experts move."""
    placements, moved = online(trace, ranks, replicas, reader)
    half, found = trace.shape[1] // 2, []
    for steps_SE, own in zip(trace, placements, strict=True):
        for tokens_E, placement in zip(steps_SE[half:], own[half:], strict=True):
            found.append(imbalance(_chosen(tokens_E[None], placement.copies_ER)))
    return {"rebalanced": float(np.mean(found)), "moved": moved}


def _chosen(steps_SE: NDArray[np.int64], copies_ER: NDArray[np.int64]) -> NDArray[np.float64]:
    """``(S, R)`` tokens that each rank serves."""
    loads = [choose_counts(tokens, copies_ER).sum(0) for tokens in steps_SE]
    return np.array(loads, np.float64)


def main() -> None:
    options = _parser().parse_args()
    steps = 24 if options.quick else 128
    ranks = options.ranks or ((4,) if options.quick else (2, 4, 8))
    read = TEXTS[:1] if options.quick else TEXTS
    exponents = (1.0,) if options.quick else (0.5, 1.0)
    model = MoE.from_pretrained(ROOT / "examples/demo-model")
    table = token_table(model, 10_000) if options.quick else token_table(model)
    texts = {name: (ROOT / f"tests/data/heldout_{name}.txt").read_text() for name in read}
    make: dict[str, Callable[[], Trace]] = {
        f"{name}, mixed" if mixed else name: partial(
            text_trace, model, text, options.step, steps, mixed=mixed
        )
        for mixed in (False, True)
        for name, text in texts.items()
    }
    for exponent in exponents:
        make[f"zipf {exponent}"] = partial(zipf_trace, exponent, options.step, steps)
    print_header(environment() | {"tokens a step": options.step, "steps": steps})
    points: list[dict[str, Any]] = []
    for name, trace_of in make.items():
        trace = trace_of()
        for count in ranks:
            for extra in (0.0, 0.25):
                point = {"trace": name, "ranks": count, "replicas": extra}
                points.append(point | judge(trace, count, replicas=extra))
            reader = None
            if name in texts:
                ids = model.codec.encode(texts[name])[: options.step * trace.shape[1]]
                reader = Reader(model, table, ids, options.step)
            points[-1] |= rebalanced(trace, count, extra, reader)
    _show(points)
    copied = [point for point in points if point["replicas"]]
    print_json(
        {"points": points, "worst_with_replicas": max(p["rebalanced"] for p in copied)}
        | {"better_than_eplb": all(p["rebalanced"] < p["eplb"] for p in copied)}
        | {"environment": environment()}
    )


def _show(points: Sequence[Mapping[str, Any]]) -> None:
    ways = ("linear", "eplb", "unseen", "ours", "hindsight", "rebalanced", "moved")
    print_table(
        "heaviest rank over the mean",
        ("trace", "ranks", "replicas", "linear", "EPLB", "unseen", "ours", "in hindsight")
        + ("rebalanced", "moved", "over cut tokens", "over whole tokens"),
        [
            (p["trace"], str(p["ranks"]), f"{p['replicas']:.0%}")
            + tuple(f"{p[way]:.3f}" if way in p else "" for way in ways)
            + (f"{p['over_cut']:.1%}", f"{p['over_whole']:.1%}")
            for p in points
        ],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare placements of experts on ranks.")
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer steps, one text, 4 ranks")
    add("--ranks", **several(int), help="one or several numbers (2 4 8)")
    add("--step", type=int, default=512, help="tokens of a step (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
