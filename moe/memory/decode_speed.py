"""How fast will a model decode that does not fit, and how much of it comes from the disk?

A step of B tokens reads the trunk once and, of every MoE layer, the distinct experts that its
tokens choose; those that are not in device memory come from the host's or from the disk first. The
bytes of each way over its measured bandwidth are the least time of a step. Known before anything of
the model is read; what a real run adds (arithmetic, waiting for one read after another) is not in
it. Legend: E experts of a layer, K of them a token, B tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class Bandwidths:
    """Measured bandwidths, bytes a second.

    Attributes:
        memory: at which the device reads its memory.
        disk: of random reads of whole experts; None where the disk is not needed.
        to_device: from pinned host memory to a CUDA device; None on a CPU.
    """

    memory: float
    disk: float | None = None
    to_device: float | None = None


@dataclass(frozen=True)
class DecodeSizes:
    """What a model's decode step moves, and where its experts are.

    Attributes:
        layers: MoE layers.
        experts: E.
        top_k: K.
        expert_bytes: one expert at the precision it is served at.
        trunk_bytes: weights that every step reads.
        slots: experts that device memory holds.
        host_slots: experts that host memory holds for a CUDA device; 0 on a CPU.
    """

    layers: int
    experts: int
    top_k: float
    expert_bytes: int
    trunk_bytes: int
    slots: int
    host_slots: int = 0

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts


class Locality(Protocol):
    """What is known of a model's routing."""

    @property
    def how(self) -> str:
        """Where it is known from."""
        ...

    def distinct(self, batch: int) -> float:
        """Distinct experts that a layer's B tokens choose."""
        ...

    def hit_ratio(self, batch: int, slots: int) -> float:
        """Share of them that are among the ``slots`` experts held, over all layers."""
        ...


@dataclass(frozen=True)
class UniformRouting:
    """Every expert is as likely as any other, whatever came before.

    Real routing has favourites and repeats itself, so it visits fewer and hits more.
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
    """What a decode step of so many tokens should do.

    Attributes:
        batch: B.
        hit_ratio: experts that are in device memory when they are wanted.
        host_hit_ratio: experts that are at least in host memory; as `hit_ratio` on a CPU.
        disk_bytes_per_token: read from the disk.
        seconds: of a step by way: ``memory``, ``disk``, ``to_device``.
    """

    batch: int
    hit_ratio: float
    host_hit_ratio: float
    disk_bytes_per_token: float
    seconds: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Where each way waits for the others."""
        return self.batch / sum(self.seconds.values())

    @property
    def best_tokens_per_second(self) -> float:
        """Where every transfer runs under something else."""
        return self.batch / max(self.seconds.values())

    @property
    def bound(self) -> str:
        """The way that takes longest."""
        return max(self.seconds, key=lambda way: self.seconds[way])

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
    """What a step of ``batch`` tokens should do."""

    def share_of(slots: int) -> float:  # a replay misses what it has not seen before
        return 1.0 if slots == sizes.total else locality.hit_ratio(batch, slots)

    hits = share_of(sizes.slots)
    near = max(hits, share_of(sizes.host_slots)) if sizes.host_slots else hits
    wanted = sizes.layers * locality.distinct(batch) * sizes.expert_bytes
    seconds = {"memory": (sizes.trunk_bytes + wanted) / speeds.memory}
    from_disk = (1 - near) * wanted
    if from_disk:
        assert speeds.disk is not None
        seconds["disk"] = from_disk / speeds.disk
    if speeds.to_device is not None and hits < 1:
        seconds["to_device"] = (1 - hits) * wanted / speeds.to_device
    return DecodeEstimate(batch, hits, near, from_disk / batch, seconds)
