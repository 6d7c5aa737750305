"""Routing for models whose own says nothing: a trace with published locality, replayed.

A random model's router has no locality, and then no cache policy can help. `published_trace` makes
routing whose figures are those that were measured on Qwen3-30B-A3B:

- coverage: 16, 32, 64 and 128 tokens of different texts visit < 50, 55, < 70 and 86 % of a layer's
  experts (Layered Prefill, arXiv 2510.08055, table 1; uniform routing: 64, 87, 98 and 100 %);
- 38 % of a token's experts are also those of the token before (BigMoeOnEdge, issue 101).

Each layer's experts have log-normal popularity; a token keeps each expert of the token before with
a fixed probability and draws the others by popularity. Legend: T tokens, L layers, K experts each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from routing import Routing, RoutingContext, RoutingPolicy

SPREAD = 1.35
"""Standard deviation of the logarithm of popularity."""
KEPT = 0.25
"""Probability that an expert is kept from the token before."""
COVERAGE_TOKENS = (16, 32, 64, 128)
PUBLISHED_COVERAGE = {16: 0.50, 32: 0.55, 64: 0.70, 128: 0.86}
PUBLISHED_SAME = 0.38

Trace = NDArray[np.int64]
"""``(T, L, K)`` expert ids, ascending."""


def published_trace(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> Trace:
    """Routing of one sequence."""
    rng = np.random.default_rng(seed)
    popularity = SPREAD * rng.normal(size=(layers, experts))
    trace = np.empty((tokens, layers, top_k), dtype=np.int64)
    before = np.zeros((layers, experts), dtype=bool)
    for token in range(tokens):
        kept = before & (rng.random((layers, experts)) < KEPT)
        # Gumbel's trick: the largest of these are a draw by popularity without replacement.
        order = popularity + rng.gumbel(size=(layers, experts)) + np.where(kept, 1e9, 0.0)
        chosen = np.argpartition(-order, top_k - 1, axis=1)[:, :top_k]
        trace[token] = np.sort(chosen, axis=1)
        before[:] = False
        np.put_along_axis(before, chosen, True, axis=1)
    return trace


def locality(trace: Trace, experts: int, seed: int = 0) -> dict[str, float]:
    """The figures of a trace: coverage of so many tokens far apart, share of experts kept."""
    rng = np.random.default_rng(seed)
    tokens, layers, _ = trace.shape
    figures = {}
    for count in COVERAGE_TOKENS:
        if count > tokens // 4:
            continue
        distinct = [
            len(np.unique(trace[rng.choice(tokens, count, replace=False), layer]))
            for layer in range(layers)
            for _ in range(4)
        ]
        figures[f"coverage_{count}"] = round(float(np.mean(distinct)) / experts, 3)
    same = (trace[1:, :, :, None] == trace[:-1, :, None, :]).any(-1).mean()
    return figures | {"same_as_last_token": round(float(same), 3)}


@dataclass
class Replay(RoutingPolicy):
    """A routing policy that sends tokens where a trace says; from its start again at its end.

    What the model says then means nothing; the router's weights are kept, so that all is computed.
    """

    trace: Trace
    spec: str = "replay"
    _next: dict[int, int] = field(default_factory=dict)

    def position(self, layer: int) -> int:
        """Token of the trace that this layer sees next."""
        return self._next.get(layer, 0) % len(self.trace)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        return self.route(context.layer, routing.weights)

    def route(self, layer: int, weights: torch.Tensor) -> Routing:
        """Return where the trace sends the next tokens, with these ``(T, K)`` weights."""
        start = self._next.get(layer, 0)
        rows = np.arange(start, start + len(weights)) % len(self.trace)
        self._next[layer] = start + len(weights)
        return Routing(torch.from_numpy(self.trace[rows, layer]), weights)


@dataclass
class Record(RoutingPolicy):
    """A routing policy that changes nothing and remembers all; `trace` is what it has seen."""

    spec: str = "record"
    _seen: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, routing: Routing, context: RoutingContext) -> Routing:
        self._seen.setdefault(context.layer, []).append(routing.expert_ids.cpu().clone())
        return routing

    @property
    def trace(self) -> Trace:
        layers = [torch.cat(rows) for _, rows in sorted(self._seen.items())]
        return torch.stack(layers, dim=1).numpy()

    def forget(self) -> None:
        self._seen.clear()
