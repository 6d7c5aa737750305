"""From a trace to predictors: clues fitted on most of its sequences, and weighed on the others.

Every fifth sequence is kept from the clues, so that a table that knows its own text by heart is not
believed more than it deserves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.calibration.artefacts import FittedPredictors
from moe.calibration.gates import FoundGate
from moe.calibration.trace import SampledRows, Trace
from moe.commands.console import OnStep
from routing.predict.calibrated import (
    PREDICTORS,
    Calibrated,
    PredictedModel,
    Situation,
    fit_situation,
)
from routing.predict.forecast import Clue, floats
from routing.predict.lookahead import ANY_DISTANCE, REACH, Gate, Lookahead, fit_gate
from routing.predict.path import CONTEXT, fit_path
from routing.predict.token_table import fit_token_table
from routing.routers import RouterRule
from routing.routing import Routing

# ---- Look-ahead clues from a trace: raw where a gate is known, and fitted ones everywhere.

_AGREES = 0.99  # of tokens for which a gate must choose what the router chose


class LookaheadFitter:
    """Fits gates to earlier rows of one trace.

    Args:
        trace: with rows.
        found: of each MoE layer.
        learn: ``(R,)`` bool, rows that may be learnt from.

    Attributes:
        rules: by which each layer chooses; of an unknown gate as many as it takes on average.
        unavailable: why clues are missing, by their names.
    """

    def __init__(self, trace: Trace, found: Sequence[FoundGate], learn: Tensor) -> None:
        assert trace.rows is not None
        self._rows: SampledRows = trace.rows
        self._learn = learn
        self.unavailable: dict[str, str] = {}
        chosen = [ids[self._rows.tokens] for ids in trace.expert_ids]
        self._gates = [
            self._confirmed(*pair) for pair in enumerate(zip(found, chosen, strict=True))
        ]
        self.rules = tuple(
            RouterRule(_usual(ids)) if gate is None else gate.rule
            for gate, ids in zip(self._gates, chosen, strict=True)
        )
        self._targets = [
            visits(ids, experts) if gate is None else torch.from_numpy(gate.logits(floats(read)))
            for gate, ids, experts, read in zip(
                self._gates, chosen, trace.num_experts, self._rows.read, strict=True
            )
        ]

    def _confirmed(self, layer: int, known: tuple[FoundGate, Tensor]) -> Gate | None:
        """The gate, if it chooses what the router chose, given what the experts read."""
        (found, chosen), reason = known, known[0].reason
        if found.gate is not None:
            agreed = found.gate.choose(floats(self._rows.read[layer])) == chosen.numpy()
            share = float(agreed.all(-1).mean())
            if share >= _AGREES:
                return found.gate
            reason = (
                "its gate, given what its experts read, chooses as the router did for "
                f"{share:.0%} of tokens only"
            )
        self.unavailable.setdefault("lookahead_raw", f"MoE layer {layer}: {reason}")
        return None

    def clues(self, on_step: OnStep) -> list[Clue]:
        """Those that can be had."""
        layers = len(self._gates)
        jobs = [(t, d) for t in range(layers) for d in range(1, REACH + 1) if t >= d]
        raw, fitted = {}, {}
        for done, (target, distance) in enumerate(jobs):
            on_step("look-ahead", done, len(jobs))
            gate, before = self._gates[target], self._rows.read[target - distance]
            if before.shape[1] != self._rows.read[target].shape[1]:
                gate = None
            fitted[target, distance] = self._fit(
                target, before, None if gate is None else gate.weight
            )
            if gate is not None:
                raw[target, ANY_DISTANCE] = gate
        if not fitted:
            reason = "the model has one MoE layer only"
            self.unavailable |= dict.fromkeys(("lookahead", "lookahead_raw"), reason)
        found = {"lookahead": fitted, "lookahead_raw": raw}
        return [Lookahead(name, gates) for name, gates in found.items() if gates]

    def _fit(self, target: int, rows: Tensor, start: Tensor | None) -> Gate:
        logits = self._targets[target][self._learn]
        return fit_gate(rows[self._learn], logits, self.rules[target], start)


def _usual(ids: Tensor) -> int:
    """How many experts a token visits on average; at least 1."""
    return max(round(int((ids >= 0).sum()) / len(ids)), 1)


def visits(ids: Tensor, experts: int) -> Tensor:
    """``(T, E)`` float32 of expert ids ``(T, K)``: 1 where a token visits an expert, else 0."""
    slots = torch.zeros(len(ids), experts + 1)
    return slots.scatter_(1, ids.long() + 1, 1.0)[:, 1:]


# ----

HELD_OUT_EVERY = 5
"""Every so many-th sequence is kept from the clues."""

_MAX_WEIGHED = 4096  # rows; more change nothing


@torch.inference_mode(False)
@torch.no_grad()
def fit_predictors(
    trace: Trace, found: Sequence[FoundGate], vectors: Tensor, on_step: OnStep
) -> FittedPredictors:
    """Fit every predictor that the trace and the gates allow.

    Args:
        trace: with rows, of at least `HELD_OUT_EVERY` sequences.
        found: of each MoE layer.
        vectors: ``(V, D)``, where the path predictor's token vectors begin.
        on_step: hears how far it is.
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
    gates = LookaheadFitter(trace, found, learn[trace.rows.tokens])
    found_clues: list[Clue] = [table, path, *gates.clues(on_step)]
    clues = {clue.name: clue for clue in found_clues}
    aside = ~learn[trace.rows.tokens]
    stride = max(int(aside.sum()) // _MAX_WEIGHED, 1)
    rows = torch.where(aside)[0][::stride]
    weights = _weigh(clues, trace, trace.rows, contexts, rows, on_step)
    model = PredictedModel(tuple(trace.num_experts), len(vectors), gates.rules)
    return FittedPredictors(Calibrated(model, clues, weights), gates.unavailable)


def _weigh(
    clues: dict[str, Clue],
    trace: Trace,
    kept: SampledRows,
    contexts: Tensor,
    rows: Tensor,
    on_step: OnStep,
) -> dict[str, dict[Situation, Tensor]]:
    """Show the clues rows ``(R,)`` of `kept` as one step, and fit each situation they come into."""
    layers = len(trace.num_experts)
    tokens = kept.tokens[rows]
    seen = [
        visits(ids[tokens], experts)
        for ids, experts in zip(trace.expert_ids, trace.num_experts, strict=True)
    ]
    weights: dict[str, dict[Situation, Tensor]] = {name: {} for name in PREDICTORS}

    def fit(layer: int, depth: int) -> None:
        for name, parts in PREDICTORS.items():
            own = [clues[part] for part in parts if part in clues]
            for target in range(layer + 1, min(layer + 1 + depth, layers)):
                fit_situation(weights[name], own, layer, target, seen[target])

    for clue in clues.values():
        clue.start(contexts[tokens])
    fit(-1, layers)
    for layer in range(layers):
        on_step("weights", layer, layers)
        routing = Routing(
            trace.expert_ids[layer][tokens].long(), trace.weights[layer][tokens].float()
        )
        for clue in clues.values():
            clue.observe(layer, kept.read[layer][rows], routing)
        fit(layer, REACH)
    return {name: fitted for name, fitted in weights.items() if fitted}
