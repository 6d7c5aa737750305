"""The gates of a model, found by watching one pass: what predictors put earlier rows into.

Where no rule is found (`moe.describe.routers`), or where experts do not read what the router reads,
look-ahead is fitted on choices alone and its raw forms are not available.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.describe.routers import find_selectors
from moe.network.backbone import Backbone
from moe.network.moe_layer import Selector
from routing.predict.lookahead import Gate


@dataclass(frozen=True)
class FoundGate:
    """What is known of one MoE layer's router.

    Attributes:
        gate: None where it was not found.
        reason: why there is no gate; empty where there is one.
    """

    gate: Gate | None
    reason: str = ""


def find_gates(backbone: Backbone) -> list[FoundGate]:
    """One entry for each MoE layer."""
    return [FoundGate(_gate(found.selector), found.reason) for found in find_selectors(backbone)]


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
