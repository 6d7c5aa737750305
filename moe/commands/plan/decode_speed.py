"""Estimate the decode speed of a model whose experts do not all fit in device memory.

A step of B tokens reads the trunk (all weights but experts) once and, in every MoE layer, the
distinct experts that its tokens choose; experts that are not in device memory come from host memory
or disk first. The bytes of each path over its measured bandwidth are the least time of a step. On a
CPU the bandwidth is that of products with bit planes, and what a layer takes beside its weights is
added. There, too, a layer's reads begin together, and its experts run in order as they arrive
(`layer_with_reads`); on a GPU paths are taken one after the other. Prefetches, and attention to
long contexts, are not counted.

Where a step reads several tokens of each sequence, products may take longer than reading weights,
and tokens may be final only after several steps.
Legend: E experts of a layer, K of them per token, B tokens of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class Bandwidths:
    """Measured bandwidths, in bytes per second.

    Attributes:
        memory: at which a step reads weights from the device's own memory.
        disk: of random reads of whole experts, many at a time; None if the disk is not needed.
        to_device: from pinned host memory to a CUDA device; None on a CPU.
        layer_s: seconds of a layer beside its weights.
        row_s: seconds that each token adds to these.
        read_s: seconds of a layer's reads beside their bytes.
        products: FLOP/s of products of matrices; None if steps have too few tokens to be bound by
            them.
    """

    memory: float
    disk: float | None = None
    to_device: float | None = None
    layer_s: float = 0.0
    row_s: float = 0.0
    read_s: float = 0.0
    products: float | None = None

    def beside(self, layers: int, batch: int) -> float:
        """Seconds of a step beside its weights."""
        return layers * (self.layer_s + batch * self.row_s)


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of the weights that a decode step reads, and how many experts each memory holds.

    Attributes:
        layers: MoE layers.
        experts: E.
        top_k: K.
        expert_bytes: of one expert at the precision it is served at.
        trunk_bytes: of the weights that every step reads.
        slots: experts that device memory holds.
        host_slots: experts that host memory holds for a CUDA device; 0 on a CPU.
        rows: tokens of a sequence that a step reads.
        steps: until they are final.
        flops: of one of them beside attention; 0: not known.
        about: what such steps do, as a sentence; empty if they decode one token.
    """

    layers: int
    experts: int
    top_k: float
    expert_bytes: int
    trunk_bytes: int
    slots: int
    host_slots: int = 0
    rows: int = 1
    steps: int = 1
    flops: float = 0.0
    about: str = ""

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts


class Locality(Protocol):
    """The number of experts that a step needs, and of those that a cache holds."""

    @property
    def how(self) -> str:
        """The origin of the figures, in words."""
        ...

    def distinct(self, batch: int) -> float:
        """Distinct experts that B tokens choose in a layer."""
        ...

    def hit_ratio(self, batch: int, slots: int) -> float:
        """Share of them that a cache of ``slots`` experts for all layers holds."""
        ...


@dataclass(frozen=True)
class UniformRouting:
    """Every expert is equally likely at every token.

    Real routing is skewed and repeats itself: it needs fewer experts and hits more often.
    """

    sizes: DecodeSizes
    how: str = "every expert taken as equally likely; run `moe calibrate` for the model's own"

    def distinct(self, batch: int) -> float:
        """``E (1 - (1 - K/E)^B)``."""
        share = min(self.sizes.top_k / self.sizes.experts, 1.0)
        return self.sizes.experts * (1 - (1 - share) ** batch)

    def hit_ratio(self, batch: int, slots: int) -> float:
        return min(slots / self.sizes.total, 1.0)


@dataclass(frozen=True)
class DecodeEstimate:
    """Estimate of a decode step of several sequences.

    Attributes:
        batch: sequences.
        tokens: that a step makes final, on average.
        hit_ratio: share of the needed experts that are in device memory.
        disk_bytes_per_token: read from disk.
        seconds: of a step, by path: ``memory`` (computation included), ``disk`` (on a CPU with the
            time from the call to the first byte, once for each layer that reads), ``to_device``.
        step_s: seconds of a step.
    """

    batch: int
    tokens: float
    hit_ratio: float
    disk_bytes_per_token: float
    seconds: Mapping[str, float]
    step_s: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_s

    @property
    def best_tokens_per_second(self) -> float:
        """If all paths run at the same time."""
        return self.tokens / max(self.seconds.values())

    @property
    def bound(self) -> str:
        """The path that takes longest."""
        return max(self.seconds, key=lambda path: self.seconds[path])

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            "best_tokens_per_second": self.best_tokens_per_second,
            "bound": self.bound,
        }


