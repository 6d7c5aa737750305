"""How much of a model's routing each predictor foretells, for `lab.routers`.

The predictors of ``moe calibrate`` learn from one text and are asked about another, one layer
ahead as the engine does. Each token gets as many guesses as it visits experts, so
that recall means the same where a router takes any number: what is named needlessly is as much as
what is missed. The first MoE layer is left out, of which look-ahead has nothing to say.
Legend: T tokens, K slots, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe import MoE
from moe.calibration.trace import Trace
from moe.commands.calibrate.calibrate import token_vectors
from moe.commands.calibrate.fit import find_gates, fit_predictors, visits
from moe.commands.calibrate.record import record_trace
from routing import Routing
from routing.predict.calibrated import CalibratedPredictors
from routing.predict.path import CONTEXT, VECTOR


def recalls(model: MoE, learnt: Sequence[Sequence[int]], asked: Trace) -> dict[str, float]:
    """Share of visits that are among the experts named, mean over the layers but the first
    and those that no token visits.

    Args:
        learnt: windows that the predictors learn from.
        asked: of other text, with rows of all tokens.
    """
    trace = record_trace(model.backbone, model.experts, learnt)
    vectors = token_vectors(model.backbone.model.get_input_embeddings(), VECTOR)
    fitted = fit_predictors(trace, find_gates(model.backbone), vectors, lambda *_: None)
    popular = [
        recall_at_used(visits(ids, experts).sum(0).expand(len(then), -1), then)
        for ids, then, experts in zip(
            trace.expert_ids[1:], asked.expert_ids[1:], trace.num_experts[1:], strict=True
        )
    ]
    found = {"popular": popular, **_follow(fitted.calibrated, asked)}
    return {f"recall_{name}": float(np.nanmean(layers)) for name, layers in found.items()}


def _follow(calibrated: CalibratedPredictors, asked: Trace) -> dict[str, list[float]]:
    """Recall by predictor and layer, all tokens shown as one step."""
    assert asked.rows is not None
    predictors = {name: calibrated.predictor(name) for name in calibrated.weights}
    found: dict[str, list[float]] = {name: [] for name in predictors}

    contexts = asked.contexts(CONTEXT)
    for predictor in predictors.values():
        predictor.start(contexts)
    for layer, ids in enumerate(asked.expert_ids):
        for name in predictors if layer else ():
            named = predictors[name].rows(layer - 1, layer)
            if named is not None:
                found[name].append(recall_at_used(torch.from_numpy(named), ids))
        routing = Routing(ids.long(), asked.weights[layer].float())
        for predictor in predictors.values():
            predictor.observe(layer, asked.rows.expert_inputs[layer], routing)
    return found


def recall_at_used(scores: Tensor, ids: Tensor) -> float:
    """Share of visits that are named where each token names as many experts as it visits; nan
    where there are none.

    Args:
        scores: ``(T, E)``, the higher the sooner named.
        ids: ``(T, K)``, -1 for none.
    """
    wanted = visits(ids, scores.shape[1]).bool()
    place = scores.argsort(dim=1, descending=True, stable=True).argsort(1)
    named = place < wanted.sum(1, keepdim=True)
    return float((named & wanted).sum() / wanted.sum())
