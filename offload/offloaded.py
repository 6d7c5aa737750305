"""A model's experts left in a store: its layers over one cache, or over two tiers of caches.

On a CPU there is one tier, filled from disk. A GPU has two: its own slots, filled from host
memory, which is filled from disk. Host memory keeps what would have to be read from disk again:
all experts that the GPU lacks, and of those on the GPU the less valuable half, which it evicts
first. Copies of the others would be of no use; copying back everything that is evicted would take
as many transfers as reading it again (lab/offload/tiers.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.cache import ExpertCache
from offload.hot_set import save_hot_set
from offload.layer import MissingExperts, OffloadedExperts
from offload.policies import EvictionPolicy, Values
from offload.prefetch import BidRecord, Prefetcher
from offload.statistics import LayerStatistics
from offload.transfer import Reader
from routing.predict import Predictor

MEMORY, HOST = "memory", "host"
PLACES = ("disk", "loading", "host", "prefix", "memory")
"""Places of an expert: on disk only, on its way to the kernels' memory, in host memory beside a
GPU, or where kernels read it, by its low-bit planes or whole."""
CAUSES = ("demand", "streamed", "useful", "wasted", "restored")
"""Why bytes were read: names of counters in `LayerStatistics`."""
SLOWEST = 1e8
"""Bytes a second of a disk that has not been measured: its files are too small for that."""


@dataclass
class Offloaded:
    """Experts of a model that are read when they are needed.

    Attributes:
        layers: one for each MoE layer.
        tiers: the memories, the one that kernels read first.
        bits: of each expert of each layer.
        reader: reads the store.
        load_seconds: estimate for bringing one expert to where kernels read it.
        hot_set_file: where `close` saves the hot set; None for nowhere.
        prefetcher: reads experts before they are needed; None before `prefetch_with`.
    """

    layers: list[OffloadedExperts]
    tiers: Sequence[Tier]
    bits: Sequence[Sequence[int]]
    reader: Reader
    load_seconds: float
    hot_set_file: Path | None
    closing: ExitStack
    prefetcher: Prefetcher | None = None

    def __post_init__(self) -> None:
        # If loading fails later, `close` is not called.
        weakref.finalize(self, self.closing.close)

    def take_behind(self, count: int) -> list[OffloadedExperts]:
        """The layers behind the first ``count``, which from now on count as another network's:
        they share the tiers, and nothing is forecast for them."""
        behind = self.layers[count:]
        del self.layers[count:]
        self.bits = self.bits[:count]
        return behind

    @property
    def cache(self) -> ExpertCache:
        """The cache in the memory that kernels read."""
        return self.tiers[0].cache

    def read_seconds(self, layer: int) -> list[float]:
        """Seconds to read each expert of a layer, at the reader's speed when it was chosen."""
        speed = max(self.reader.bytes_per_second, SLOWEST)
        return [size / speed for size in self.cache.bytes_of(layer)]

    def miss_ratio(self, layer: int) -> float:
        """Share of the experts asked of a layer that had to be read, in [0, 1]."""
        first, last = (self.tiers[at].cache.statistics.layers[layer] for at in (0, -1))
        asked = first.hits + first.misses
        return min(last.misses / asked, 1.0) if asked else 0.0

    def status(self) -> dict[str, Any]:
        """Return how experts are served, for JSON; ``late``: `CpuExperts.status`, if the CPU takes
        a share."""
        cpu = self.layers[0].cpu
        return {
            "policy": self.cache.policy.name,
            "reader": {"name": self.reader.name, "reason": self.reader.reason},
            "predictor": None if self.prefetcher is None else self.prefetcher.predictor.name,
            "experts": sum(layer.num_experts for layer in self.layers),
            "slots": self.cache.slots,
            "tiers": {tier.name: tier.cache.slots for tier in self.tiers},
            "late": None if cpu is None else cpu.status(),
        }

    def places(self) -> NDArray[np.uint8]:
        """``(L, E)`` for the largest E: where each expert of `layers` is, as an index into
        `PLACES`. From any thread; a step that runs meanwhile may move some."""
        fastest, *slower = self.tiers
        places_U = fastest.cache.residency().astype(np.uint8)
        places_U[places_U > 1] += 1
        for tier in slower:
            places_U[(places_U == 0) & tier.cache.present] = PLACES.index("host")
        # The cache has the layers of `take_behind`, too, behind the others.
        places_LE = places_U.reshape(len(self.cache.sizes.experts), -1)
        return places_LE[: len(self.layers)]

    def serve_prefixes(self, missing: MissingExperts) -> None:
        """Read missing experts that this policy names by a prefix of their bits from now on."""
        for layer in self.layers:
            layer.serve_prefixes(missing)

    def prefetch_with(self, predictor: Predictor) -> Prefetcher:
        """Read experts ahead from now on that the predictor names, where that pays."""
        cache, from_disk = self.cache, len(self.tiers) == 1

        def read_seconds() -> float:
            return cache.expert_bytes / max(self.reader.throughput, SLOWEST)

        self.prefetcher = Prefetcher(
            cache,
            [layer.num_experts for layer in self.layers],
            predictor,
            self.load_seconds,
            read_seconds=read_seconds if from_disk else None,
        )
        return self.prefetcher

    def statistics(self) -> dict[str, Any]:
        """Return counts and contents of the caches, for JSON: of the fastest in detail, and of each
        tier. ``bytes_read`` came from disk."""
        return {
            **self.cache.statistics.as_dict(),
            "bytes_read": bytes_in(self.tiers[-1].cache.statistics.total),
            "tiers": [tier.statistics() for tier in self.tiers],
            "slots": self.cache.slots,
            "expert_bytes": self.cache.expert_bytes,
            "prefetch": None if self.prefetcher is None else _prefetch_statistics(self.prefetcher),
        }

    def reset_statistics(self) -> None:
        """Count from here on."""
        for tier in self.tiers:
            tier.cache.statistics.reset()

    def close(self) -> None:
        """Save the hot set, stop reading and close the files; once is enough."""
        if self.hot_set_file is not None:
            hot_set = (unit for tier in self.tiers for unit in tier.cache.hot_set())
            save_hot_set(self.hot_set_file, list(dict.fromkeys(hot_set)))
            self.hot_set_file = None
        self.closing.close()


