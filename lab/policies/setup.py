"""What `lab.policies` compares: texts, shares of experts by layer, and a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from moe import MoE
from moe.commands.calibrate.record import record_trace
from moe.commands.evaluate.policy_costs import (
    WINDOW,
    PolicyCost,
    PolicyCostMeter,
    Variant,
    distinct_experts,
    routed_by,
)
from moe.commands.evaluate.scoring import windows_of
from moe.commands.trace.findings import weight_ratios
from moe.describe.routers import enable_policies
from moe.loader import ROUTING_POLICIES
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from routing import PolicyChain, parse_policies

ROOT = Path(__file__).parents[2]
TEXTS = ("prose", "python", "cpp")
LONGEST = 2048
"""Tokens of the longest prompt of `by_length`; what is left of a text is not read."""
SIZES = (6, 8, 9, 10, 12, 16)
"""Core sets that `allotted` chooses among, of 32 experts."""


class Texts:
    """Test text from the beginning of the held-out files, and other text from their middle."""

    def __init__(self, model: MoE, test_bytes: int, other_bytes: int) -> None:
        self.model = model
        texts = [(ROOT / f"tests/data/heldout_{name}.txt").read_text() for name in TEXTS]
        self.whole = [text[:test_bytes] for text in texts]
        self.num_bytes = sum(len(text.encode()) for text in self.whole)
        self.test = [window for text in self.whole for window in windows_of(model, text)]
        middle = [text[len(text) // 2 :][:other_bytes] for text in texts]
        self.other = [window for text in middle for window in windows_of(model, text)]

    def price(self, specs: Sequence[str], *, other: bool = False) -> list[PolicyCost]:
        """Each policy alone, read as what it is for."""
        chain = parse_policies(specs, lossless=False, more=ROUTING_POLICIES)
        enable_policies(chain, self.model.backbone, self.model.experts)
        prices = PolicyCostMeter(
            self.model, [Variant(PolicyChain((own,))) for own in chain.policies]
        )
        for window in self.other if other else self.test:
            prices.add(window)
        return list(prices.costs(self.num_bytes))


def allotted(texts: Texts, mean: float) -> list[str]:
    """A policy with a share for each layer, for a mean of so many experts a layer, by what sharing
    in one layer alone does to other text: the least sum of divergences, found exactly."""
    model = texts.model
    experts = [layer.num_experts for layer in model.experts.layers]
    specs = [
        _vote([size / e if own == at else 1 for own, e in enumerate(experts)])
        for at in range(len(experts))
        for size in SIZES
    ]
    damage = iter([cost.kl_bits for cost in texts.price(specs, other=True)])
    tables = [{size: next(damage) for size in SIZES} for _ in experts]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for table in tables:
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for total, (sum_, sizes) in best.items():
            for size, kl in table.items():
                made = sum_ + kl, (*sizes, size)
                longer[total + size] = min(longer.get(total + size, (math.inf, ())), made)
        best = longer
    _, sizes = min(found for total, found in best.items() if total <= mean * len(experts))
    return [_vote([size / e for size, e in zip(sizes, experts, strict=True)])]


def _vote(shares: Sequence[float]) -> str:
    # Rounded down, so that rounding up to whole experts gives the number that was meant.
    listed = ",".join(f"{math.floor(1000 * share) / 1000:g}" for share in shares)
    return f"des_vote:{listed}:{WINDOW}:2"


def medians(texts: Texts) -> str:
    """Each layer's median of second over first weight on other text."""
    model = texts.model
    with routed_by(model, PolicyChain()):
        trace = record_trace(model.backbone, model.experts, texts.other, row_bytes=0)
    return ",".join(f"{ratio:.3f}" for ratio in weight_ratios(trace.weights))


def by_length(texts: Texts, spec: str, tokens: int) -> PolicyCost:
    """Return what a policy for prompts costs with prompts of at most so many tokens."""
    chain = parse_policies([spec], lossless=False, more=ROUTING_POLICIES)
    prices = PolicyCostMeter(texts.model, [Variant(chain)])
    for text in texts.whole:
        ids = texts.model.codec.encode(text)
        for start in range(0, len(ids) // LONGEST * LONGEST, tokens):
            prices.add(ids[start : start + tokens])
    return prices.costs(texts.num_bytes)[0]


def batch(texts: Texts, spec: str, tokens: int) -> dict[str, float]:
    """A policy for eight texts decoded side by side, each token given: bits a token and distinct
    experts, with and without."""
    model = texts.model
    chain = parse_policies([spec], lossless=False, more=ROUTING_POLICIES)
    enable_policies(chain, model.backbone, model.experts)
    apart = max(len(texts.test) // WINDOW, 1)
    windows = [texts.test[i * apart % len(texts.test)][:tokens] for i in range(WINDOW)]
    found = {}
    for name, used in (("without", PolicyChain()), ("with", chain)):
        with routed_by(model, used) as visited, torch.inference_mode():
            caches = [model.backbone.new_cache(tokens) for _ in windows]
            bits = distinct = 0.0
            for at in range(tokens - 1):
                work = [Work([w[at]], cache) for w, cache in zip(windows, caches, strict=True)]
                lanes = model.backbone.lanes(work, "decode")
                run_lanes(lanes, model.experts.run)
                logits = torch.cat([row for lane in lanes for row in lane.result()])
                after = torch.tensor([window[at + 1] for window in windows])
                bits -= float(logits.log_softmax(-1).gather(1, after[:, None]).sum()) / math.log(2)
                distinct += float(
                    distinct_experts(visited.of_tokens(WINDOW), WINDOW).double().mean()
                )
        found[f"bits_{name}"] = round(bits / (tokens - 1) / len(windows), 5)
        found[f"distinct_{name}"] = round(distinct / (tokens - 1), 2)
    return {"worse": round(found["bits_with"] / found["bits_without"] - 1, 6), **found}
