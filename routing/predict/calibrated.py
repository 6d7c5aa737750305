"""Everything that `moe calibrate` has fitted to one model: evidence sources and their weights.

`moe.calibration.files` writes it to files and reads it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from routing.predict.ensemble import Ensemble, EvidenceSource, SituationWeights
from routing.predict.lookahead import Gate, Lookahead
from routing.predict.path import PathEvidence
from routing.predict.token_table import TokenTable
from routing.routers import RouterRule
from routing.routing import RoutingError

PREDICTORS: dict[str, tuple[str, ...]] = {
    "token_table": ("token_table",),
    "path": ("path",),
    "lookahead_raw": ("lookahead_raw",),
    "lookahead": ("lookahead",),
    "ensemble": ("token_table", "path", "lookahead"),
}
"""The sources of each predictor. Weights on disk follow this order: append, do not insert."""


@dataclass(frozen=True)
class PredictedModel:
    """The facts that predictors must know of their model.

    Attributes:
        num_experts: E of each MoE layer.
        vocabulary: token ids are smaller.
        rules: how each layer's router chooses, given its logits.
    """

    num_experts: tuple[int, ...]
    vocabulary: int
    rules: tuple[RouterRule, ...]


@dataclass(frozen=True)
class CalibratedPredictors:
    """Sources by name, and weights by name of the predictor."""

    model: PredictedModel
    sources: Mapping[str, EvidenceSource]
    weights: Mapping[str, SituationWeights]

    def predictor(self, name: str) -> Ensemble:
        """Make a predictor; those made here share their sources, so show them the same steps.

        Raises:
            RoutingError: this model has no predictor of that name.
        """
        if name not in self.weights:
            raise RoutingError(
                f"there is no predictor {name!r} for this model; there are "
                f"{', '.join(sorted(self.weights)) or 'none'}"
            )
        sources = [self.sources[part] for part in PREDICTORS[name] if part in self.sources]
        return Ensemble(name, sources, self.weights[name], len(self.model.num_experts))

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, by dotted names."""
        found = {
            f"{name}.{part}": tensor
            for name, source in self.sources.items()
            for part, tensor in source.tensors().items()
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
    def restore(cls, tensors: Mapping[str, Tensor], model: PredictedModel) -> CalibratedPredictors:
        """Rebuild from `tensors` of the same model; unknown sources and predictors are ignored.

        Raises:
            LookupError, RuntimeError, ValueError: the tensors do not fit each other or the model.
        """
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
        sources = {name: _RESTORE[name](parts[name], model) for name in _RESTORE if name in parts}
        return cls(model, sources, weights)


def _token_table(parts: Mapping[str, Tensor], model: PredictedModel) -> EvidenceSource:
    keys, experts = parts["keys"], parts["experts"]
    rows = len(keys) + 1, len(model.num_experts)
    if experts.shape[:2] != rows or parts["log_odds"].shape != experts.shape:
        raise ValueError(f"a token table of {tuple(experts.shape)} for {rows} rows and layers")
    if parts["others"].shape != rows or bool((keys[1:] <= keys[:-1]).any()):
        raise ValueError("a token table whose rows are not in order")
    if bool(((experts < 0) | (experts >= min(model.num_experts))).any()):
        raise ValueError("a token table names experts that there are not")
    return TokenTable(
        keys, experts, parts["log_odds"], parts["others"], model.num_experts, model.vocabulary
    )


def _lookahead(name: str) -> Callable[[Mapping[str, Tensor], PredictedModel], EvidenceSource]:
    """A function that restores the gates ``{target}.{distance}.{weight, bias, down}``."""

    def restore(parts: Mapping[str, Tensor], model: PredictedModel) -> EvidenceSource:
        gates = {}
        for part, weight in parts.items():
            key, _, kind = part.rpartition(".")
            if kind != "weight":
                continue
            target, distance = map(int, key.split("."))
            if weight.shape[0] != model.num_experts[target]:
                raise ValueError(f"a gate of {len(weight)} experts for layer {target}")
            bias, down = parts.get(f"{key}.bias"), parts.get(f"{key}.down")
            gates[target, distance] = Gate(weight, model.rules[target], bias, down)
        return Lookahead(name, gates)

    return restore


_RESTORE: dict[str, Callable[[Mapping[str, Tensor], PredictedModel], EvidenceSource]] = {
    "token_table": _token_table,
    "path": lambda parts, model: PathEvidence.restore(parts, model.num_experts),
    "lookahead_raw": _lookahead("lookahead_raw"),
    "lookahead": _lookahead("lookahead"),
}
