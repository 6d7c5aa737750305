"""Decisions of the controller against every fixed choice, by account (`speculation_account`)."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import print_table
from benchmarks.speculation_account import COSTS, MAX_DEPTH, MODES, Costs, Said, Spoken, World
from benchmarks.speculation_runs import Prompts
from benchmarks.speculation_runs import decode as say
from moe import MoE
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft
from moe.speculate.ngram import NGram
from moe.speculate.speculator import Speculator

TOKENS, TEXTS, AT_ONCE = 192, 96, 16
RUNS = {1: 8, 2: 6, 4: 4}
"""Decodings, one behind the other, by batch; else `FEWEST`."""
FEWEST = 3
SEEDS = 3
KINDS = ("rest", "look", "draft")

FIXED: dict[str, Callable[[World], Speculator]] = {
    "none": lambda world: world.fixed(MODES[0], 0),
    "ngram 6": lambda world: world.fixed(NGram.mode, MAX_DEPTH),
    "ngram 3": lambda world: world.fixed(NGram.mode, 3),
    "elastic 1": lambda world: world.fixed(MODES[0], 1),
    "elastic 3": lambda world: world.fixed(MODES[0], 3),
}


def texts_of(
    model: MoE, temperature: float, count: int = TEXTS, tokens: int = TOKENS
) -> list[Said]:
    """Return what a model says behind held-out prompts, the same each time."""
    prompts, said = Prompts(model).take(count), list[list[int]]()
    for start in range(0, count, AT_ONCE):
        given = prompts[start : start + AT_ONCE]
        said += say(model, None, given, tokens, temperature, seed=start).tokens
    return list(zip(prompts, said, strict=True))


def thoughts_of(texts: Sequence[Said], size: int) -> Tensor:
    """``(V,)`` what mostly follows each token: said behind those that are wrong."""
    following: dict[int, Counter[int]] = {}
    for prompt, said in texts:
        for token, then in pairwise(prompt + said):
            following.setdefault(token, Counter())[then] += 1
    found = torch.zeros(size, dtype=torch.long)
    for token, own in following.items():
        found[token] = own.most_common(1)[0][0]
    return found


def decode(
    world: World, speculator: Speculator, texts: Sequence[Said], thoughts_V: Tensor
) -> Iterator[tuple[str, int, float]]:
    """Say texts at once until the first is over; of each step its kind, tokens and time."""
    spoken = [Spoken(text) for text in texts]
    sequences = cast(list[RunningSequence], spoken)
    while all(len(each.token_ids) < len(each.said) for each in spoken):
        before = world.now
        drafts = speculator.propose(sequences, float("inf"))
        if drafts is None:
            resting = speculator._plain.resting
            kind = "rest" if resting else "look"
            world.step(len(spoken), 0, looks=not resting)
            made = [each.verify(PLAIN, thoughts_V[None]).tokens for each in spoken]
        else:
            drafted = sum(len(draft.tokens) for draft in drafts)
            kind = "draft" if drafted else "look"
            world.step(len(spoken), drafted, drafts=True)
            made = []
            for own, each, draft in zip(sequences, spoken, drafts, strict=True):
                verified = each.verify(draft, _logits(own, draft, thoughts_V))
                speculator.accept(own, draft, verified)
                made.append(verified.tokens)
        for each, new in zip(spoken, made, strict=True):
            each.token_ids = each.token_ids + [token.id for token in new]
        speculator.finish(alone=True)
        yield kind, sum(map(len, made)), world.now - before


def _logits(sequence: RunningSequence, draft: Draft, thoughts_V: Tensor) -> Tensor:
    read = [sequence.token_ids[-1], *draft.tokens]
    return torch.zeros(len(read), len(thoughts_V)).scatter_(1, thoughts_V[read][:, None], 1.0)


def compare(
    texts: Sequence[Said],
    thoughts_V: Tensor,
    costs: Costs,
    temperature: float,
    batch: int,
    seed: int,
) -> dict[str, Any]:
    """Return what the controller, which begins with knowing nothing, and fixed choices make of the
    same texts: tokens a second, and the share of the controller's time by kind of step."""
    runs = RUNS.get(batch, FEWEST)
    order = np.resize(np.random.default_rng(seed).permutation(len(texts)), (runs, batch))
    rates, steps = dict[str, float](), list[tuple[str, int, float]]()
    for name, made in {**FIXED, "auto": World.auto}.items():
        world = World(costs, temperature, seed)
        drafts = made(world)
        steps = [
            step
            for own in order
            for step in decode(world, drafts, [texts[index] for index in own], thoughts_V)
        ]
        rates[name] = _rate(steps)
    return {
        "speedup": rates["auto"] / rates["none"],
        "of_best": rates["auto"] / max(rates[name] for name in FIXED),
        "later_of_best": _rate(steps[len(steps) // 3 :]) / max(rates[name] for name in FIXED),
        "fixed": {name: rates[name] / rates["none"] for name in FIXED},
        "time": {k: sum(s for kind, _, s in steps if kind == k) / world.now for k in KINDS},
    }


def _rate(steps: Sequence[tuple[str, int, float]]) -> float:
    return sum(tokens for _, tokens, _ in steps) / sum(seconds for _, _, seconds in steps)


def account(model: MoE, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every point, on average over seeds, and the worst of them."""
    found = []
    for temperature in options.temperatures:
        texts = texts_of(model, temperature)
        thoughts_V = thoughts_of(texts, model.config.get_text_config().vocab_size)
        for residency, batch in product(options.residency, options.batch):
            costs = COSTS[residency]
            made = [
                compare(texts, thoughts_V, costs, temperature, batch, seed) for seed in range(SEEDS)
            ]
            point = {"batch": batch, "residency": residency, "temperature": temperature}
            for name in ("speedup", "of_best", "later_of_best"):
                point[name] = round(fmean(each[name] for each in made), 3)
                point[f"least_{name}"] = round(min(each[name] for each in made), 3)
            for name in ("fixed", "time"):
                point[name] = {
                    key: round(fmean(each[name][key] for each in made), 3) for key in made[0][name]
                }
            found.append(point)
    return found


def show_account(points_: Sequence[dict[str, Any]]) -> None:
    names = ("batch", "residency", "temperature")
    numbers = ("speedup", "least_speedup", "of_best", "least_of_best", "later_of_best")
    rows = [
        [
            *(str(point[name]) for name in names),
            *(f"{point[name]:.2f}" for name in numbers),
            *(f"{point[part][name]:.2f}" for part in ("fixed", "time") for name in point[part]),
        ]
        for point in points_
    ]
    columns = ["batch", "resident", "T", "auto", "least", "of best", "least", "later"]
    columns += [*FIXED, *(f"in {kind}" for kind in KINDS)]
    print_table("The controller by account: the shipped model's texts, drawn times", columns, rows)
