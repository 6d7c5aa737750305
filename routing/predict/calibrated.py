"""All that calibration has learnt of one model: clues, and how each predictor weighs them.

A value without files; `moe.calibration.artefacts` keeps it beside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from routing.predict.forecast import Clue, Floats, Forecast
from routing.predict.lookahead import Gate, Lookahead, sigmoid
from routing.predict.path import PathEvidence
from routing.predict.token_table import TokenTable
from routing.routers import RouterRule
from routing.routing import Routing, RoutingError

# ---- Clues weighed against each other: log odds that add up, fitted on calibration rows.
#
# One logistic combination for each target layer and situation, a situation being how far ahead it
# is and which clues have spoken. A predictor from a single clue is the same with one weight: what
# makes its evidence a probability. Legend: R calibration rows, T rows, E experts, M clues.

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


# ----

PREDICTORS: dict[str, tuple[str, ...]] = {
    "token_table": ("token_table",),
    "path": ("path",),
    "lookahead_raw": ("lookahead_raw",),
    "lookahead": ("lookahead",),
    "ensemble": ("token_table", "path", "lookahead"),
}
"""Clues of each predictor."""


@dataclass(frozen=True)
class PredictedModel:
    """What predictors must know of the model they are for.

    Attributes:
        num_experts: E of each MoE layer.
        vocabulary: token ids are below.
        rules: by which each layer's router chooses, given its logits.
    """

    num_experts: tuple[int, ...]
    vocabulary: int
    rules: tuple[RouterRule, ...]


@dataclass(frozen=True)
class Calibrated:
    """Clues by name, and weights by name of the predictor."""

    model: PredictedModel
    clues: Mapping[str, Clue]
    weights: Mapping[str, Weights]

    def predictor(self, name: str) -> Ensemble:
        """Raises `RoutingError` where this model has no such predictor.

        Predictors made here share their clues: show them the same steps.
        """
        if name not in self.weights:
            raise RoutingError(
                f"there is no predictor {name!r} for this model; there are "
                f"{', '.join(sorted(self.weights)) or 'none'}"
            )
        clues = [self.clues[clue] for clue in PREDICTORS[name] if clue in self.clues]
        return Ensemble(name, clues, self.weights[name], len(self.model.num_experts))

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, by names with dots."""
        found = {
            f"{name}.{part}": tensor
            for name, clue in self.clues.items()
            for part, tensor in clue.tensors().items()
        }
        for layer, rule in enumerate(self.model.rules):
            if rule.correction is not None:
                found[f"rules.{layer}.correction"] = rule.correction
        for name, weights in self.weights.items():
            if weights:
                found[f"weights.{name}.situations"] = torch.tensor(list(weights))
                found[f"weights.{name}.values"] = torch.stack(list(weights.values()))
        return {name: tensor.contiguous() for name, tensor in found.items()}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], model: PredictedModel) -> Calibrated:
        """From `tensors` of the same model. LookupError, RuntimeError or ValueError where they do
        not belong together."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            head, _, rest = name.partition(".")
            parts.setdefault(head, {})[rest] = tensor
        weights = {}
        for name in PREDICTORS:
            situations = parts.get("weights", {}).get(f"{name}.situations")
            if situations is not None:
                values = parts["weights"][f"{name}.values"]
                keys = [(int(t), int(d), int(b)) for t, d, b in situations.tolist()]
                weights[name] = dict(zip(keys, values, strict=True))
        clues = {name: _CLUES[name](parts[name], model) for name in _CLUES if name in parts}
        return cls(model, clues, weights)


def _token_table(parts: Mapping[str, Tensor], model: PredictedModel) -> Clue:
    keys, experts = parts["keys"], parts["experts"]
    rows = len(keys) + 1, len(model.num_experts)
    if experts.shape[:2] != rows or parts["log_odds"].shape != experts.shape:
        raise ValueError(f"a token table of {tuple(experts.shape)} for {rows} rows and layers")
    if parts["others"].shape != rows or bool((keys[1:] <= keys[:-1]).any()):
        raise ValueError("a token table whose rows are not in order")
    if bool(((experts < 0) | (experts >= min(model.num_experts))).any()):
        raise ValueError("a token table names experts that there are not")
    return TokenTable(
        parts["keys"],
        parts["experts"],
        parts["log_odds"],
        parts["others"],
        model.num_experts,
        model.vocabulary,
    )


def _gates(parts: Mapping[str, Tensor], model: PredictedModel) -> dict[str, Gate]:
    """By what precedes ``.weight``; a key begins with the layer whose rule holds."""
    gates = {}
    for name, weight in parts.items():
        key, _, part = name.rpartition(".")
        if part != "weight":
            continue
        layer = int(key.partition(".")[0])
        if weight.shape[0] != model.num_experts[layer]:
            raise ValueError(f"a gate of {len(weight)} experts for layer {layer}")
        bias, down = parts.get(f"{key}.bias"), parts.get(f"{key}.down")
        gates[key] = Gate(weight, model.rules[layer], bias, down)
    return gates


def _lookahead(name: str) -> Callable[[Mapping[str, Tensor], PredictedModel], Clue]:
    def restore(parts: Mapping[str, Tensor], model: PredictedModel) -> Clue:
        gates = {}
        for key, gate in _gates(parts, model).items():
            target, distance = map(int, key.split("."))
            gates[target, distance] = gate
        return Lookahead(name, gates)

    return restore


_CLUES: dict[str, Callable[[Mapping[str, Tensor], PredictedModel], Clue]] = {
    "token_table": _token_table,
    "path": lambda parts, model: PathEvidence.restore(parts, model.num_experts),
    "lookahead_raw": _lookahead("lookahead_raw"),
    "lookahead": _lookahead("lookahead"),
}
