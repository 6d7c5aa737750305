"""The store of 30 billion parameters: real times, replayed routing, another model's text.

See `lab.speculation.replay` for what is real in it. Text is what the shipped model says 128
tokens behind held-out prompts. Acceptance of drafts by the model itself is measured on the shipped
model with as large a share of residents, those that the prompt weighs most: what a cache that
follows the text holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.offload_models import Target, targets
from benchmarks.offload_routing import Trace, published_trace
from benchmarks.speculation_contenders import Contender, median_errors, take_turns
from benchmarks.speculation_runs import MAX_DEPTH, PROMPT, Prompts, Texts, decode
from benchmarks.speculation_tables import describe
from lab.speculation.grid import Grid, Point
from lab.speculation.replay import (
    SPAN,
    Replayed,
    ReplayedDrafts,
    ReplayedLayers,
    ReplayedSpeculator,
    Says,
)
from moe import MoE
from moe.describe.routers import find_selectors
from moe.speculate.controller import AutoController
from moe.speculate.draft import Controller, FixedDepth, Mode
from moe.speculate.ngram import ModelFree, NGram
from routing import PolicyChain

TOKENS = 48
"""Of a decoding; each contender makes two, and the first two as many while there is everything to
learn."""
BEFORE = 128
"""Tokens that the shipped model has said before those: a text begins to repeat itself late."""
TEXTS, MOST = 24, 8
"""Texts of the shipped model, and sequences at once at most."""
MODES = (Mode("elastic", bits=4), Mode("elastic", bits=2))
KV_TOKENS = 4096

Rates = dict[Mode, Sequence[float]]


def texts_of(grid: Grid, temperature: float) -> Texts:
    """Return what the shipped model says in the middle of its answers to held-out prompts."""
    prompts = Prompts(grid.model).take(TEXTS)
    said: list[list[int]] = []
    for start in range(0, TEXTS, MOST):
        own = prompts[start : start + MOST]
        said += decode(grid.model, None, own, BEFORE + TOKENS, temperature).tokens
    return Texts([(text[BEFORE - PROMPT : BEFORE], text[BEFORE:]) for text in said])


def rates_at(grid: Grid, residency: float, temperature: float) -> Rates:
    """Acceptance by position of each mode, as the shipped model has it at that share of residents.

    The store has 4 bits. A draft of all of them is held to be like one of all 8 bits of the shipped
    model, and one of 2 bits like one of 2 bits: that is further from its target, so less is taken.
    """
    found: Rates = {}
    for mode, bits in zip(MODES, (8, 2), strict=True):
        cell = grid.measure(Point("prompt", residency, bits), 6, 64, temperature)
        rates = list(cell["by_position"])
        found[mode] = rates + rates[-1:] * (MAX_DEPTH - len(rates))
    return found


def contenders(
    model: MoE, rates: Rates, depths: Sequence[int], trace: Trace, texts: Texts
) -> list[Contender]:
    """No drafts, the controller, n-grams, and fixed depths; all follow one trace."""
    policy = Replayed(trace)
    says = Says(texts, policy)
    model.backbone.set_reader(says)
    model.experts.set_policies(PolicyChain((policy,)))
    selectors = [found.selector for found in find_selectors(model.backbone)]

    def made(controller: Controller, *model_free: ModelFree[Any]) -> ReplayedSpeculator:
        layers = ReplayedLayers(model.experts.layers, model._loaded.backend.forward, selectors)
        layers.replayed = policy
        drafts = ReplayedDrafts(model, layers, says, rates)
        return ReplayedSpeculator(controller, drafts, model_free)

    auto = AutoController(MODES)
    return [
        Contender("none", made(FixedDepth(MODES[0], 0)), 0),
        Contender("auto", made(auto, NGram()), None),
        Contender("ngram", made(FixedDepth(NGram.mode, MAX_DEPTH), NGram()), MAX_DEPTH),
        *(Contender(MODES[0].name, made(FixedDepth(MODES[0], depth)), depth) for depth in depths),
    ]


def replayed(
    grid: Grid, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool, dict[str, float | None]]:
    """Points of the large store, whether tokens were equal, and errors of predicted times; no
    points without the store."""
    found: list[dict[str, Any]] = []
    ours: list[Contender] = []
    same = True
    for target in targets(["30b"]):
        for residency in (r for r in options.residency if r < 1):
            model = _load(target, residency)
            layers = model.experts.layers
            top_k = model.config.get_text_config().num_experts_per_tok
            for temperature in options.temperatures:
                texts, rates = texts_of(grid, temperature), rates_at(grid, residency, temperature)
                for batch in (b for b in options.batch if b <= MOST):
                    trace = published_trace(
                        SPAN * (batch + 1), len(layers), layers[0].num_experts, top_k
                    )
                    own = contenders(model, rates, options.depths, trace, texts)
                    how: Any = texts, batch, TOKENS, 0.0, 0.0  # the text has been drawn already
                    same &= take_turns(model, own[:2], *how, early=True)
                    same &= take_turns(model, own, *how)
                    ours.append(own[1])
                    where = {"batch": batch, "residency": residency, "temperature": temperature}
                    found += describe(own, where)
                    print(where, [f"{c.name}{c.depth or ''} {c.rate:.2f}" for c in own], flush=True)
            model.close()
    return found, same, median_errors(ours)


def _load(target: Target, residency: float) -> MoE:
    settings = target.settings(residency, KV_TOKENS)
    settings |= {"offload": {"hot_set": False}, "speculation": {"mode": "elastic"}}
    return MoE.from_pretrained(target.store, settings, model={"expert_bits": 4})
