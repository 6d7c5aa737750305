"""Evidence about experts, weighed into probabilities by logistic regression.

An `EvidenceSource` gives a number for each expert that grows with how likely a row needs it. The
`Ensemble` turns the numbers of one or more sources into a probability. Its weights are fitted on
calibration rows, separately for each `Situation`: the target layer, how far ahead it is, and which
sources have something to say.
Legend: R calibration rows, T rows, W tokens of context, H hidden, E experts, M sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from routing.predict.forecast import Floats, Forecast
from routing.routing import Routing

Tensors = Mapping[str, Tensor]
"""Tensors that a source has learnt, as a file keeps them."""

Situation = tuple[int, int, int]
"""Target layer; its distance, or 0 if no source depends on it; a bit for each source that spoke."""

SituationWeights = Mapping[Situation, Tensor]
"""``(M + 1,)`` float32 for each situation: the weight of each source, then the offset."""

IMPROBABLE = 0.02
"""Forecasts leave out less probable experts: they cost time and change nothing."""

_NEWTON_STEPS, _RIDGE = 12, 1e-3
_MAX_SAMPLES = 1 << 18


class EvidenceSource(ABC):
    """One way to guess experts. It is shown the same events as a `Predictor`.

    Attributes:
        name: in profiles, files and tables.
        context: W, the tokens of context that `start` takes; 1 is only the token itself.
        reach: most MoE layers ahead, if evidence depends on the distance; None if it is known at
            the start of the step and does not.
    """

    name: str
    context = 1
    reach: int | None = None

    def start(self, tokens: Tensor) -> None:
        """See `Predictor.start`."""
        del tokens

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        """See `Predictor.observe`."""
        del layer, hidden_states, routing

    @abstractmethod
    def evidence(self, layer: int, target: int) -> Floats | None:
        """``(T, E)`` for ``target`` after ``layer`` was observed (-1: none); None if unknown."""

    @abstractmethod
    def tensors(self) -> Tensors:
        """All that it takes to restore this source."""


class Ensemble:
    """A `Predictor` that weighs evidence.

    Args:
        name: in profiles.
        sources: at least one.
        weights: of the situations that calibration met; in others there is no forecast.
        num_layers: MoE layers of the model.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[EvidenceSource],
        weights: SituationWeights,
        num_layers: int,
    ) -> None:
        self.name = name
        self.context = max(source.context for source in sources)
        self.num_layers = num_layers
        self._sources = list(sources)
        self._weights = {key: value.tolist() for key, value in weights.items()}

    def start(self, tokens: Tensor) -> None:
        for source in self._sources:
            source.start(tokens)

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        for source in self._sources:
            source.observe(layer, hidden_states, routing)

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        last = self.num_layers if depth is None else min(layer + 1 + depth, self.num_layers)
        guesses = {target: self.rows(layer, target) for target in range(layer + 1, last)}
        spoken = {target: rows for target, rows in guesses.items() if rows is not None}
        return Forecast.of_rows(layer, spoken, IMPROBABLE)

    def rows(self, layer: int, target: int) -> Floats | None:
        """``(T, E)`` probabilities that a row needs an expert of ``target``; None if unknown."""
        situation, evidence = _gather(self._sources, layer, target)
        weights = self._weights.get(situation)
        if weights is None:
            return None
        odds = sum((weights[index] * rows for index, rows in evidence.items()), weights[-1])
        return sigmoid(odds)


def _gather(
    sources: Sequence[EvidenceSource], layer: int, target: int
) -> tuple[Situation, dict[int, Floats]]:
    """The situation, and the evidence by index of its source."""
    said = {index: source.evidence(layer, target) for index, source in enumerate(sources)}
    spoken = {index: rows for index, rows in said.items() if rows is not None}
    depends = any(sources[index].reach is not None for index in spoken)
    bits = sum(1 << index for index in spoken)
    return (target, target - layer if depends else 0, bits), spoken


def fit_situation(
    weights: dict[Situation, Tensor],
    sources: Sequence[EvidenceSource],
    layer: int,
    target: int,
    visits: Tensor,
) -> None:
    """Fit the situation that the sources are in now, and add its weights unless they are there.

    Args:
        visits: ``(R, E)`` bool, which experts of ``target`` the rows shown to the sources need.
    """
    situation, spoken = _gather(sources, layer, target)
    if not spoken or situation in weights:
        return
    features = torch.stack([torch.tensor(rows).flatten() for rows in spoken.values()], 1)
    fitted = fit_logistic(features, visits.flatten())
    whole = torch.zeros(len(sources) + 1)
    whole[[*spoken, -1]] = fitted
    weights[situation] = whole


def fit_logistic(features: Tensor, labels: Tensor) -> Tensor:
    """``(M + 1,)`` weights and offset of the logistic regression on ``(N, M)`` features.

    Newton's method with a small ridge penalty, on at most `_MAX_SAMPLES` evenly spaced samples.
    """
    stride = -(-len(features) // _MAX_SAMPLES)
    x, y = features[::stride].double(), labels[::stride].double()
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    rate = y.mean().clamp(1e-6, 1 - 1e-6)
    weights = torch.zeros(x.shape[1], dtype=x.dtype)
    weights[-1] = rate.logit()
    pull = torch.full_like(weights, _RIDGE * len(x) ** 0.5)
    pull[-1] = 1e-6
    for _ in range(_NEWTON_STEPS):
        p = torch.sigmoid(x @ weights)
        gradient = x.T @ (p - y) + pull * weights
        curvature = (x * (p * (1 - p))[:, None]).T @ x + torch.diag(pull + 1e-9)
        step = torch.linalg.solve(curvature, gradient)
        weights = weights - step * min(1.0, 4.0 / float(step.abs().max().clamp_min(1e-12)))
    return weights.float()


def floats(tensor: Tensor) -> Floats:
    """A tensor on any device as float32 in numpy; shares memory where it can."""
    array: Floats = tensor.detach().float().cpu().numpy()
    return array


def sigmoid(odds: Floats) -> Floats:
    """The logistic function; log odds below -60 count as -60, which avoids overflow."""
    probability: Floats = np.reciprocal(1 + np.exp(np.minimum(-odds, 60.0)))
    return probability
