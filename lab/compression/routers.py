"""What repaired routers give back, and what the original's routes would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernels import ExpertWeights, experts_forward
from lab.compression.setup import Calibrated, Text
from lab.compression.ways import METHODS, allotted
from moe import MoE
from moe.commands.calibrate.record import TeacherForcedExperts, record_trace
from moe.commands.convert.repair import repaired
from moe.describe.routers import find_selectors
from moe.network.lanes import ExpertCall


def with_repaired_routers(
    text: Text, own: Calibrated, budgets: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """At each budget: routers as they are, repaired, and tokens sent where the original did."""
    for bits in budgets:
        chosen = allotted(METHODS["ours"], bits, own.statistics, 0)
        assert chosen is not None
        layers, about = own.at(chosen), {"bits": bits, "used": bits}
        yield {"routers": "as they are", **about} | text.score(layers)
        with routers(text.model, repaired_weights(text.model, own, layers)):
            yield {"routers": "repaired", **about} | text.score(layers)
        yield {"routers": "original's routes", **about} | text.score(layers, original_routes=True)


@torch.inference_mode()
def repaired_weights(model: MoE, own: Calibrated, layers: dict[int, ExpertWeights]) -> list[Tensor]:
    """As `moe.commands.convert.repair` makes them, without keeping a part of the text aside."""

    def run(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor | Exception]:
        (call,) = calls
        routing = call.routing
        args = call.hidden_states, routing.expert_ids, routing.weights, layers[layer]
        return [experts_forward(*args)]

    windows = [ids.tolist() for ids in own.trace.token_ids.split(own.trace.lengths)]
    forced = TeacherForcedExperts(model.experts.layers, own.trace, run)
    before, after = own.trace.rows, record_trace(model.backbone, forced, windows).rows
    assert before is not None
    assert after is not None
    return [
        repaired(weight, *rows)
        for weight, *rows in zip(
            _weights(model), before.expert_inputs, after.expert_inputs, strict=True
        )
    ]


@contextmanager
def routers(model: MoE, weights: Sequence[Tensor]) -> Iterator[None]:
    """The model with these router weights."""
    own = _weights(model)
    before = [weight.clone() for weight in own]

    @torch.inference_mode()
    def put(values: Sequence[Tensor]) -> None:
        for weight, value in zip(own, values, strict=True):
            weight.copy_(value)

    put(weights)
    try:
        yield
    finally:
        put(before)


def _weights(model: MoE) -> list[Tensor]:
    selectors = [found.selector for found in find_selectors(model.backbone)]
    return [selector.weight for selector in selectors if selector is not None]
