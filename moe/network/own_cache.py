"""Caches of an architecture's own: what a pass's cache shows in their place.

Some models insist on a cache class that their modeling file defines, and which keeps further lists
by layer beside keys and values (linear attention's states). Others have cache layers of their own,
which keep more than keys and values: entries that stand for many tokens each, and what the next
entry is made of. `OwnCache` finds both. Its `standing_for` makes a subclass of our cache whose
lists are the recurrent states of a pass (`LayerStates`), and whose layers are those of the running
sequence (`OwnLayers`). A sequence keeps no such layer, but rows and states as of other models;
`OwnLayer` makes the layer of them, and takes it apart again.
Legend: n tokens so far, E entries, r tokens that an entry stands for (`OwnLayer.rate`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import proxy

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import create_causal_mask

from moe.kv.layout import LayerKey, StateKey, States
from moe.kv.visibility import RowVisibility
from moe.network.answer_window import AnswerWindow, answer_window
from moe.settings.device import to_device

CACHE_ARGUMENT = (
    "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
)
"""The argument by which models take a cache, and the name under which they return it:
transformers 5.24 renames it."""

_LAYERS = 1 << 20  # more than any model has
_C = TypeVar("_C", bound=Cache)


@dataclass(frozen=True)
class OwnCache:
    """The states that a model keeps beside keys and values by classes of its modeling file.

    Attributes:
        base: the cache class that the model's modeling file defines; None unless it is just one.
        layers: by index, the layers of transformers' cache whose class is defined there.
        adds_masks: attention with such layers changes masks, which are added to scores.
        device: of the model.
        position_dims: the model keeps as many positions of each token in a layer of its cache, and
            computes rotary tables of all tokens; 0 if it keeps none.
        policy: what tokens behind the prompt attend to; None: all.
    """

    base: type[Cache] | None
    layers: Mapping[int, OwnLayer]
    adds_masks: bool
    device: torch.device
    position_dims: int = 0
    policy: RowVisibility | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> OwnCache:
        source = type(model).__module__
        found = [
            each
            for each in vars(sys.modules[source]).values()
            if isinstance(each, type) and issubclass(each, Cache) and each.__module__ == source
        ]
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        windows = {kind: answer_window(x) for kind, x in {type(x): x for x in layers}.items()}
        window = max(windows.values(), default=0)
        own = {
            at: OwnLayer(x, at)
            for at, x in enumerate(layers)
            if type(x).__module__ == source and not windows[type(x)]
        }
        adds = bool(own) and not getattr(model, "_supports_sdpa", False)
        base = found[0] if len(found) == 1 else None
        policy = AnswerWindow(window) if window else None
        return cls(base, own, adds, model.device, policy=policy)

    def standing_for(
        self, ours: type[_C], lists: Callable[[Any, str], Any], *, layers: bool = True
    ) -> type[_C]:
        """``ours`` as a subclass of `base` too.

        Args:
            lists: makes what stands in place of a list that `base` keeps by layer, from the cache
                and the list's name.
            layers: the pass's states stand in place of `layers`.
        """
        base = self.base
        known = vars(Cache(layers=[]))
        kept, own = vars(base()) if base is not None else {}, self
        names = [name for name, x in kept.items() if isinstance(x, list) and name not in known]

        def begin(self: Any, *args: Any, **options: Any) -> None:
            ours.__init__(self, *args, **options)
            for name in names:
                setattr(self, name, lists(self, name))
            if layers:
                self.layers, self.adds_masks = OwnLayers(self, own), own.adds_masks

        bases = (ours,) if base is None else (ours, base)
        return type(ours.__name__, bases, {"__init__": begin})


class _Pass(Protocol):
    def _state(self, key: StateKey) -> Tensor | None: ...

    def _keep(self, key: StateKey, states: Tensor) -> None: ...

    def own_layer(self, own: OwnLayer) -> Any: ...

    def running_keys(self, layer: int) -> Tensor: ...

    def history_positions(self) -> Tensor: ...


class LayerStates:
    """The recurrent states of a `PackedCache`'s pass, in place of a list of tensors by layer."""

    def __init__(self, cache: _Pass, name: str) -> None:
        self._cache, self._name = proxy(cache), name  # no cycle: a pass is freed when it is done

    def __len__(self) -> int:
        return _LAYERS

    def __getitem__(self, layer: int) -> Tensor | None:
        return self._cache._state((layer, self._name, 0))

    def __setitem__(self, layer: int, states: Tensor) -> None:
        self._cache._keep((layer, self._name, 0), states)