def estimate_decode(
    sizes: DecodeSizes, speeds: Bandwidths, locality: Locality, batch: int
) -> DecodeEstimate:
    """Estimate a step of ``batch`` sequences."""
    rows, tokens = batch * sizes.rows, batch * sizes.rows / sizes.steps

    def share_of(slots: int) -> float:  # even with all slots, a replay misses first uses
        return 1.0 if slots == sizes.total else locality.hit_ratio(rows, slots)

    hits = share_of(sizes.slots)
    near = max(hits, share_of(sizes.host_slots)) if sizes.host_slots else hits
    distinct = locality.distinct(rows)
    wanted = sizes.layers * distinct * sizes.expert_bytes
    trunk = sizes.trunk_bytes / speeds.memory
    moved = trunk + wanted / speeds.memory
    if speeds.products is not None:
        moved = max(moved, rows * sizes.flops / speeds.products)
    beside = speeds.beside(sizes.layers, rows)
    seconds = {"memory": moved + beside}
    from_disk = (1 - near) * wanted
    if from_disk:
        assert speeds.disk is not None
        seconds["disk"] = from_disk / speeds.disk
    if speeds.to_device is not None and hits < 1:
        seconds["to_device"] = (1 - hits) * wanted / speeds.to_device
    step_s = sum(seconds.values())
    if speeds.disk is not None and speeds.to_device is None:
        expert_s, read_s = (moved - trunk) / wanted, 1 / speeds.disk
        expert_s, read_s = expert_s * sizes.expert_bytes, read_s * sizes.expert_bytes
        layer_s = layer_with_reads(distinct, hits, expert_s, read_s, speeds.read_s)
        step_s = trunk + beside + sizes.layers * layer_s
        if from_disk:
            reading = 1 - _chance(0, *_missing(distinct, hits))  # share of layers with a read
            seconds["disk"] += sizes.layers * reading * speeds.read_s
    return DecodeEstimate(batch, tokens, hits, from_disk / tokens, seconds, step_s)


def layer_with_reads(
    distinct: float, hits: float, expert_s: float, read_s: float, begin_s: float
) -> float:
    """Expected seconds in which a layer's experts run while those that are missing are read.

    Experts run in the order of their ids, each when it and all before it are in memory. Any n - m
    of them may be there, so (n - m) / (m + 1) come before the first that is missing, and as many
    behind the last. A layer takes no less than its experts, than what waits for the first read,
    and than all reads and what waits for the last. How many are missing is a draw for each expert.

    Args:
        distinct: n, the experts that the layer needs.
        hits: share of them that is in memory.
        expert_s: to run one.
        read_s: to read one.
        begin_s: from the call to the first byte, if one is missing.
    """
    count, missing = _missing(distinct, hits)
    expert_s *= distinct / count  # so many whole experts take as long
    expected = 0.0
    for m in range(count + 1):
        apart = (count - m) / (m + 1)
        least = count * expert_s
        if m:
            first = begin_s + read_s + (count - apart) * expert_s
            last = begin_s + m * read_s + (1 + apart) * expert_s
            least = max(least, first, last)
        expected += _chance(m, count, missing) * least
    return expected


def _missing(distinct: float, hits: float) -> tuple[int, float]:
    """A whole number of experts that a layer needs, and the chance of each to be missing: as many
    are missing as of the broken number."""
    count = max(round(distinct), 1)
    return count, min((1 - hits) * distinct / count, 1.0)


def _chance(hits: int, draws: int, share: float) -> float:
    """Return the probability of so many hits in some draws; by logarithms, as there may be
    thousands."""
    if share in (0.0, 1.0):
        return float(hits == draws * share)
    ways = math.lgamma(draws + 1) - math.lgamma(hits + 1) - math.lgamma(draws - hits + 1)
    return math.exp(ways + hits * math.log(share) + (draws - hits) * math.log1p(-share))
