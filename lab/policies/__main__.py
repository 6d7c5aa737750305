"""What does a routing policy save, and what does it cost in quality?

    python -m lab.policies [--quick] [--plot FILE.png]

The shipped model reads held-out text, and each policy is compared with the same model without any:
bits per byte, divergence (KL, bits a token), distinct experts a layer for 8 consecutive tokens, and
the share of visits that are not made. Shared experts (DES) are set beside the
plain cut of `top_k`, and beside votes to the second power and with a share of its own for each
layer; those shares come from other text (`allotted`). Online pruning (ODP, 3.2) is run with the
medians of other text as its ratios.
Skipping rare experts (PESF, 3.5) is read with prompts of several lengths too.
"batch": the same policy for eight texts that are decoded side by side, one token of each, which is
what a batch of unrelated requests does. Nothing here is timed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table
from lab.policies.setup import ROOT, Texts, allotted, batch, by_length, medians
from moe import MoE
from moe.commands.evaluate.policy_costs import WINDOW, PolicyCost


def specs_of(ratios: str, *, quick: bool) -> list[str]:
    shares = (0.281, 0.5) if quick else (0.187, 0.25, 0.281, 0.312, 0.375, 0.5)
    scaled = [",".join(f"{by * float(r):.3f}" for r in ratios.split(",")) for by in (1, 0.9, 0.5)]
    return [
        *(f"des_vote:{share:g}:{WINDOW}{power}" for power in ("", ":2") for share in shares),
        *(f"des_seq:{k}:{WINDOW}" for k in (1, 2, 3)),
        *(f"top_k:{k}" for k in (1, 2, 3)),
        *(f"top_p:{p}" for p in (0.7, 0.8, 0.9, 0.95)),
        *(f"odp:{own}:0" for own in scaled),
        *(f"pesf:{share}" for share in (0.3, 0.5, 0.7)),
    ]  # fmt: skip


def points(costs: Sequence[PolicyCost]) -> Iterator[dict[str, Any]]:
    """One a policy: as it treats decoded tokens where it is for those alone, else prompts."""
    for cost in costs:
        if cost.phase == "prefill" or cost.policy.startswith("des"):
            yield {
                "policy": cost.policy, "phase": cost.phase, "worse": round(cost.worse, 6),
                "kl_bits": round(cost.kl_bits, 6), "distinct": round(cost.distinct, 3),
                "same_token": round(cost.top1_agreement, 4), "dropped": round(cost.dropped, 4),
            }  # fmt: skip


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss against distinct experts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in (
        "des_vote",
        "des_vote, squared",
        "des_vote, by layer",
        "des_seq",
        "top_k",
        "top_p",
    ):
        own = [
            (p["distinct"], max(p["kl_bits"], 1e-5)) for p in found if name == _family(p["policy"])
        ]
        axes.plot(*zip(*sorted(own), strict=True), marker="o", markersize=4, label=name)
    axes.set(xlabel=f"distinct experts for {WINDOW} tokens", ylabel="KL, bits a token")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _family(spec: str) -> str:
    name, *arguments = spec.split(":")
    if "," in spec:
        return f"{name}, by layer"
    return f"{name}, squared" if name == "des_vote" and len(arguments) == 3 else name


def decoded_together(texts: Texts, own: Sequence[str], tokens: int) -> dict[str, Any]:
    """A table of `batch`."""
    found = {
        spec: batch(texts, spec, tokens)
        for spec in (*own, f"des_vote:0.281:{WINDOW}:2", f"des_vote:0.5:{WINDOW}:2")
    }
    print_table(
        f"{WINDOW} texts decoded side by side",
        ("policy", "worse by %", "distinct without", "distinct"),
        [
            [spec, 100 * b["worse"], b["distinct_without"], b["distinct_with"]]
            for spec, b in found.items()
        ],
    )
    return found


def prompts_of_lengths(texts: Texts) -> list[dict[str, Any]]:
    """A table of `by_length`."""
    rows = [
        (spec, tokens, by_length(texts, spec, tokens))
        for spec in ("pesf:0.3", "pesf:0.7")
        for tokens in (128, 512, 2048)
    ]
    print_table(
        "Prompts of several lengths",
        ("policy", "tokens", "worse by %", "KL bits", "dropped %"),
        [
            [spec, tokens, 100 * cost.worse, f"{cost.kl_bits:.4f}", 100 * cost.dropped]
            for spec, tokens, cost in rows
        ],
    )
    return [
        {"policy": spec, "tokens": tokens, "worse": cost.worse, "kl_bits": cost.kl_bits}
        for spec, tokens, cost in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer policies, less text")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    sizes = (2_000, 2_000) if options.quick else (15_000, 6_000)
    texts = Texts(MoE.from_pretrained(options.model), *sizes)
    ratios = medians(texts)
    half = texts.price(["top_p:1"])[0].distinct_without / 2
    own = allotted(texts, half)
    costs = texts.price([*own, *specs_of(ratios, quick=options.quick)])
    found = list(points(costs))
    print_table(
        f"{costs[0].without:.4f} bits per byte and {2 * half:.2f} distinct experts for {WINDOW} "
        "tokens without policies",
        ("policy", "read as", "worse by %", "KL bits", "same token", "distinct", "dropped %"),
        [
            [
                p["policy"], p["phase"], 100 * p["worse"], f"{p['kl_bits']:.4f}",
                f"{p['same_token']:.3f}", p["distinct"], 100 * p["dropped"],
            ]
            for p in found
        ],
    )  # fmt: skip
    side_by_side = decoded_together(texts, own, 32 if options.quick else 192)
    lengths = [] if options.quick else prompts_of_lengths(texts)
    if options.plot is not None:
        plot(found, options.plot)
    without = {"bits_per_byte": round(costs[0].without, 6), "distinct": round(2 * half, 3)}
    print_json(
        {**facts, "without": without, "points": found, "batch": side_by_side, "lengths": lengths}
    )


if __name__ == "__main__":
    main()
