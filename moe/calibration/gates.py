"""The gates of a model, found by watching one pass: what predictors put earlier rows into.

Where no rule is found (`moe.describe.routers`), or where experts do not read what the router reads,
look-ahead is fitted on choices alone and its raw forms are not available.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moe.describe.observe import Observation, observe_random
from moe.describe.parts import describe_norm, same
from moe.describe.routers import find_selectors, layers_with_experts
from moe.network.backbone import Backbone
from moe.network.moe_layer import Selector
from moe.network.seam import experts_modules
from routing.predict.lookahead import Gate


@dataclass(frozen=True)
class FoundGate:
    """What is known of one MoE layer's router.

    Attributes:
        gate: None where it was not found.
        norm: ``(H,)`` weight of the norm that makes the rows which experts read; None likewise.
        reason: why there is no gate; empty where there is one.
    """

    gate: Gate | None
    norm: Tensor | None
    reason: str = ""


def find_gates(backbone: Backbone) -> list[FoundGate]:
    """One entry for each MoE layer."""
    seen = observe_random(backbone)
    layers = zip(
        find_selectors(backbone, seen),
        experts_modules(backbone.model),
        layers_with_experts(backbone.model),
        strict=True,
    )
    return [
        FoundGate(_gate(found.selector), _norm(layer, experts, seen), found.reason)
        for found, (_, experts), layer in layers
    ]


def _gate(selector: Selector | None) -> Gate | None:
    """A copy in float32 that outlives the model."""
    if selector is None:
        return None
    correction = selector.rule.correction
    rule = replace(selector.rule, correction=None if correction is None else _copy(correction))
    bias = None if selector.bias is None else _copy(selector.bias)
    return Gate(_copy(selector.weight), rule, bias)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


@torch.inference_mode()
def _norm(layer: nn.Module, experts: nn.Module, seen: Observation) -> Tensor | None:
    """Weight of the norm whose output the experts read."""
    read = seen.call(experts)
    for module in layer.modules():
        call = seen.call(module)
        if read is None or call is None or not call.outputs or any(True for _ in module.children()):
            continue
        output = call.outputs[0]
        if isinstance(output, Tensor) and same(output, read.hidden):
            try:
                return describe_norm(module, output.shape[-1]).weight
            except Exception:  # it is no norm, and may refuse the rows it is tried on
                continue
    return None
