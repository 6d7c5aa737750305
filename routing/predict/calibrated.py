"""All that calibration has learnt of one model: clues, and how each predictor weighs them.

A value without files; `moe.calibrate.artefacts` keeps it beside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from routing.predict.base import Clue
from routing.predict.ensemble import Ensemble, Weights
from routing.predict.gate import Gate
from routing.predict.lookahead import Lookahead, PreAttention
from routing.predict.path import Path
from routing.predict.token_table import TokenTable
from routing.routers import RouterRule
from routing.routing import RoutingError

PREDICTORS: dict[str, tuple[str, ...]] = {
    "token_table": ("token_table",),
    "path": ("path",),
    "lookahead_raw": ("lookahead_raw",),
    "lookahead": ("lookahead",),
    "pre_attention_raw": ("pre_attention_raw",),
    "pre_attention": ("pre_attention",),
    "ensemble": ("token_table", "path", "lookahead", "pre_attention"),
}
"""Clues of each predictor."""

ON_ENTERING = ("pre_attention_raw", "pre_attention")
"""Predictors that say nothing but of the rows that enter a block, which a running engine does not
show them: the next layer's experts are forecast before that, from this layer's rows. They are
calibrated and measured (`benchmarks.predict`), and cannot be chosen."""


@dataclass(frozen=True)
class Model:
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

    model: Model
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
    def restore(cls, tensors: Mapping[str, Tensor], model: Model) -> Calibrated:
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


def _token_table(parts: Mapping[str, Tensor], model: Model) -> Clue:
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


def _gates(parts: Mapping[str, Tensor], model: Model) -> dict[str, Gate]:
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


def _lookahead(name: str) -> Callable[[Mapping[str, Tensor], Model], Clue]:
    def restore(parts: Mapping[str, Tensor], model: Model) -> Clue:
        gates = {}
        for key, gate in _gates(parts, model).items():
            target, distance = map(int, key.split("."))
            gates[target, distance] = gate
        return Lookahead(name, gates)

    return restore


def _pre_attention(name: str) -> Callable[[Mapping[str, Tensor], Model], Clue]:
    def restore(parts: Mapping[str, Tensor], model: Model) -> Clue:
        gates = _gates(parts, model)
        return PreAttention(name, {int(key): gate for key, gate in gates.items()})

    return restore


_CLUES: dict[str, Callable[[Mapping[str, Tensor], Model], Clue]] = {
    "token_table": _token_table,
    "path": lambda parts, model: Path.restore(parts, model.num_experts),
    "lookahead_raw": _lookahead("lookahead_raw"),
    "lookahead": _lookahead("lookahead"),
    "pre_attention_raw": _pre_attention("pre_attention_raw"),
    "pre_attention": _pre_attention("pre_attention"),
}
