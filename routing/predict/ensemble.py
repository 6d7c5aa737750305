"""Clues weighed against each other: log odds that add up, fitted on calibration rows.

One logistic combination for each target layer and situation, a situation being how far ahead it is
and which clues have spoken. A predictor from a single clue is the same with one weight: what makes
its evidence a probability. Legend: R calibration rows, T rows, E experts, M clues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from routing.predict.base import Clue, Floats
from routing.predict.forecast import Forecast
from routing.predict.gate import sigmoid
from routing.routing import Routing

Situation = tuple[int, int, int]
"""Target layer; distance, 0 where no clue depends on it; bits of the clues that spoke."""

Weights = Mapping[Situation, Tensor]
"""``(M + 1,)`` float32: of each clue, and what is added."""

IMPROBABLE = 0.02
"""Experts below are left out of forecasts: they cost time and change nothing."""

_NEWTON_STEPS, _RIDGE = 12, 1e-3
_MAX_SAMPLES = 1 << 18


class Ensemble:
    """A `Predictor` from clues.

    Args:
        name: as it is chosen in a profile.
        clues: at least one.
        weights: of situations; in others there is no forecast.
        num_layers: MoE layers of the model.
    """

    def __init__(self, name: str, clues: Sequence[Clue], weights: Weights, num_layers: int) -> None:
        self.name = name
        self.context = max(clue.context for clue in clues)
        self.num_layers = num_layers
        self._clues = list(clues)
        self._weights = {key: value.tolist() for key, value in weights.items()}

    def start(self, tokens: Tensor) -> None:
        for clue in self._clues:
            clue.start(tokens)

    def enter(self, layer: int, hidden_states: Tensor) -> None:
        for clue in self._clues:
            clue.enter(layer, hidden_states)

    def observe(self, layer: int, hidden_states: Tensor, routing: Routing) -> None:
        for clue in self._clues:
            clue.observe(layer, hidden_states, routing)

    def forecast(self, layer: int, depth: int | None = None) -> Forecast:
        last = self.num_layers if depth is None else min(layer + 1 + depth, self.num_layers)
        guesses = {target: self.rows(layer, target) for target in range(layer + 1, last)}
        spoken = {target: rows for target, rows in guesses.items() if rows is not None}
        return Forecast.of_rows(layer, spoken, IMPROBABLE)

    def rows(self, layer: int, target: int) -> Floats | None:
        """``(T, E)`` probabilities that each row visits each expert of ``target``."""
        situation, evidence = listen(self._clues, layer, target)
        weights = self._weights.get(situation)
        if weights is None:
            return None
        odds = sum((weights[index] * rows for index, rows in evidence.items()), weights[-1])
        return sigmoid(odds)


def listen(clues: Sequence[Clue], layer: int, target: int) -> tuple[Situation, dict[int, Floats]]:
    """The situation, and the evidence by index of the clue."""
    said = {index: clue.evidence(layer, target) for index, clue in enumerate(clues)}
    spoken = {index: rows for index, rows in said.items() if rows is not None}
    depends = any(clues[index].reach is not None for index in spoken)
    bits = sum(1 << index for index in spoken)
    return (target, target - layer if depends else 0, bits), spoken


def fit_situation(
    weights: dict[Situation, Tensor], clues: Sequence[Clue], layer: int, target: int, visits: Tensor
) -> None:
    """Add the weights of a situation that the clues are in now, unless they are there already.

    Args:
        visits: ``(R, E)`` bool, what the rows that the clues were shown do at ``target``.
    """
    situation, spoken = listen(clues, layer, target)
    if not spoken or situation in weights:
        return
    features = torch.stack([torch.tensor(rows).flatten() for rows in spoken.values()], 1)
    fitted = fit_logistic(features, visits.flatten())
    whole = torch.zeros(len(clues) + 1)
    whole[[*spoken, -1]] = fitted
    weights[situation] = whole


def fit_logistic(features: Tensor, labels: Tensor) -> Tensor:
    """``(M + 1,)`` weights and offset of the logistic regression on ``(N, M)`` features."""
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
