"""Counters of what an expert cache did: written by the step loop, readable from any thread."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class LayerStatistics:
    """Counters of one layer. A call requests each of its experts once.

    Attributes:
        hits: requested experts that were in the cache.
        misses: requested experts that were not, `late` included.
        late: misses whose prefetch was under way.
        prefixes: requested experts that were computed with a prefix of their bits.
        refined: requested experts of which only a prefix was there, and all bits had to be read.
        demand_bytes: read because a layer waited for them, and kept.
        streamed_bytes: read because a layer waited for them, into slots borrowed for the call.
        useful_bytes: prefetched and requested afterwards.
        wasted_bytes: prefetched and evicted before any request, or failed.
        restored_bytes: read to restore a hot set.
        prefetches: prefetches begun.
        cancelled: prefetches cancelled before they began.
        evictions: experts that lost their slot to another.
        failures: transfers that failed.
        stall_seconds: time for which the step loop waited.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    prefixes: int = 0
    refined: int = 0
    demand_bytes: int = 0
    streamed_bytes: int = 0
    useful_bytes: int = 0
    wasted_bytes: int = 0
    restored_bytes: int = 0
    prefetches: int = 0
    cancelled: int = 0
    evictions: int = 0
    failures: int = 0
    stall_seconds: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of the requested experts that were in the cache; 1 without requests."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


class CacheStatistics:
    """Counters of each MoE layer, in `layers`, and their sum."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerStatistics() for _ in range(num_layers)]

    @property
    def total(self) -> LayerStatistics:
        """Sum over the layers, as of now."""
        names = [field.name for field in fields(LayerStatistics)]
        return LayerStatistics(
            **{name: sum(getattr(layer, name) for layer in self.layers) for name in names}
        )

    @property
    def stall_seconds(self) -> float:
        """Time for which the step loop waited, in all layers, as of now."""
        return sum(layer.stall_seconds for layer in self.layers)

    def as_dict(self) -> dict[str, object]:
        """The totals, the hit ratio, and the counters of each layer, for JSON."""
        total, layers = self.total, [asdict(layer) for layer in self.layers]
        return {**asdict(total), "hit_ratio": total.hit_ratio, "layers": layers}

    def reset(self) -> None:
        """Set all counters to zero."""
        for layer in self.layers:
            vars(layer).update(vars(LayerStatistics()))
