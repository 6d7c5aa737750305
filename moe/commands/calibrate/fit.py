"""Fit predictors to a trace: evidence sources on most of its sequences, their weights on the rest.

Every fifth sequence is held out from the sources, so that the weights do not overrate a source that
has memorised the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.calibration.files import FittedPredictors
from moe.calibration.trace import SampledRows, Trace
from moe.commands.console import OnStep
from moe.describe.routers import find_selectors
from moe.network.backbone import Backbone
from moe.network.moe_layer import Selector
from routing.predict.calibrated import PREDICTORS, CalibratedPredictors, PredictedModel
from routing.predict.ensemble import EvidenceSource, Situation, fit_situation, floats
from routing.predict.lookahead import ANY_DISTANCE, REACH, Gate, Lookahead, fit_gate
from routing.predict.path import CONTEXT, fit_path
from routing.predict.token_table import fit_token_table
from routing.routers import RouterRule
from routing.routing import Routing

HELD_OUT_EVERY = 5
"""One sequence in this many is held out from the sources."""

_MAX_WEIGHED = 4096  # rows to fit weights on; more change nothing
_AGREES = 0.99  # share of tokens for which a gate must choose what the router chose


@dataclass(frozen=True)
class FoundGate:
    """The gate of one MoE layer, or None and the reason why it was not found."""

    gate: Gate | None
    reason: str = ""


def find_gates(backbone: Backbone) -> list[FoundGate]:
    """The gate of each MoE layer, copied in float32 so that it outlives the model.

    Without a gate, look-ahead is fitted to the router's choices alone, and its raw form is not
    available; see `moe.describe.routers`.
    """
    return [FoundGate(_gate(found.selector), found.reason) for found in find_selectors(backbone)]


def _gate(selector: Selector | None) -> Gate | None:
    if selector is None:
        return None
    correction = selector.rule.correction
    rule = replace(selector.rule, correction=None if correction is None else _copy(correction))
    bias = None if selector.bias is None else _copy(selector.bias)
    return Gate(_copy(selector.weight), rule, bias)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


@torch.inference_mode(False)
@torch.no_grad()
def fit_predictors(
    trace: Trace, found: Sequence[FoundGate], vectors: Tensor, on_step: OnStep
) -> FittedPredictors:
    """Fit every predictor that the trace and the gates allow.

    Args:
        trace: with rows, of at least `HELD_OUT_EVERY` sequences.
        found: for each MoE layer.
        vectors: ``(V, D)``, initial token vectors of the path predictor.
        on_step: called with the task, the steps done and all steps.
    """
    assert trace.rows is not None
    assert len(trace.lengths) >= HELD_OUT_EVERY
    sequence = torch.arange(len(trace.lengths)).repeat_interleave(torch.tensor(trace.lengths))
    learn = sequence % HELD_OUT_EVERY != HELD_OUT_EVERY - 1
    contexts = trace.contexts(CONTEXT)
    ids = [layer[learn] for layer in trace.expert_ids]
    on_step("token table", 0, 1)
    table = fit_token_table(contexts[learn, -2:], ids, trace.num_experts, len(vectors))
    path = fit_path(
        contexts[learn],
        ids,
        trace.num_experts,
        vectors,
        on_step=lambda done, total: on_step("path predictor", done, total),
    )
    gates = _LookaheadFitter(trace, found, learn[trace.rows.tokens])
    fitted: list[EvidenceSource] = [table, path, *gates.sources(on_step)]
    sources = {source.name: source for source in fitted}
    held_out = ~learn[trace.rows.tokens]
    stride = max(int(held_out.sum()) // _MAX_WEIGHED, 1)
    rows = torch.where(held_out)[0][::stride]
    weights = _fit_weights(sources, trace, trace.rows, contexts, rows, on_step)
    model = PredictedModel(tuple(trace.num_experts), len(vectors), gates.rules)
    return FittedPredictors(CalibratedPredictors(model, sources, weights), gates.unavailable)


def _fit_weights(
    sources: Mapping[str, EvidenceSource],
    trace: Trace,
    sampled: SampledRows,
    contexts: Tensor,
    rows: Tensor,
    on_step: OnStep,
) -> dict[str, dict[Situation, Tensor]]:
    """Show the sources rows ``(R,)`` of the sample as one step; fit each situation that occurs."""
    layers = len(trace.num_experts)
    tokens = sampled.tokens[rows]
    used = [
        visits(ids[tokens], experts)
        for ids, experts in zip(trace.expert_ids, trace.num_experts, strict=True)
    ]
    weights: dict[str, dict[Situation, Tensor]] = {name: {} for name in PREDICTORS}

    def fit(layer: int, depth: int) -> None:
        for name, parts in PREDICTORS.items():
            own = [sources[part] for part in parts if part in sources]
            for target in range(layer + 1, min(layer + 1 + depth, layers)):
                fit_situation(weights[name], own, layer, target, used[target])

    for source in sources.values():
        source.start(contexts[tokens])
    fit(-1, layers)
    for layer in range(layers):
        on_step("weights", layer, layers)
        routing = Routing(
            trace.expert_ids[layer][tokens].long(), trace.weights[layer][tokens].float()
        )
        for source in sources.values():
            source.observe(layer, sampled.expert_inputs[layer][rows], routing)
        fit(layer, REACH)
    return {name: fitted for name, fitted in weights.items() if fitted}


class _LookaheadFitter:
    """Fits gates to the rows of earlier layers.

    Args:
        trace: with rows.
        found: for each MoE layer.
        learn: ``(R,)`` bool, the rows to fit on.

    Attributes:
        rules: each layer's router rule; for an unknown gate, top-k with its mean number of experts.
        unavailable: name of each missing source -> why it is missing.
    """

    def __init__(self, trace: Trace, found: Sequence[FoundGate], learn: Tensor) -> None:
        assert trace.rows is not None
        self._read = trace.rows.expert_inputs
        self._learn = learn
        self.unavailable: dict[str, str] = {}
        chosen = [ids[trace.rows.tokens] for ids in trace.expert_ids]
        self._gates = [
            self._confirmed(layer, *pair)
            for layer, pair in enumerate(zip(found, chosen, strict=True))
        ]
        self.rules = tuple(
            RouterRule(max(round(int((ids >= 0).sum()) / len(ids)), 1))
            if gate is None
            else gate.rule
            for gate, ids in zip(self._gates, chosen, strict=True)
        )
        self._targets = [
            visits(ids, experts) if gate is None else torch.from_numpy(gate.logits(floats(read)))
            for gate, ids, experts, read in zip(
                self._gates, chosen, trace.num_experts, self._read, strict=True
            )
        ]

    def _confirmed(self, layer: int, found: FoundGate, chosen: Tensor) -> Gate | None:
        """The gate, if on the experts' inputs it makes the router's choices."""
        reason = found.reason
        if found.gate is not None:
            agreed = found.gate.choose(floats(self._read[layer])) == chosen.numpy()
            share = float(agreed.all(-1).mean())
            if share >= _AGREES:
                return found.gate
            reason = (
                "its gate, given what its experts read, chooses as the router did for "
                f"{share:.0%} of tokens only"
            )
        self.unavailable.setdefault("lookahead_raw", f"MoE layer {layer}: {reason}")
        return None

    def sources(self, on_step: OnStep) -> list[EvidenceSource]:
        """Fitted look-ahead, and raw look-ahead if gates are known."""
        layers = len(self._gates)
        jobs = [(t, d) for t in range(layers) for d in range(1, REACH + 1) if t >= d]
        raw, fitted = {}, {}
        for done, (target, distance) in enumerate(jobs):
            on_step("look-ahead", done, len(jobs))
            gate, before = self._gates[target], self._read[target - distance]
            if before.shape[1] != self._read[target].shape[1]:
                gate = None
            fitted[target, distance] = fit_gate(
                before[self._learn],
                self._targets[target][self._learn],
                self.rules[target],
                None if gate is None else gate.weight,
            )
            if gate is not None:
                raw[target, ANY_DISTANCE] = gate
        if not fitted:
            reason = "the model has one MoE layer only"
            self.unavailable |= dict.fromkeys(("lookahead", "lookahead_raw"), reason)
        found = {"lookahead": fitted, "lookahead_raw": raw}
        return [Lookahead(name, gates) for name, gates in found.items() if gates]


def visits(ids: Tensor, experts: int) -> Tensor:
    """``(T, E)`` float32 for expert ids ``(T, K)``: 1 where a token uses an expert, else 0."""
    slots = torch.zeros(len(ids), experts + 1)
    return slots.scatter_(1, ids.long() + 1, 1.0)[:, 1:]
