"""Does online pruning cost less if some tokens are protected? (ODP, claim 10)

    python -m lab.policies.protection [--quick] [--model DIR]

Held-out text is read with `odp` and ratios from other text, with 2 and 10 % of the tokens protected
by what the paper goes by (size times attention received), by size alone, and by chance; and without
protection at several fractions of the same ratios. Every protected point is compared with what no
protection costs where as many visits are dropped, interpolated between the fractions: "in its
place". "held" is the share of all importance that the protected tokens hold: where it is hardly
more than their number, there is little to protect. The paper is about two experts a token; the
laboratory's models have two (`lab.routers.train softmax`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from lab.policies.setup import ROOT, Texts, medians
from moe import MoE
from moe.commands.evaluate.policy_costs import PolicyCost
from moe.network import moe_layer as policing
from moe.network.lanes import ExpertCall

FRACTIONS = (1.0, 0.97, 0.94, 0.9, 0.8, 0.6)
"""Of the ratios, without protection."""
PROTECTED = (0.02, 0.1)
WAYS = ("attention", "size", "chance")


def scaled(ratios: str, by: float) -> str:
    return ",".join(f"{by * float(ratio):.4f}" for ratio in ratios.split(","))


@contextmanager
def importance(way: str, held: dict[float, list[float]]) -> Iterator[None]:
    """Tokens matter by ``way`` while this is open; notes what shares of all importance the first
    tokens hold, for each share of tokens."""
    generator, own = torch.Generator().manual_seed(0), policing._importance

    def judged(call: ExpertCall) -> Tensor:
        size = call.hidden_states.float().abs().sum(1)
        found = {
            "attention": lambda: own(call),
            "size": lambda: size,
            "chance": lambda: torch.rand(size.shape, generator=generator),
        }[way]()
        for share in PROTECTED:
            first = found.sort(descending=True).values[: int(share * len(found))]
            held.setdefault(share, []).append(float(first.sum() / found.sum()))
        return found

    with patch.object(policing, "_importance", judged):
        yield


def in_place(curve: Sequence[PolicyCost], dropped: float) -> tuple[float, float]:
    """What no protection costs, ``(worse, kl_bits)``, where so many visits are dropped."""
    ordered = sorted(curve, key=lambda cost: cost.dropped)
    places = [cost.dropped for cost in ordered]
    worse, kl = ([getattr(c, name) for c in ordered] for name in ("worse", "kl_bits"))
    return float(np.interp(dropped, places, worse)), float(np.interp(dropped, places, kl))


def prompts(costs: Sequence[PolicyCost]) -> list[PolicyCost]:
    """Protection is for prompts."""
    return [cost for cost in costs if cost.phase == "prefill"]


def compare(texts: Texts, ratios: str) -> tuple[list[PolicyCost], list[dict[str, Any]]]:
    """The curve without protection, and each way of protecting beside it."""
    curve = prompts(texts.price([f"odp:{scaled(ratios, by)}:0" for by in FRACTIONS]))
    found = []
    for way in WAYS:
        held: dict[float, list[float]] = {}
        with importance(way, held):
            costs = prompts(texts.price([f"odp:{ratios}:{share}" for share in PROTECTED]))
        for share, cost in zip(PROTECTED, costs, strict=True):
            worse, kl = in_place(curve, cost.dropped)
            found.append(
                {
                    "way": way, "protected": share, "dropped": cost.dropped,
                    "worse": cost.worse, "worse_in_place": worse,
                    "kl_bits": cost.kl_bits, "kl_bits_in_place": kl,
                    "held": float(np.mean(held[share])),
                }
            )  # fmt: skip
    return curve, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    sizes = (2_000, 2_000) if options.quick else (15_000, 6_000)
    texts = Texts(MoE.from_pretrained(options.model), *sizes)
    ratios = medians(texts)
    curve, found = compare(texts, ratios)
    print_table(
        f"No tokens protected; ratios {ratios}",
        ("of the ratios", "dropped %", "worse by %", "KL bits"),
        [
            [f"{by:g}", 100 * cost.dropped, f"{100 * cost.worse:.3f}", f"{cost.kl_bits:.4f}"]
            for by, cost in zip(FRACTIONS, curve, strict=True)
        ],
    )
    print_table(
        "Tokens protected, beside none where as many visits are dropped",
        ("by", "tokens %", "held %", "dropped %", "worse %", "in its place", "KL", "in its place"),
        [
            [
                p["way"], 100 * p["protected"], f"{100 * p['held']:.1f}", 100 * p["dropped"],
                f"{100 * p['worse']:.3f}", f"{100 * p['worse_in_place']:.3f}",
                f"{p['kl_bits']:.4f}", f"{p['kl_bits_in_place']:.4f}",
            ]
            for p in found
        ],
    )  # fmt: skip
    without = {"bits_per_byte": curve[0].without, "ratios": ratios}
    points = [
        {"of": by, "dropped": c.dropped, "worse": c.worse, "kl_bits": c.kl_bits}
        for by, c in zip(FRACTIONS, curve, strict=True)
    ]
    print_json({**facts, **without, "unprotected": points, "protected": found})


if __name__ == "__main__":
    main()
