"""`CacheView`: the cache that generation code of a model that writes canvases sees.

Such code makes a cache of its own, or goes on with one that it is given. It is given a `CacheView`,
whose rows lie in the sequence's `KVCache`: they can be shared, cut, kept for prompts that begin
alike, given up and read again, while the code sleeps in its lane.
Legend: N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import proxy

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from moe.errors import UnsupportedModelError
from moe.kv.cache import KVCache
from moe.kv.ledger import Windows

Window = int | None
"""The most tokens that a token of a layer sees, itself included; None: all."""


def layer_windows(config: PreTrainedConfig) -> list[Window]:
    """The window of each layer of the cache that a model with this configuration makes.

    Raises:
        UnsupportedModelError: some layer keeps more than keys and values.
    """
    windows = list[Window]()
    for layer in DynamicCache(config=config.get_text_config(decoder=True)).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"it writes canvases, and keeps a {type(layer).__name__} of what it has read; only "
                "keys and values are supported"
            )
        windows.append(getattr(layer, "sliding_window", None))
    return windows


def canvas_windows(config: PreTrainedConfig, layer_bytes: Mapping[int, int]) -> Windows:
    """The layers that see no more than the last tokens.

    Args:
        layer_bytes: of a token in each layer.
    """
    of_layer = {at: own for at, own in enumerate(layer_windows(config)) if own is not None}
    return Windows.of(of_layer, layer_bytes)


class CacheView(Cache):
    """Stands in for the cache that a model's code would make.

    Args:
        windows: of each layer.
        length: tokens that the model's code knows of.
        rows: of the sequence; None: while it has none, and the code sleeps.

    Attributes:
        rows, length: as given. They may differ: rows after ``length`` are not seen.
    """

    layers: Sequence[LayerView]  # type: ignore[assignment]

    def __init__(self, windows: Sequence[Window], length: int, rows: KVCache | None = None) -> None:
        here = proxy(self)  # no cycle: rows are freed with the cache
        own: list[Any] = [LayerView(here, at, window) for at, window in enumerate(windows)]
        super().__init__(layers=own)
        self.length, self.rows = length, rows


class LayerView(CacheLayerMixin):
    """A layer of a `CacheView`; used as `DynamicLayer` and `DynamicSlidingWindowLayer` are."""

    is_compileable = is_croppable = supports_early_init = False

    def __init__(self, cache: CacheView, index: int, window: Window) -> None:
        self._cache, self._index = cache, index
        self._window = window
        self.is_sliding = window is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``(1, N, T, D)`` rows; returns all that the new tokens may see, these included."""
        rows = self._rows
        rows.write(self._index, key_states, value_states)
        end = rows.length + key_states.shape[2]
        return rows.read(self._index, end, self._begin(rows.length))

    def seen(self) -> tuple[Tensor, Tensor]:
        """``(1, N, L, D)`` keys and values that a canvas after them sees."""
        length = self._cache.length
        return self._rows.read(self._index, length, self._begin(length))

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self.seen()[0]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.seen()[1]

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: rows have a place when they come."""

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        begin = self._begin(self._cache.length)
        return self._cache.length - begin + query_length, begin

    @property
    def _rows(self) -> KVCache:
        assert self._cache.rows is not None, "the sequence has been preempted"
        return self._cache.rows

    def _begin(self, length: int) -> int:
        """The first token that is seen after so many."""
        return 0 if self._window is None else max(length - self._window + 1, 0)
