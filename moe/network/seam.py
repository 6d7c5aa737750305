"""Taking the experts out of a transformers model.

transformers dispatches every experts module through the registry ``ALL_EXPERTS_FUNCTIONS``. One
implementation is registered here: it wraps what the router returned in a `Routing` and visits the
experts through the running lane. Facts about an architecture (layout, biases, gating) are the
module's own declared attributes and its ``_apply_gate``; no architecture is named.
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
from moe.errors import UnsupportedModelError
from moe.network.attention import current_pass
from moe.network.lanes import ExpertCall, ExpertsRunner, call_experts
from offload.layer import LayerExperts
from routing import Routing

SEAM = "moe_lanes"
"""Name of this implementation in transformers' registry."""


@dataclass
class ExpertSeat:
    """Where an experts module's tokens go: set on the module by `attach`."""

    layer: int
    num_experts: int
    run_experts: ExpertsRunner


def _visit(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    seat: ExpertSeat = module.expert_seat
    routing = Routing.from_router(top_k_index, top_k_weights, seat.num_experts)
    packed = current_pass.get(None)
    received = None if packed is None else packed.take_received()
    call = ExpertCall(seat.layer, hidden_states, routing, received=received)
    return call_experts(call, seat.run_experts)


ALL_EXPERTS_FUNCTIONS.register(SEAM, _visit)


def experts_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules that dispatch through the registry, in forward order: ``(name, module)``."""
    declared = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config", "num_experts")
    return [
        (name, module)
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in declared)
    ]


def routing_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules that choose or weigh experts: they stand beside them, and their weight has as many
    rows as there are experts, or one."""
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
    """Of each module of a model but itself, the one that it is a child of."""
    return {child: parent for parent in model.modules() for child in parent.children()}


def layer_of(module: nn.Module, parents: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The decoder layer that a module is in; the model itself where it has no list of layers."""
    while module in parents and not isinstance(parents[module], nn.ModuleList):
        module = parents[module]
    return module


def check_experts(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` where no experts dispatch through the registry."""
    if not experts_modules(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts that dispatch through transformers' experts "
            "interface, so there is nothing for this engine to take over; dense models and "
            "architectures with expert modules of their own are not supported"
        )


def take_experts(model: PreTrainedModel) -> list[ExpertWeights]:
    """Take the weights out of every experts module, in canonical layout, in forward order.

    The modules keep no parameters, so there is one copy of the weights.

    Raises:
        UnsupportedModelError: the model has no experts module that dispatches through the registry.
    """
    check_experts(model)
    return [take_weights(module) for _, module in experts_modules(model)]


def attach(model: PreTrainedModel, layers: Sequence[LayerExperts], run: ExpertsRunner) -> None:
    """Send the tokens of every experts module of the model to ``run``."""
    for index, (_, module) in enumerate(experts_modules(model)):
        module.config._experts_implementation = SEAM
        module.expert_seat = ExpertSeat(index, layers[index].num_experts, run)


def expert_shape(module: Any, group_size: int) -> ExpertShape:
    """Sizes of the experts of one experts module."""
    hidden, width = module.down_proj.shape[1:]
    if module.is_transposed:
        hidden, width = width, hidden
    return ExpertShape(hidden, width, 2 if module.has_gate else 1, group_size)


def take_weights(module: Any) -> ExpertWeights:
    """The weights of one experts module, in canonical layout; it keeps none."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    parameters = {
        name: module._parameters.pop(name).detach()
        for name in (first, "down_proj", f"{first}_bias", "down_proj_bias")
        if module._parameters.get(name) is not None
    }
    module._is_hf_initialized = True  # or transformers would fill in what it misses

    def canonical(name: str) -> Tensor:
        weight = parameters.pop(name)
        return weight.transpose(1, 2).contiguous() if module.is_transposed else weight.contiguous()

    with torch.no_grad():
        return ExpertWeights(
            gate_up_EGH=canonical(first),
            down_EHF=canonical("down_proj"),
            activation=module._apply_gate if module.has_gate else module.act_fn,
            gate_up_bias_EG=parameters.get(f"{first}_bias"),
            down_bias_EH=parameters.get("down_proj_bias"),
            # transformers 5.17 has no such norms, and does not declare that it has none.
            post_norm=getattr(module, "post_expert_norm", None),
        )


# ---- An embedding table that stays as small as it came; its rows become the trunk's dtype in
# use.
#
# On a CPU the trunk is float32. A table is read a row a token, so half precision costs nothing
# there, and at a few bits a weight it is among the larger things in memory.

_HALF = (torch.bfloat16, torch.float16)


class StoredEmbedding(nn.Embedding):
    """`torch.nn.Embedding` whose rows come out in `given`, whatever the table is kept in."""

    given: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.given)


def keep_embedding(network: PreTrainedModel) -> str | None:
    """Let the input embedding of a network on meta be kept in half precision.

    Returns:
        The parameter's name; None where the table is something else than a plain embedding, or
        another layer multiplies by it.
    """
    embedding = network.get_input_embeddings()
    name = next(n for n, module in network.named_modules() if module is embedding)
    tied = network.all_tied_weights_keys
    if type(embedding) is not nn.Embedding or f"{name}.weight" in {*tied, *tied.values()}:
        return None
    kept = StoredEmbedding(
        embedding.num_embeddings,
        embedding.embedding_dim,
        embedding.padding_idx,
        device="meta",
        dtype=embedding.weight.dtype,
    )
    kept.given = embedding.weight.dtype
    kept._is_hf_initialized = True  # type: ignore[assignment]  # transformers asks every module
    network.set_submodule(name, kept)
    return f"{name}.weight"


def backbone_dtype(network: PreTrainedModel) -> torch.dtype:
    """What a network computes in; transformers' `dtype` is that of its first parameter."""
    embedding = network.get_input_embeddings()
    return embedding.given if isinstance(embedding, StoredEmbedding) else network.dtype


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALF
