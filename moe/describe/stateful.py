"""Finds the modules that must see one sequence at a time, by what they ask of the model's cache.

Recurrent modules keep states in it, sparse attention the keys of its indexer, and attention with
biases by position asks it for positions, or is given the distances of queries and keys by a model
that does. Rotary modules say themselves that they depend on lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from moe.describe.own_layers import find_own_layers
from moe.network.own_cache import CACHE_ARGUMENT, LayerStates, OwnCache
from moe.network.per_sequence import StatefulModules, depends_on_length


class _WatchedCache(DynamicCache):
    """Remembers which modules use what."""

    def __init__(self, config: Any, active: Sequence[nn.Module]) -> None:
        DynamicCache.__init__(self, config=config)
        self._active = active
        self.recurrent: dict[int, nn.Module] = {}
        self.attention: list[nn.Module] = []
        self.by_layer: dict[int, nn.Module] = {}
        self.positioned: set[nn.Module] = set()
        self.indexed = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.attention.append(self._active[-1])
        self.by_layer[layer_idx] = self._active[-1]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Any:
        self.indexed = True
        return super().update_indexer(indexer_key_states, layer_idx)

    def get_query_offset(self, *args: Any, **kwargs: Any) -> Any:
        self.positioned.add(self._active[-1])
        return super().get_query_offset(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self.recurrent[id(self._active[-1])] = self._active[-1]
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self.recurrent[id(self._active[-1])] = self._active[-1]
        return super().update_recurrent_state(*args, **kwargs)


class _WatchedStates(LayerStates):
    """Remembers which modules keep something in a list of an architecture's own cache class."""

    def __init__(self, cache: _WatchedCache, _name: str) -> None:
        self._watched = cache

    def __getitem__(self, layer: int) -> None:
        return None  # nothing has been read yet

    def __setitem__(self, layer: int, states: Tensor) -> None:
        module = self._watched._active[-1]
        self._watched.recurrent[id(module)] = module


@torch.inference_mode()
def find_stateful(model: PreTrainedModel, token_ids: Sequence[int]) -> StatefulModules:
    """The modules that need their own states or histories while the model reads these tokens.

    Raises:
        Exception: what a model raises that wants another cache than `moe.network.own_cache` makes.
    """
    own = OwnCache.of(model)
    cache_class = own.standing_for(_WatchedCache, _WatchedStates, layers=False)
    distances: dict[nn.Module, set[str]] = {}
    with active_modules(model) as active, _given_distances(model, len(token_ids), distances):
        cache = cache_class(model.config.get_text_config(decoder=True), active)
        ids = torch.tensor([list(token_ids)], device=model.device)
        model(input_ids=ids, **{CACHE_ARGUMENT: cache}, use_cache=True)
    # Where one layer has an indexer, others may reuse its choice.
    apart = [
        module
        for module in dict.fromkeys(cache.attention)
        if cache.indexed or module in cache.positioned or module in distances
    ]
    apart += [module for layer, module in cache.by_layer.items() if layer in own.layers]
    names = frozenset(name for module in apart for name in distances.get(module, ()))
    rotary = [module for module in model.modules() if depends_on_length(module)]
    kept = [getattr(layer, "indexer_position_ids", None) for layer in cache.layers]
    dims = next((len(positions) for positions in kept if positions is not None), 0)
    recurrent = list(cache.recurrent.values())
    return StatefulModules(recurrent, apart, rotary, find_own_layers(model, own), dims, names)


@contextmanager
def _given_distances(
    model: PreTrainedModel, tokens: int, found: dict[nn.Module, set[str]]
) -> Iterator[None]:
    """Collect by which arguments modules are given the distances ``(T, T)`` of so many queries and
    keys."""
    at = torch.arange(tokens, device=model.device)
    expected = at[:, None] - at

    def watch(module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        for name, value in kwargs.items():
            if not isinstance(value, Tensor) or value.is_floating_point():
                continue
            if value.shape == expected.shape and torch.equal(value.to(expected), expected):
                found.setdefault(module, set()).add(name)

    hooks = [
        module.register_forward_pre_hook(watch, with_kwargs=True) for module in model.modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def active_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules whose forward runs, the innermost last."""
    active: list[nn.Module] = []

    def ends(*_: Any) -> None:
        active.pop()

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda own, _: active.append(own)))
        hooks.append(module.register_forward_hook(ends))
    try:
        yield active
    finally:
        for hook in hooks:
            hook.remove()
