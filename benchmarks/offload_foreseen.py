"""A predictor for replayed routing: it knows the trace, and is wrong as often as real ones are.

The gate of the next layer on this layer's input was published to find 78.8 % of the experts (FATE);
here each layer further ahead finds that share of what the one before finds. For each expert missed
another one is guessed, so precision is as low as recall.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload_routing import Replay
from routing import Routing
from routing.predict import Forecast

RECALL = 0.788


class Foreseen:
    """See `routing.predict.Predictor`; for one sequence that decodes.

    Args:
        replay: which says where tokens go.
        experts: E of a layer.
        recall: for the next layer.
    """

    name = "foreseen"
    context = 1

    def __init__(self, replay: Replay, experts: int, recall: float = RECALL) -> None:
        self._replay, self._recall = replay, recall
        rng, trace = np.random.default_rng(0), replay.trace
        tokens, layers, top_k = trace.shape
        order = rng.random((tokens, layers, experts), dtype=np.float32)
        np.put_along_axis(order, trace, np.inf, axis=2)
        self._others = np.argpartition(order, top_k - 1, axis=2)[:, :, :top_k]
        self._luck = rng.random(trace.shape)

    def start(self, tokens: Tensor) -> None:
        """Nothing to learn: the trace knows the token."""

    def enter(self, layer: int, hidden_states: Tensor) -> None:
        """Nothing to learn."""

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        """Nothing to learn."""

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        trace = self._replay.trace
        layers, top_k = trace.shape[1:]
        last = layers - 1 if depth is None else min(layer + depth, layers - 1)
        targets = np.arange(layer + 1, last + 1)
        if len(targets) == 0:
            return Forecast.empty()
        tokens = [self._replay.position(target) for target in targets]
        recall = self._recall ** (targets - layer)
        found = self._luck[tokens, targets] < recall[:, None]
        experts = np.where(found, trace[tokens, targets], self._others[tokens, targets])
        return Forecast(
            torch.from_numpy(targets.repeat(top_k)),
            torch.from_numpy(experts.ravel()),
            torch.from_numpy(recall.repeat(top_k).astype(np.float32)),
            torch.from_numpy((targets - layer).repeat(top_k)),
        )
