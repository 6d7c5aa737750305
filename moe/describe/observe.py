"""One observed pass of transformers' forward: every module's inputs and outputs.

Experts are replaced by `stand_in`, so observing a large model reads its backbone only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from moe.describe.description import NotDescribed, RotaryTable
from moe.describe.parts import same
from moe.describe.probe import random_prompts, stand_in
from moe.kv.cache import KVCache
from moe.network.attention import MaskRule, packed_attention, packed_mask
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertsRunner, Lane, run_lanes
from moe.network.packed_pass import Work
from moe.network.per_sequence import depends_on_length

WATCHED = "moe_watched"
"""Name of the watched packed attention in transformers' registries."""


@dataclass(frozen=True)
class ObservedCall:
    """One call of a module, with copies of its tensors."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, inputs: Any, kwargs: Any, outputs: Any) -> ObservedCall:
        """The call that a forward hook is told of."""
        flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return cls(
            tuple(_copy(value) for value in inputs),
            {name: _copy(value) for name, value in kwargs.items()},
            tuple(_copy(value) for value in flat),
        )

    @property
    def hidden(self) -> Tensor:
        """The first tensor that went in."""
        values = (*self.inputs, self.kwargs.get("hidden_states"), *self.kwargs.values())
        return next(value for value in values if isinstance(value, Tensor))

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that went in."""
        values = (*self.inputs, *self.kwargs.values())
        return [value for value in values if isinstance(value, Tensor)]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of transformers' attention interface, ``(1, heads, T, size)`` each.

    Attributes:
        rule: by which keys are visible, or a mask of the model's own, as that of an indexer.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    rule: MaskRule | Tensor
    options: dict[str, Any]
    output: Tensor  # (1, T, heads, size)


@dataclass
class Observation:
    """The observation of one pass over all sequences; attention and sequences: of packed passes
    only."""

    calls: dict[nn.Module, list[ObservedCall]] = field(default_factory=dict)
    attention: list[AttentionCall] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # (T, V)
    positions: Tensor = field(default_factory=lambda: torch.empty(0))  # (1, T)
    sequences: list[KVCache] = field(default_factory=list)

    def call(self, module: nn.Module) -> ObservedCall | None:
        """The module's only call; None if there was none, or several."""
        calls = self.calls.get(module, [])
        return calls[0] if len(calls) == 1 else None

    def turn(self, at: int, turns: int) -> Observation:
        """One turn of looped layers: modules that were called ``turns`` times keep one call."""
        calls = {
            module: [own[at]] if len(own) == turns else own for module, own in self.calls.items()
        }
        return replace(self, calls=calls)

    def only(self, module: nn.Module) -> ObservedCall:
        """The module's only call; raises `NotDescribed` if it has none, or several."""
        call = self.call(module)
        if call is None:
            raise NotDescribed(f"{type(module).__name__} is not called once a pass")
        return call


def observe(
    backbone: Backbone,
    prompts: Sequence[list[int]],
    begins: Sequence[int] = (),
    experts: ExpertsRunner = stand_in,
) -> Observation:
    """Read prompts (one if sequences do not share a pass) and keep every module's calls.

    Args:
        begins: the position of each prompt's first token, in a packed pass; empty: 0.
    """
    seen, places = Observation(), begins or [0] * len(prompts)
    with torch.inference_mode(), _watched(backbone, seen):
        work = [
            Work(tokens, backbone.new_cache(len(tokens)), all_logits=True) for tokens in prompts
        ]
        for item, begin in zip(work, places, strict=True):
            item.cache.offset = begin
        if begins:
            lanes = [Lane(partial(backbone.forward_packed, work), "prefill")]
        else:
            lanes = backbone.lanes(work)
        run_lanes(lanes, experts)
        seen.logits = torch.cat([rows for lane in lanes for rows in lane.result()])
    seen.sequences = [item.cache for item in work if isinstance(item.cache, KVCache)]
    spans = [torch.arange(len(t)) + begin for t, begin in zip(prompts, places, strict=True)]
    seen.positions = torch.cat(spans)[None]
    return seen


def observe_random(backbone: Backbone) -> Observation:
    """Random prompts: two in a packed pass, else one."""
    return observe(backbone, random_prompts(backbone, (7, 4) if backbone.packed else (12,)))


_watcher: ContextVar[Observation] = ContextVar("_watcher")
"""The observation of the running pass; transformers' registry would keep it for ever."""


def _watched_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: MaskRule,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    output, _ = packed_attention(module, query, key, value, attention_mask, **options)
    _watcher.get().attention.append(
        AttentionCall(module, query.clone(), key.clone(), value.clone(), attention_mask,
                      options, output.clone())
    )  # fmt: skip
    return output, None


AttentionInterface.register(WATCHED, _watched_attention)
AttentionMaskInterface.register(WATCHED, packed_mask)


@contextmanager
def _watched(backbone: Backbone, seen: Observation) -> Iterator[None]:
    def keep(module: nn.Module, inputs: Any, kwargs: Any, outputs: Any) -> None:
        seen.calls.setdefault(module, []).append(ObservedCall.of(inputs, kwargs, outputs))

    token = _watcher.set(seen)
    hooks = [
        module.register_forward_hook(keep, with_kwargs=True) for module in backbone.model.modules()
    ]
    for module in backbone.model.modules():
        if backbone.packed and hasattr(module, "config"):
            module.config._attn_implementation = WATCHED
    try:
        yield
    finally:
        _watcher.reset(token)
        backbone.set_packed(backbone.packed)
        for hook in hooks:
            hook.remove()


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return tuple(_copy(item) for item in value)
    return value


class RotaryModules:
    """The rotary modules of a model: finds the one that made a layer's position embeddings."""

    def __init__(self, seen: Observation) -> None:
        self._made = []
        for module, calls in seen.calls.items():
            if any(True for _ in module.children()) or any(True for _ in module.parameters()):
                continue
            for call in calls:
                if any(_is_positions(value, seen.positions) for value in call.tensors):
                    self._made.append((module, call))
        self._tables: dict[int, RotaryTable] = {}
        self._positions = seen.positions

    def table(self, embeddings: Any) -> RotaryTable | None:
        """The table of position embeddings that a layer was given; None if it was given none."""
        wanted = _tensors(embeddings)
        if not wanted:
            return None
        for index, (module, call) in enumerate(self._made):
            made = _tensors(call.outputs)
            if len(made) == len(wanted) and all(map(same, made, wanted)):
                if index not in self._tables:
                    again = self._again(module, call)
                    of_length = depends_on_length(module)
                    self._tables[index] = RotaryTable(again, of_length=of_length)
                return self._tables[index]
        raise NotDescribed("position embeddings come from no rotary module of the model")

    def _again(self, module: nn.Module, call: ObservedCall) -> Callable[[Tensor], Any]:
        observed = self._positions

        def rotate(positions: Tensor) -> Any:
            def put(value: Any) -> Any:
                return positions if _is_positions(value, observed) else value

            kwargs = {name: put(value) for name, value in call.kwargs.items()}
            with torch.inference_mode():
                return module(*map(put, call.inputs), **kwargs)

        return rotate


def _is_positions(value: Any, positions: Tensor) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and same(value, positions)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []
