"""The gates of a model, found by watching one pass: what predictors put earlier rows into.

Which matrix a router multiplies by and which rule it chooses by is found by trying
(`moe.fused.router`), whatever the architecture. Where that fails, or where experts do not read what
the router reads, look-ahead is fitted on choices alone and its raw forms are not available.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe.fused.description import NotDescribed, OwnRouter, RouterRule
from moe.fused.observe import Call, Observation
from moe.fused.parts import describe_norm, same
from moe.fused.router import describe_router
from moe.kv import Work
from moe.lanes import run_lanes
from moe.seam import experts_modules
from moe.trunk import Trunk
from moe.visit import ExpertsRunner
from routing.predict.gate import Gate, Rule

_PROMPT_TOKENS = 12


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


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layer of each MoE layer; the model itself where it has no list of layers."""
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    found = []
    for _, experts in experts_modules(model):
        module = experts
        while module in parents and not isinstance(parents[module], nn.ModuleList):
            module = parents[module]
        found.append(module)
    return found


@torch.inference_mode()
def find_gates(trunk: Trunk, run_experts: ExpertsRunner) -> list[FoundGate]:
    """One entry for each MoE layer."""
    size = trunk.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(size, (_PROMPT_TOKENS,), generator=generator).tolist()
    layers = blocks(trunk.model)
    with _watched(layers) as seen:
        lanes = trunk.lanes([Work(prompt, trunk.new_cache(len(prompt)))])
        run_lanes(lanes, run_experts)
        lanes[0].result()
    parents = {child: parent for parent in trunk.model.modules() for child in parent.children()}
    return [
        _find_gate([parents[experts], layer], experts, seen)
        for (_, experts), layer in zip(experts_modules(trunk.model), layers, strict=True)
    ]


def _find_gate(places: Sequence[nn.Module], experts: Any, seen: Observation) -> FoundGate:
    call = seen.call(experts)
    values = (*call.inputs, *call.kwargs.values()) if call is not None else ()
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) != 3:
        return FoundGate(None, None, "its experts are not called once with rows, ids and weights")
    rows, ids, weights = tensors
    norm = _norm_before(places[-1], rows, seen)
    reason = ""
    for place in dict.fromkeys(places):
        try:
            rule = describe_router(place, experts, ids, weights, seen)
        except NotDescribed as error:
            reason = str(error)
        except Exception as error:
            # What an unknown architecture does to a probe cannot be foreseen, and must not stop it.
            reason = f"probing raised {type(error).__name__}: {error}"
        else:
            if isinstance(rule, OwnRouter):
                reason = "its router follows no rule that is known here"
            else:
                return FoundGate(_gate(rule), norm)
    return FoundGate(None, norm, reason)


def _gate(found: RouterRule) -> Gate:
    weight, plain = found.weight.weight, found.correction is None and found.groups == 1
    assert isinstance(weight, Tensor)
    # SparseMixer takes the largest logits, one after the other; only its weights are special.
    score = "sigmoid" if found.score == "sigmoid" else "softmax"
    correction = None if found.correction is None else found.correction.detach().float().clone()
    rule = Rule(
        found.top_k,
        "logits" if plain else score,  # type: ignore[arg-type]
        correction,
        found.groups,
        found.groups_kept,
        found.group_score,
    )
    bias = None if found.weight.bias is None else found.weight.bias.detach().float().clone()
    return Gate(weight.detach().float().clone(), rule, bias)


def _norm_before(layer: nn.Module, rows: Tensor, seen: Observation) -> Tensor | None:
    """Weight of the norm whose output these rows are."""
    for module in layer.modules():
        call = seen.call(module)
        if call is None or not call.outputs or any(True for _ in module.children()):
            continue
        output = call.outputs[0]
        if isinstance(output, Tensor) and same(output, rows):
            try:
                return describe_norm(module, rows.shape[-1]).weight
            except Exception:  # it is no norm, and may refuse the rows it is tried on
                continue
    return None


@contextmanager
def _watched(layers: Sequence[nn.Module]) -> Iterator[Observation]:
    seen = Observation()

    def keep(module: nn.Module, inputs: Any, kwargs: Any, outputs: Any) -> None:
        flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        call = Call(
            tuple(map(_copy, inputs)),
            {name: _copy(value) for name, value in kwargs.items()},
            tuple(map(_copy, flat)),
        )
        seen.calls.setdefault(module, []).append(call)

    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