@dataclass(frozen=True)
class Tier:
    """A memory that holds experts, as a cache of the next tier or of the disk.

    Attributes:
        name: ``memory``, a device, or ``host``.
        cache: the experts there.
    """

    name: str
    cache: ExpertCache

    def statistics(self) -> dict[str, object]:
        """Return counts and contents of this tier, for JSON; ``bytes_in`` came from the next tier
        or from disk."""
        total = self.cache.statistics.total
        return {
            "name": self.name,
            "slots": self.cache.slots,
            "hits": total.hits,
            "misses": total.misses,
            "hit_ratio": total.hit_ratio,
            "evictions": total.evictions,
            "stall_seconds": total.stall_seconds,
            "bytes_in": bytes_in(total),
        }


class HostPolicy:
    """Values units in host memory by the policy of the GPU's cache, which learns for both. See
    `offload.policies.EvictionPolicy`.

    Args:
        policy: of the GPU's cache.
        present: returns a ``(units,)`` bool array, the units in the GPU's cache.
    """

    name = HOST

    def __init__(self, policy: EvictionPolicy, present: Callable[[], NDArray[np.bool_]]) -> None:
        self._policy, self._present = policy, present

    def touch(self, layer: int, units: Sequence[int]) -> None:
        pass

    def values(self) -> Values:
        """The GPU's values, but units that it is unlikely to evict soon (those above the median
        value there) are worth less than all others here, the safest the least."""
        values, on_gpu = self._policy.values(), np.flatnonzero(self._present())
        if not len(on_gpu):
            return values
        values = values.copy()
        safe = on_gpu[values[on_gpu] > np.median(values[on_gpu])]
        values[safe] = values.min() - values[safe]
        return values

    def bid(self, unit: int, probability: float) -> float:
        return self._policy.bid(unit, probability)


def bytes_in(counters: LayerStatistics) -> int:
    """All bytes that were read, for whatever cause."""
    return sum(getattr(counters, f"{cause}_bytes") for cause in CAUSES)


def _prefetch_statistics(prefetcher: Prefetcher) -> dict[str, Any]:
    """Count the outcomes of forecasts, over all layers."""
    total = BidRecord()
    for record in prefetcher.records:
        for field in fields(record):
            setattr(total, field.name, getattr(total, field.name) + getattr(record, field.name))
    return {
        **asdict(total),
        "precision": total.precision,
        "recall": total.recall,
        "depth": prefetcher.depth,
        "layers_on": sum(gate.on for gate in prefetcher.gates),
    }
