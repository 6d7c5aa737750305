"""From a trace to predictors: clues fitted on most of its sequences, and weighed on the others.

Every fifth sequence is kept from the clues, so that a table that knows its own text by heart is not
believed more than it deserves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.calibrate.artefacts import Fitted
from moe.calibrate.fit_gates import GateFitter, visits
from moe.calibrate.gates import FoundGate
from moe.calibrate.trace import Rows, Trace
from moe.commands.progress import OnStep
from routing.predict.base import Clue
from routing.predict.calibrated import PREDICTORS, Calibrated, Model
from routing.predict.ensemble import Situation, fit_situation
from routing.predict.lookahead import REACH
from routing.predict.path import CONTEXT, fit_path
from routing.predict.token_table import fit_token_table
from routing.routing import Routing

ASIDE = 5
"""Every so many-th sequence is kept from the clues."""

_MAX_WEIGHED = 4096  # rows; more change nothing


@torch.inference_mode(False)
@torch.no_grad()
def fit_predictors(
    trace: Trace, found: Sequence[FoundGate], vectors: Tensor, on_step: OnStep
) -> Fitted:
    """Fit every predictor that the trace and the gates allow.

    Args:
        trace: with rows, of at least `ASIDE` sequences.
        found: of each MoE layer.
        vectors: ``(V, D)``, where the path predictor's token vectors begin.
        on_step: hears how far it is.
    """
    assert trace.rows is not None
    assert len(trace.lengths) >= ASIDE
    sequence = torch.arange(len(trace.lengths)).repeat_interleave(torch.tensor(trace.lengths))
    learn = sequence % ASIDE != ASIDE - 1
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
    gates = GateFitter(trace, found, learn[trace.rows.tokens])
    found_clues: list[Clue] = [table, path, *gates.clues(on_step)]
    clues = {clue.name: clue for clue in found_clues}
    aside = ~learn[trace.rows.tokens]
    stride = max(int(aside.sum()) // _MAX_WEIGHED, 1)
    rows = torch.where(aside)[0][::stride]
    weights = _weigh(clues, trace, trace.rows, contexts, rows, on_step)
    model = Model(tuple(trace.num_experts), len(vectors), gates.rules)
    return Fitted(Calibrated(model, clues, weights), gates.unavailable)


def _weigh(
    clues: dict[str, Clue],
    trace: Trace,
    kept: Rows,
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
        if kept.entered:
            for clue in clues.values():
                clue.enter(layer, kept.entered[layer][rows])
            fit(layer - 1, 1)
        routing = Routing(
            trace.expert_ids[layer][tokens].long(), trace.weights[layer][tokens].float()
        )
        for clue in clues.values():
            clue.observe(layer, kept.read[layer][rows], routing)
        fit(layer, REACH)
    return {name: fitted for name, fitted in weights.items() if fitted}
