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
from offload.prefetch import MAX_DEPTH
from routing import Routing
from routing.predict import Forecast

RECALL = 0.788
RUN = 12


class Foreseen:
    """See `routing.predict.Predictor`; for one sequence that decodes.

    Args:
        replay: which says where tokens go.
        experts: E of a layer.
        recall: that is stated, for the next layer.
        truth: share of the tokens, in runs of `RUN`, at which it is as good as stated; at the
            others everything that it says is wrong.
    """

    name = "foreseen"
    context = 1

    def __init__(
        self, replay: Replay, experts: int, recall: float = RECALL, truth: float = 1.0
    ) -> None:
        self._replay = replay
        rng, trace = np.random.default_rng(0), replay.trace
        tokens, layers, top_k = trace.shape
        order = rng.random((tokens, layers, experts), dtype=np.float32)
        np.put_along_axis(order, trace, np.inf, axis=2)
        others = np.argpartition(order, top_k - 1, axis=2)[:, :, :top_k]
        luck = rng.random(trace.shape)
        luck[(np.arange(tokens) // RUN * truth) % 1 >= truth] = 1.0
        self._recall = recall
        self._guesses = [  # of each distance
            np.where(luck < recall**ahead, trace, others) for ahead in range(1, MAX_DEPTH + 1)
        ]
        self._made: dict[int, list[list[Forecast]]] = {}

    def start(self, tokens: Tensor) -> None:
        """Nothing to learn: the trace knows the token."""

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        """Nothing to learn."""

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        depth = min(depth or MAX_DEPTH, MAX_DEPTH, self._replay.trace.shape[1] - 1 - layer)
        if depth <= 0:
            return Forecast.empty()
        if depth not in self._made:
            self._made[depth] = self._make(depth)
        return self._made[depth][layer + 1][self._replay.position(layer + 1)]

    def _make(self, depth: int) -> list[list[Forecast]]:
        """Of each layer, from -1 on, and token, as what guesses cost is not to be measured."""
        _, layers, top_k = self._replay.trace.shape
        ahead = torch.arange(1, depth + 1).repeat_interleave(top_k)
        chances, count = (self._recall**ahead).float(), layers - depth + 1
        near = [
            guesses[:, step : step + count] for step, guesses in enumerate(self._guesses[:depth])
        ]
        experts = torch.from_numpy(np.concatenate(near, axis=2)).unbind(1)
        return [
            [Forecast(ahead + layer, said, chances, ahead) for said in of_layer.unbind()]
            for layer, of_layer in enumerate(experts, -1)
        ]
