"""How would hundreds of ranks share the experts of a model? A simulation, and how far it is right.

    python -m lab.simulation [--quick] [--ranks 8 32 128 320] [--far 50] [--latency 37]
    python -m lab.simulation --against RESULT      # the JSON of benchmarks.expert_parallel

First it is held against published figures (`lab.simulation.published`) and, with --against, against
runs of several ranks here (`lab.simulation.runs`). Then it replays routing, 96 tokens a rank,
over links of the given GB/s and microseconds: the shipped model's on held-out texts (32 experts, on
up to 32 ranks), and drawn one (256 experts, top-8, log-normal popularity). Experts are in the order
of their ids, or with 25 % copies placed by EPLB on other tokens and chosen for each step; in one
lane, or in two that overlap. The costs of computing are those fitted to CloudMatrix384.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table, several
from experts.placement import eplb, linear
from lab.simulation.costs import Network, add_network, network_of
from lab.simulation.published import (
    LAYERS,
    OUT_BYTES,
    SIMULATED_LAYERS,
    cloud_matrix,
    deep_ep,
    die,
)
from lab.simulation.routing import TOKENS, Routed, drawn_routing, text_routing
from lab.simulation.runs import against
from lab.simulation.simulator import lanes_of, simulate


def scale(routed: Routed, ranks: int, network: Network, fixed: float) -> list[dict[str, Any]]:
    """One number of ranks in every arrangement."""
    experts = routed.experts
    copied = -(-experts * 5 // 4 // ranks) * ranks
    costs, _ = die(fixed, experts=experts / ranks)
    placements = {
        "in order": [linear(experts, -(-experts // ranks) * ranks, ranks)] * len(routed.layers),
        "25 % copies": [eplb(loads_E, copied, ranks) for loads_E in routed.loads(1)],
    }
    found = []
    for name, placed in placements.items():
        for count in (1, 2):
            lanes = lanes_of(routed.tokens(TOKENS * ranks, 0), placed, count)
            step = simulate(lanes, SIMULATED_LAYERS, costs, network)
            found.append(
                {
                    "routing": routed.name,
                    "ranks": ranks,
                    "placement": name,
                    "lanes": count,
                    "step_ms": step.seconds / SIMULATED_LAYERS * LAYERS * 1e3,
                    "imbalance": step.imbalance,
                    "kb_a_token": step.bytes_a_token / SIMULATED_LAYERS * LAYERS / 1e3,
                    "idle": step.idle,
                }
            )
    return found


def main() -> None:
    options = _parser().parse_args()
    print_header(environment())
    kernels, system = deep_ep(), cloud_matrix()
    _show_published(kernels, system)
    runs = []
    if options.against:
        runs = against(json.loads(Path(options.against).read_text().splitlines()[-1]))
        print_table(
            "runs here",
            ("", "predicted tokens/s", "measured", "error", "predicted kB a token", "measured"),
            [
                (r["name"], f"{r['predicted']:,.1f}", f"{r['measured']:,.1f}")
                + (f"{r['error']:+.1%}" + r["fitted"] * " (fitted)",)
                + (f"{r['predicted_kb']:,.1f}", f"{r['measured_kb']:,.1f}")
                for r in runs
            ],
        )
    network = network_of(options)
    ranks = options.ranks or ([8, 64] if options.quick else [8, 32, 128, 320])
    few = [count for count in ranks if count <= 32]
    replayed = [(text_routing(max(few)), few)] if few else []
    replayed.append((drawn_routing(max(ranks)), ranks))
    points = [
        one
        for routed, counts in replayed
        for count in counts
        for one in scale(routed, count, network, system["fixed_share"])
    ]
    print_table(
        f"{TOKENS} tokens a rank, {LAYERS} layers",
        ("routing", "ranks", "placement", "lanes", "step, ms", "imbalance", "kB a token", "idle"),
        [
            (p["routing"], str(p["ranks"]), p["placement"], str(p["lanes"]))
            + (f"{p['step_ms']:.1f}", f"{p['imbalance']:.2f}")
            + (f"{p['kb_a_token']:,.0f}", f"{p['idle']:.0%}")
            for p in points
        ],
    )
    print_json(
        {"deep_ep": kernels, "cloud_matrix": system, "runs": runs, "points": points}
        | {"row_bytes": OUT_BYTES, "environment": environment()}
    )


def _show_published(kernels: Mapping[str, Any], system: Mapping[str, Any]) -> None:
    print_table(
        f"DeepEP, microseconds (mean error {kernels['mean_error']:.1%}, "
        f"worst {kernels['worst_error']:+.1%})",
        ("ranks", "dispatch", "published", "combine", "published"),
        [
            (str(ranks), *(f"{kernels[of][way][ranks]:.0f}" for way, of in _COLUMNS))
            for ranks in kernels["published_us"]["dispatch"]
        ],
    )
    token = system["token_ms"]
    print_table(
        f"CloudMatrix384: {token['predicted']:.1f} ms a token, published {token['published']:.1f} "
        f"({system['token_error']:+.1%})",
        ("sequences an NPU", "gain by two lanes", "published"),
        [
            (str(npu), f"{gain['predicted']:+.1%}", f"{gain['published']:+.1%}")
            for npu, gain in system["gains"].items()
        ],
    )


_COLUMNS = tuple(
    (way, of) for way in ("dispatch", "combine") for of in ("predicted_us", "published_us")
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Simulate ranks that share the experts.")
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer ranks")
    add("--ranks", **several(int), help="one or several numbers (default: 8 32 128 320)")
    add_network(parser)
    add("--against", metavar="FILE", help="output of benchmarks.expert_parallel to be held to")
    return parser


if __name__ == "__main__":
    main()