class CacheMember(NamedTuple):
    """A value that a cache layer keeps in an attribute, or under a key of a dictionary there."""

    attribute: str
    key: str | None = None

    def get(self, layer: Any) -> Any:
        value = getattr(layer, self.attribute)
        return value if self.key is None else value[self.key]

    def set(self, layer: Any, value: Any) -> None:
        if self.key is None:
            setattr(layer, self.attribute, value)
        else:
            getattr(layer, self.attribute)[self.key] = value

    def __str__(self) -> str:
        return self.attribute if self.key is None else f"{self.attribute}.{self.key}"


@dataclass(frozen=True)
class OwnLayer:
    """A cache layer of an architecture's own class, which keeps an entry of every ``rate`` tokens.

    `moe.describe.own_layers` finds by trying which of its members are what. Such a layer replaces
    its tensors and never writes to them, so a layer that is made shares those of the sequence.

    Attributes:
        empty: the layer before the first token.
        index: of the layer.
        rate: r; 0: not known.
        entries: ``(1, E, D)``, E = n // r; a sequence keeps them as rows.
        windows: ``(1, n % r, W)`` rows of the tokens behind the last entry. A sequence keeps them
            as a state ``(1, r, W)``, zeros behind these rows.
        lasts: tensors that change only where an entry is made, and are None before; states too.
        counts: integers, E.
    """

    empty: Any
    index: int
    rate: int = 0
    entries: Mapping[CacheMember, Tensor] = field(default_factory=dict)  # none of them: (1, 0, D)
    windows: tuple[CacheMember, ...] = ()
    lasts: tuple[CacheMember, ...] = ()
    counts: tuple[CacheMember, ...] = ()

    def copy(self) -> Any:
        """An empty layer."""
        layer = copy.copy(self.empty)
        for name, value in vars(layer).items():
            if isinstance(value, dict | list):
                setattr(layer, name, copy.copy(value))
        return layer

    def rows_key(self, member: CacheMember) -> LayerKey:
        """The key by which a sequence keeps entries."""
        return str(member), self.index

    def state_key(self, member: CacheMember) -> StateKey:
        return self.index, str(member), 0

    def made(self, states: States, entries: Mapping[LayerKey, Tensor], length: int) -> Any:
        """The layer of a sequence.

        Args:
            states: of the sequence.
            entries: ``(1, E, D)`` by `rows_key`.
            length: n.
        """
        if not self.rate:
            raise ValueError(f"what a {type(self.empty).__name__} keeps is not understood")
        layer = self.copy()
        if not length:
            return layer
        for member in self.entries:
            member.set(layer, entries[self.rows_key(member)])
        for member in self.windows:
            member.set(layer, states[self.state_key(member)][:, : length % self.rate])
        for member in self.lasts:
            member.set(layer, states.get(self.state_key(member)))
        for member in self.counts:
            member.set(layer, length // self.rate)
        return layer

    def states_of(self, layer: Any) -> dict[StateKey, Tensor]:
        """Return the states of the layer that a sequence has made."""
        states = dict[StateKey, Tensor]()
        for member in self.windows:
            rows = member.get(layer)
            states[self.state_key(member)] = pad(rows, (0, 0, 0, self.rate - rows.shape[1]))
        for member in self.lasts:
            if (value := member.get(layer)) is not None:
                states[self.state_key(member)] = value
        return states


def members_of(layer: Any) -> list[CacheMember]:
    """Return what a cache layer keeps beside what transformers' own layers keep."""
    known = vars(DynamicLayer()) | vars(DynamicSlidingWindowLayer(sliding_window=1))
    found = list[CacheMember]()
    for name, value in vars(layer).items():
        if name not in known:
            keys = value if isinstance(value, dict) else [None]
            found += [CacheMember(name, key) for key in keys]
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in dictionaries, lists and tuples, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


class OwnLayers:
    """The layers of the running sequence's cache, in place of a list of them."""

    def __init__(self, cache: _Pass, own: OwnCache) -> None:
        self._cache, self._own = proxy(cache), own

    def __len__(self) -> int:
        return 0  # transformers asks nothing of them then

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, layer: int) -> Any:
        if layer not in self._own.layers:
            return _PlainLayer(self._cache, layer, self._own)
        return self._cache.own_layer(self._own.layers[layer])


@dataclass
class _PlainLayer:
    """The view that modules have of a layer that keeps keys and values only, after its `update`."""

    cache: _Pass
    layer: int
    own: OwnCache

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """``(position_dims, 1, 1 + P)`` of the P tokens that the pass's sequences have read before,
        in order, behind one that stands for no token."""
        if not self.own.position_dims:
            return None
        positions = to_device(self.cache.history_positions(), self.own.device)
        return positions.expand(self.own.position_dims, 1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Each sequence's positions follow from its length."""

    @property
    def keys(self) -> Tensor:
        """``(1, N, L, D)`` of the running sequence."""
        return self.cache.running_keys(self.layer)

    def get_seq_length(self) -> int:
        return self.keys.shape[2]
