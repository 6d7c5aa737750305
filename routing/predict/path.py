"""The path predictor: a small network from the last tokens to the experts of all layers at once.

It runs once a token, before the first layer. It is ExpertFlow's routing path predictor without its
encoder: a window and learnt averages over it do as well for a hundredth of the arithmetic. Token
vectors start from the model's own, so tokens that calibration did not see have one too.
Legend: N tokens of the trace, T rows, W tokens of context, V vocabulary, D size of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from routing.predict.ensemble import EvidenceSource, Tensors, floats
from routing.predict.forecast import Floats

CONTEXT = 16
VECTOR = 64
_HIDDEN, _NEAR, _AVERAGES = 256, 4, 2
_BATCH, _LEARNING_RATE, _DECAY = 512, 3e-3, 1e-2
_FIRST_LOG_ODDS = -2.0  # of every expert, before training


class PathNetwork(nn.Module):
    """``(T, W)`` tokens to ``(T, sum of E)`` log odds.

    The hidden layer reads the last `_NEAR` vectors and `_AVERAGES` learnt averages of the window.
    """

    def __init__(self, vectors: Tensor, outputs: int) -> None:
        super().__init__()
        nothing = torch.zeros(1, vectors.shape[1])  # row 0, for `NO_TOKEN`
        self.vectors = nn.Parameter(torch.cat([nothing, vectors.float()]))
        self.averages = nn.Parameter(torch.full((_AVERAGES, CONTEXT), 1 / CONTEXT))
        with torch.no_grad():
            self.averages[1, : CONTEXT // 2] = 0
        self.hidden = nn.Linear((_NEAR + _AVERAGES) * vectors.shape[1], _HIDDEN)
        self.out = nn.Linear(_HIDDEN, outputs)
        nn.init.constant_(self.out.bias, _FIRST_LOG_ODDS)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = nn.functional.embedding(tokens + 1, self.vectors)
        parts = [seen[:, -_NEAR:], self.averages @ seen]
        out: Tensor = self.out(
            gelu(self.hidden(torch.cat(parts, 1).flatten(1)), approximate="tanh")
        )
        return out


class PathEvidence(EvidenceSource):
    """Evidence from a trained network."""

    name = "path"
    context = CONTEXT

    def __init__(self, network: PathNetwork, num_experts: Sequence[int]) -> None:
        state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
        self._state = state | {"vectors": state["vectors"].half()}
        self._arrays = {name: floats(tensor) for name, tensor in state.items()}
        self._ends = list(accumulate(num_experts))
        self._tokens: NDArray[np.int64] | None = None
        self._evidence: Floats | None = None

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], num_experts: Sequence[int]) -> PathEvidence:
        vectors = tensors["vectors"]
        network = PathNetwork(vectors[1:], sum(num_experts))
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return cls(network, num_experts)

    def start(self, tokens: Tensor) -> None:
        self._tokens, self._evidence = tokens[:, -CONTEXT:].cpu().numpy(), None

    def evidence(self, layer: int, target: int) -> Floats | None:
        del layer
        if self._evidence is None:
            assert self._tokens is not None, "start() comes first"
            self._evidence = self._run(self._tokens)
        begin = self._ends[target - 1] if target else 0
        return self._evidence[:, begin : self._ends[target]]

    def _run(self, tokens: NDArray[np.int64]) -> Floats:
        """`PathNetwork.forward` in numpy: faster for a few rows."""
        arrays = self._arrays
        seen = arrays["vectors"][tokens + 1]
        parts = np.concatenate([seen[:, -_NEAR:], arrays["averages"] @ seen], 1)
        x = parts.reshape(len(tokens), -1) @ arrays["hidden.weight"].T + arrays["hidden.bias"]
        x = (
            0.5
            * x
            * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)))
        )
        odds: Floats = x @ arrays["out.weight"].T + arrays["out.bias"]
        return odds

    def tensors(self) -> Tensors:
        return self._state


def fit_path(
    tokens: Tensor,
    expert_ids: Sequence[Tensor],
    num_experts: Sequence[int],
    vectors: Tensor,
    *,
    passes: int = 4,
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> PathEvidence:
    """Train on a trace, with AdamW.

    Args:
        tokens: ``(N, CONTEXT)`` int64 contexts.
        expert_ids: of each layer ``(N, K)``, -1 for none.
        num_experts: E of each layer.
        vectors: ``(V, D)`` to start from.
        passes: epochs.
        on_step: called with the number of training steps done and in all.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = PathNetwork(vectors, sum(num_experts))
    steps = max(passes * len(tokens) // _BATCH, 1)
    optimizer = torch.optim.AdamW(network.parameters(), _LEARNING_RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps + 1)
    starts = [0, *accumulate(num_experts)]
    with torch.enable_grad():
        for step in range(steps):
            rows = torch.randint(len(tokens), (min(_BATCH, len(tokens)),), generator=generator)
            visits = torch.zeros(len(rows), starts[-1] + 1)
            for ids, first in zip(expert_ids, starts[:-1], strict=True):
                chosen = ids[rows].long()
                visits.scatter_(1, torch.where(chosen >= 0, chosen + first, starts[-1]), 1.0)
            loss = binary_cross_entropy_with_logits(network(tokens[rows]), visits[:, :-1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            on_step(step + 1, steps)
    return PathEvidence(network, num_experts)
