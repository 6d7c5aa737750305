"""What `lab.routers` measures of one trained model, all through the engine.

Legend: N tokens, K slots a token, E experts, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lab.routers.objectives import watched_routers
from lab.routers.recall import recalls
from lab.routers.router import LabRouter
from moe import MoE
from moe.calibration.trace import Trace
from moe.commands.calibrate.record import record_trace
from moe.commands.trace.findings import distinct
from offload.policies import LRU
from offload.replay import calls_of, hit_ratio
from routing.routers import RouterRule
from tests.oracles.replay_bounds import belady

RUN = 8
"""Consecutive tokens whose experts are joined."""
BATCH = 1024
"""Tokens of a step, where loads are counted step by step."""
NOISE = 0.1
"""Of the tokens, which are replaced by others."""
CACHED = 0.25
"""Of all experts, which a cache holds."""


@dataclass(frozen=True)
class Reading:
    """A model's held-out text: its bits per byte, where its tokens went, and router scores."""

    bits_per_byte: float
    trace: Trace
    entropy: float
    """Bits of a router's scores, normalised to sum to 1; mean over tokens and layers."""

    def ids(self, layer: int) -> np.ndarray:
        return self.trace.expert_ids[layer].long().numpy()

    @property
    def layers(self) -> range:
        return range(len(self.trace.num_experts))


@torch.inference_mode()
def read(model: MoE, windows: Sequence[list[int]], size: int) -> Reading:
    """Read windows whose predicted tokens stand for ``size`` bytes."""
    nats = 0.0
    with watched_routers(model.backbone.model) as calls:
        for window in windows:
            logits = model.logits(window)
            nats += float(cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum"))
        spread = [_entropy(call.router, call.logits) for call in calls]
    trace = record_trace(model.backbone, model.experts, windows)
    return Reading(nats / math.log(2) / size, trace, sum(spread) / len(spread))


def _entropy(router: LabRouter, logits: Tensor) -> float:
    if router.config.router == "relu":
        scores = logits.relu()
    elif router.config.router == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1)
    shares = scores / scores.sum(-1, keepdim=True).clamp_min(1e-9)
    return float(torch.special.entr(shares).sum(-1).mean()) / math.log(2)


def measure(
    folder: Path, learnt: Sequence[list[int]], windows: Sequence[list[int]], seed: int
) -> dict[str, Any]:
    """Every figure of the model in ``folder``; `folder`/earlier is compared with it.

    Args:
        learnt: text that predictors learn from; all else is of ``windows``.
    """
    model = MoE.from_pretrained(folder)
    tokenizer = model.codec.tokenizer
    assert tokenizer is not None
    size = sum(len(str(tokenizer.decode(window[1:])).encode()) for window in windows)
    now = read(model, windows, size)
    before = read(MoE.from_pretrained(folder / "earlier"), windows, size)
    noisy, kept = _noisy(windows, model.config.vocab_size, seed)
    disturbed = record_trace(model.backbone, model.experts, noisy, row_bytes=0)
    experts, slots = now.trace.num_experts[0], _slots(now)
    union = float(
        np.mean([distinct(now.ids(i), now.trace.lengths, RUN, experts) for i in now.layers])
    )
    return {
        "bits_per_byte": now.bits_per_byte,
        "experts_a_token": float(np.mean([(now.ids(i) >= 0).sum(1).mean() for i in now.layers])),
        "by_layer": [float((now.ids(i) >= 0).sum(1).mean()) for i in now.layers],
        "max_violation_batch": _violation(now, BATCH),
        "floor_batch": _floor(now, BATCH, seed),
        "max_violation": _violation(now, now.trace.num_tokens),
        "floor": _floor(now, now.trace.num_tokens, seed),
        "entropy_bits": now.entropy,
        "fluctuation": 1 - _common(before.trace, now.trace, None),
        "kept_under_noise": _common(now.trace, disturbed, kept),
        "reuse": _reuse(now),
        "union": union,
        "chunk_sparsity": 1 - union / experts,
        "cache_hits": hit_ratio(*slots, LRU(len(now.layers), experts), experts),
        "cache_best": belady(*slots),
        **recalls(model, learnt, now.trace),
    }  # fmt: skip


def _loads(reading: Reading, tokens: int) -> np.ndarray:
    """``(L, steps, E)``."""
    steps = reading.trace.num_tokens // tokens
    experts = reading.trace.num_experts[0]
    parts = [reading.ids(i)[: steps * tokens].reshape(steps, -1) for i in reading.layers]
    return np.array([[np.bincount(p[p >= 0], minlength=experts) for p in part] for part in parts])


def _violation(reading: Reading, tokens: int) -> float:
    """MaxVio of steps of so many tokens, mean over steps and layers that are visited at all."""
    loads = _loads(reading, tokens)
    visited = loads[loads.any(-1)]
    return float((visited.max(-1) / visited.mean(-1) - 1).mean())


def _floor(reading: Reading, tokens: int, seed: int) -> float:
    """MaxVio of a router that chooses as many experts at random: what sampling alone gives."""
    generator, experts = torch.Generator().manual_seed(seed), reading.trace.num_experts[0]
    count = round(float(np.mean([(reading.ids(i) >= 0).sum(1).mean() for i in reading.layers])))
    rule, found = RouterRule(max(count, 1)), []
    for _ in range(10):
        scores = torch.rand(tokens, experts, generator=generator)
        loads = rule.select(scores).tokens_per_expert(experts)
        found.append(float(loads.max() / loads.float().mean() - 1))
    return sum(found) / len(found)


def _common(some: Trace, others: Trace, tokens: Tensor | None) -> float:
    """Share of the visits of one trace that are in the other too, of all or some tokens."""
    both = total = 0
    for first, second in zip(some.expert_ids, others.expert_ids, strict=True):
        a, b = (ids if tokens is None else ids[tokens] for ids in (first, second))
        both += int(((a[:, :, None] == b[:, None]) & (a >= 0)[:, :, None]).sum())
        total += int((a >= 0).sum())
    return both / max(total, 1)


def _reuse(reading: Reading) -> float:
    """Share of a token's experts that the token before it has visited too."""
    both = total = 0
    for _, layers in reading.trace.sequences():
        for ids in layers:
            before, now = ids[:-1, None], ids[1:, :, None]
            both += int(((now == before) & (now >= 0)).sum())
            total += int((ids[1:] >= 0).sum())
    return both / max(total, 1)


def _noisy(
    windows: Sequence[list[int]], vocabulary: int, seed: int
) -> tuple[list[list[int]], Tensor]:
    """Windows with some tokens replaced, and the places of the others in all windows together."""
    generator = torch.Generator().manual_seed(seed)
    noisy, kept, start = [], [], 0
    for window in windows:
        replaced = torch.rand(len(window), generator=generator) < NOISE
        other = torch.randint(vocabulary, (len(window),), generator=generator)
        noisy.append(torch.where(replaced, other, torch.tensor(window)).tolist())
        kept.append(start + (~replaced).nonzero()[:, 0])
        start += len(window)
    return noisy, torch.cat(kept)


def _slots(reading: Reading) -> tuple[list[list[int]], int]:
    """Calls of one sequence after the other, and how many experts the cache holds."""
    experts = reading.trace.num_experts[0]
    width = max(reading.ids(i).shape[1] for i in reading.layers)
    rows = [
        np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)
        for ids in map(reading.ids, reading.layers)
    ]
    calls = [call for call in calls_of(np.stack(rows, 1), experts) if call]
    return calls, round(CACHED * experts * len(reading.layers))
