"""Finds by trying what the cache layers of an architecture's own class keep.

A model reads a prompt and two more tokens, and what grows with the prompt, starts again every few
tokens, or counts tells the rest (`moe.network.own_cache.OwnLayer`). Layers of one kind are tried
once, and the model stops behind the last kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moe.network.own_cache import CACHE_ARGUMENT, CacheMember, OwnCache, OwnLayer, members_of

_LENGTHS = (67, 517, 2053)  # prompts, the shortest first: an entry may stand for many tokens
_STEPS = 3  # lengths that are looked at, each a token longer


class _ReadEnough(Exception):
    """The layers of interest have been seen."""


class _ShortPass(DynamicCache):
    """Ends a pass behind some layer."""

    def __init__(self, config: Any, last: int) -> None:
        super().__init__(config=config)
        self._last = last

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        if layer_idx > self._last:
            raise _ReadEnough
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def find_own_layers(model: PreTrainedModel, own: OwnCache) -> Mapping[int, OwnLayer]:
    """The model's own cache layers and what they keep; those that are not understood without."""
    alike: dict[object, list[OwnLayer]] = {}
    for layer in own.layers.values():
        alike.setdefault(_kind(layer), []).append(layer)
    found = dict(own.layers)
    for length in _LENGTHS:
        unknown = [layers for layers in alike.values() if not found[layers[0].index].rate]
        if not unknown:
            break
        seen = _looks(model, [layers[0] for layers in unknown], length)
        for layers, looks in zip(unknown, seen, strict=True):
            known = _understood(layers[0], looks, length)
            found |= {each.index: replace(known, empty=each.empty, index=each.index)
                      for each in layers}  # fmt: skip
    return found


def _kind(layer: OwnLayer) -> object:
    """A value that is equal for layers that keep the same things."""
    numbers = {name: x for name, x in vars(layer.empty).items() if isinstance(x, int)}
    return type(layer.empty), tuple(numbers.items())


def _looks(
    model: PreTrainedModel, layers: Sequence[OwnLayer], length: int
) -> list[list[dict[CacheMember, Any]]]:
    """Return what layers keep after a prompt of ``length`` tokens, and after each further token."""
    generator = torch.Generator().manual_seed(0)
    count: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    ids = torch.randint(count, (1, length + _STEPS - 1), generator=generator).to(model.device)
    config = model.config.get_text_config(decoder=True)
    cache = _ShortPass(config, max(layer.index for layer in layers))
    looks: list[list[dict[CacheMember, Any]]] = [[] for _ in layers]
    for begin, end in ((0, length), *((at, at + 1) for at in range(length, ids.shape[1]))):
        at = torch.arange(begin, end, device=model.device)[None]
        with suppress(_ReadEnough):
            model(
                input_ids=ids[:, begin:end], position_ids=at, **{CACHE_ARGUMENT: cache},
                use_cache=True,
            )  # fmt: skip
        for own, layer in zip(looks, layers, strict=True):
            kept = cache.layers[layer.index]
            own.append({member: member.get(kept) for member in members_of(kept)})
    return looks


def _understood(
    layer: OwnLayer, looks: Sequence[Mapping[CacheMember, Any]], length: int
) -> OwnLayer:
    """The layer with what its members are; as it was if a member's use cannot be told."""
    lengths = range(length, length + len(looks))
    members = {member: [look[member] for look in looks] for member in looks[0]}
    rows = {
        member: [x.shape[1] for x in values]
        for member, values in members.items()
        if all(isinstance(x, Tensor) and x.ndim == 3 and len(x) == 1 for x in values)
    }
    rates = {
        rate
        for window, entries in product(rows.values(), repeat=2)
        if entries[0] and (rate := (length - window[0]) // entries[0]) > 1
        if [divmod(n, rate) for n in lengths] == list(zip(entries, window, strict=True))
    }
    if len(rates) != 1:
        return layer
    (rate,) = rates  # of rows that count whole windows, and others that count the rest
    whole, left = [n // rate for n in lengths], [n % rate for n in lengths]
    entries, windows, lasts, counts = dict[CacheMember, Tensor](), list[CacheMember](), [], []
    for member, values in members.items():
        if rows.get(member) == whole:
            entries[member] = values[0][:, :0].clone()
        elif rows.get(member) == left:
            windows.append(member)
        elif all(isinstance(x, Tensor) and x.shape == values[0].shape for x in values):
            lasts.append(member)
        elif any(isinstance(x, Tensor) for x in values):
            return layer
        elif values == whole:
            counts.append(member)
        elif any(x != values[0] for x in values):
            return layer
    return replace(
        layer, rate=rate, entries=entries, windows=tuple(windows), lasts=tuple(lasts),
        counts=tuple(counts),
    )  # fmt: skip
