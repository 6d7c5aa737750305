"""Would groups of ranks gain if some only read prompts, and others only decoded? A simulation.

    python -m lab.simulation.apart [--ranks 64 128 320] [--near 160] [--far 50] [--latency 37]

Groups of 32 ranks are dealt into those that read and those that decode
(`moe.methods.prefill_apart.planner`). Their prompts take the time that CloudMatrix384 has
published, and their decode steps that of `lab.simulation`. Prompts of 2,048 tokens and answers of
256 keep 60 % of the groups busy. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table, several
from experts.placement import eplb
from lab.simulation.costs import Network, add_network, network_of
from lab.simulation.published import LAYERS, SIMULATED_LAYERS, cloud_matrix, die
from lab.simulation.routing import TOKENS, Routed, drawn_routing
from lab.simulation.simulator import lanes_of, simulate
from moe.commands.plan.ranks import EngineCosts
from moe.methods.prefill_apart.planner import compare, recommend, typical_load

GROUP = 32
PREFILL_RATE = 6688 / 2
"""Prompt tokens a second of a die, CloudMatrix384 (arXiv 2506.12708)."""
KV_BYTES = 61 * 576 * 2
"""Of a token of DeepSeek-R1 in bf16."""


def decode_step(routed: Routed, ranks: int, network: Network, fixed: float, tokens: int) -> float:
    """Seconds of a decode step with so many tokens a rank, 25 % copies, in one lane."""
    experts = routed.experts
    copied = -(-experts * 5 // 4 // ranks) * ranks
    costs, _ = die(fixed, experts=experts / ranks)
    placed = [eplb(loads_E, copied, ranks) for loads_E in routed.loads(1)]
    lanes = lanes_of(routed.tokens(tokens * ranks, 0), placed, 1)
    return simulate(lanes, SIMULATED_LAYERS, costs, network).seconds / SIMULATED_LAYERS * LAYERS


def apart(routed: Routed, ranks: Sequence[int], network: Network, fixed: float) -> list[Any]:
    """Prefill and decode together and apart: of each number of ranks, the groups together, the
    best split, and whether it is recommended."""
    few, many = (decode_step(routed, GROUP, network, fixed, n) for n in (TOKENS // 4, TOKENS))
    slope = (many - few) / (TOKENS - TOKENS // 4)

    # A sequence of an engine stands for one on each rank of its group, which go in step.
    costs = EngineCosts(
        step_s=lambda batch: max(few + slope * (batch - TOKENS // 4), few / 2),
        chunk_s=lambda tokens: tokens / PREFILL_RATE,
        chunk_tokens=512,
        handover_s=lambda tokens: tokens * KV_BYTES / network.far + network.latency_s,
    )
    found = []
    for count in ranks:
        groups = count // GROUP
        served = compare(costs, groups, typical_load(costs, groups, batch=TOKENS))
        split, why = recommend(served)
        splits = served[1:]
        best = split or min(splits, key=lambda each: each.ttft_p99, default=None)
        found += [
            {"ranks": count, "recommended": one is split, "why": why, **one.as_dict()}
            for one in (served[0], best)
            if one is not None
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", **several(int), help="one or several numbers (default: 64 128 320)")
    add_network(parser)
    options = parser.parse_args()
    print_header(environment())
    network = network_of(options)
    ranks = [count for count in options.ranks or (64, 128, 320) if count >= 2 * GROUP]
    routed = drawn_routing(max(ranks, default=1))
    served = apart(routed, ranks, network, cloud_matrix()["fixed_share"])
    print_table(
        f"prefill apart, groups of {GROUP} ranks",
        ("ranks", "groups", "TBT p50, ms", "p99", "TTFT p50, s", "p99", "recommended"),
        [
            (str(s["ranks"]), s["name"], f"{1e3 * s['tbt_p50']:.0f}", f"{1e3 * s['tbt_p99']:.0f}")
            + (f"{s['ttft_p50']:.2f}", f"{s['ttft_p99']:.2f}", "yes" * s["recommended"])
            for s in served
        ],
    )
    print_json({"prefill_apart": served, "environment": environment()})


if __name__ == "__main__":
    main()
