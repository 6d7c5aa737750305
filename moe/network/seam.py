"""Takes the experts out of a transformers model, and sends their tokens to our MoE layers.

transformers dispatches every experts module through the registry ``ALL_EXPERTS_FUNCTIONS``. We
register one implementation, which makes an `ExpertCall` of what the router has returned and hands
it to the running lane. All that it knows of an architecture (layout, biases, gating) are the
module's own declared attributes and its ``_apply_gate``; no architecture is named. Experts that do
not dispatch through the registry are brought there first (`moe.network.adopt`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from experts.weights import ExpertShape
from kernels import ExpertWeights
from moe.network.lanes import ExpertCall, ExpertsRunner, call_experts
from offload.layer import LayerExperts
from routing import Routing

SEAM = "moe_lanes"
"""Name of this implementation in transformers' registry."""


@dataclass
class ExpertSeat:
    """Which MoE layer an experts module is, and what runs its experts; `attach` puts it there.

    Attributes:
        scores: of the router's last call, for the call of the experts that follows it; None where
            nobody asked for them (`watch_router`).
    """

    layer: int
    num_experts: int
    run_experts: ExpertsRunner
    scores: Tensor | None = None


def _call_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    seat: ExpertSeat = module.expert_seat
    routing = Routing.from_router(top_k_index, top_k_weights, seat.num_experts)
    call = ExpertCall(seat.layer, hidden_states, routing, scores=seat.scores)
    seat.scores = None
    return call_experts(call, seat.run_experts)


ALL_EXPERTS_FUNCTIONS.register(SEAM, _call_experts)


def experts_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules that dispatch through the registry, in forward order: ``(name, module)``."""
    declared = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config", "num_experts")
    return [
        (name, module)
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in declared)
    ]


def routing_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Routers and shared experts' gates: modules beside experts whose weight has as many rows as
    there are experts, or one. ``(name, module)``."""
    places = {
        name.rpartition(".")[0]: module.num_experts for name, module in experts_modules(model)
    }
    found = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        counts = [count for place, count in places.items() if name.startswith(f"{place}.")]
        if weight is not None and weight.ndim == 2 and weight.shape[0] in (1, *counts) and counts:
            found.append((name, module))
    return found


def parents_of(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The parent of every module of a model but the model itself."""
    return {child: parent for parent in model.modules() for child in parent.children()}


def layer_of(module: nn.Module, parents: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The decoder layer that contains a module; the model itself if it has no list of layers."""
    while module in parents and not isinstance(parents[module], nn.ModuleList):
        module = parents[module]
    return module


def take_experts(model: PreTrainedModel) -> list[ExpertWeights]:
    """Take the weights out of every experts module, in canonical layout and forward order.

    The modules keep no parameters, so there is one copy of the weights.
    """
    return [take_weights(module) for _, module in experts_modules(model)]


def attach(model: PreTrainedModel, layers: Sequence[LayerExperts], run: ExpertsRunner) -> None:
    """Send the tokens of every experts module of the model to ``run``."""
    for index, (_, module) in enumerate(experts_modules(model)):
        module.config._experts_implementation = SEAM
        module.expert_seat = ExpertSeat(index, layers[index].num_experts, run)


def watch_router(experts: Any, router: nn.Module, output: int) -> None:
    """Hand the scores among a router's outputs to the calls of its experts from now on."""

    def keep(_module: nn.Module, _inputs: Any, outputs: Sequence[Tensor]) -> None:
        experts.expert_seat.scores = outputs[output]

    router.register_forward_hook(keep)


def expert_shape(module: Any, group_size: int) -> ExpertShape:
    """Sizes of the experts of one experts module."""
    hidden, width = module.down_proj.shape[1:]
    if module.is_transposed:
        hidden, width = width, hidden
    return ExpertShape(hidden, width, 2 if module.has_gate else 1, group_size)


def take_weights(module: Any) -> ExpertWeights:
    """Take the weights out of one experts module, in canonical layout."""

    def canonical(name: str) -> Tensor:
        weight: Tensor = module._parameters.pop(name).detach()
        return weight.transpose(1, 2).contiguous() if module.is_transposed else weight.contiguous()

    with torch.no_grad():
        first, second = map(canonical, weight_names(module))
        return ExpertWeights(first, second, **take_beside(module))


def weight_names(module: Any) -> tuple[str, str]:
    """Parameters of the first and the second projection of an experts module."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def take_beside(module: Any) -> dict[str, Any]:
    """Take what is beside the weights out of an experts module: fields of `ExpertWeights`."""
    module._is_hf_initialized = True  # or transformers would initialise what is missing
    biases = [module._parameters.pop(f"{name}_bias", None) for name in weight_names(module)]
    first, second = (None if bias is None else bias.detach() for bias in biases)
    return {
        "activation": module._apply_gate if module.has_gate else module.act_fn,
        "gate_up_bias_EG": first,
        "down_bias_EH": second,
        # transformers 5.17 has no such norms, and does not declare that it has none.
        "post_norm": getattr(module, "post_expert_norm", None),
    }
