"""The memory of a cache's slots, at addresses that never change.

Kernels see an arena as one layer whose experts are the slots, so their tables of addresses stay
valid whatever the cache does. Slots of different sizes share the memory (`offload.slots`). In main
memory, address space is reserved for the most there can ever be; the system gives memory when a
slot is filled, and takes it back when `Arena.resize` drops slots. Legend: S slots, N grains.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, gcd, lcm
from typing import Any

import torch
from torch import Tensor

from experts.weights import ExpertShape, from_expert_blobs
from kernels import ExpertWeights, QuantizedExperts, arrange_for_cuda
from kernels.planes import arrangement_for
from kernels.reference import AnyExperts

PAGE = 4096
_ALIGNMENT = 64
PIN_BYTES = 1 << 30
"""Page-locked with one call, so that a refusal costs no more than this."""
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # in `mmap` from Python 3.13 on


class Arena:
    """Memory of S slots; see `plane_arena` and `whole_arena`.

    Attributes:
        experts: the slots as the experts of one layer; `dataclasses.replace` gives a layer its
            own activation.
        capacity: N, the most grains there can be.
        grain_bytes: memory of one grain.
        pinned: number of grains, from the first on, whose memory is page-locked.
    """

    def __init__(
        self, experts: AnyExperts, rows: Sequence[_Rows], kinds: Sequence[Sequence[Tensor]]
    ) -> None:
        self.experts = experts
        self.capacity = rows[0].memory.shape[0]
        self.grain_bytes = sum(part.memory.stride(0) for part in rows)
        self.pinned = 0
        self._rows, self._kinds = list(rows), list(kinds)
        self._firsts = [0, *accumulate(len(parts[0]) for parts in kinds)]

    def places(self, slot: int) -> list[Tensor]:
        """Return the places of an expert's bytes, in the order of a store's file: 1-D uint8 views.

        Args:
            slot: in ``[0, S)``.
        """
        kind = bisect_right(self._firsts, slot) - 1
        return [part[slot - self._firsts[kind]] for part in self._kinds[kind]]

    def biases(self, slot: int) -> list[Tensor]:
        """The slot's biases, first projection first; empty without biases."""
        both = self.experts.gate_up_bias_EG, self.experts.down_bias_EH
        return [bias[slot] for bias in both if bias is not None]

    def move(self, source: int, target: int) -> None:
        """Copy a slot to one of the same size, its biases included."""
        old = self.places(source) + self.biases(source)
        for new, part in zip(self.places(target) + self.biases(target), old, strict=True):
            new.copy_(part)

    def arrange(self, slots: Sequence[int]) -> None:
        """The bytes of a store's file have come into these slots: arrange them for the device."""
        experts = self.experts
        if isinstance(experts, QuantizedExperts) and experts.first.arrangement == "cuda":
            arrange_for_cuda(experts, slots)

    def resize(self, grains: int) -> None:
        """Use the first ``grains`` only; the others lose their contents, and pageable memory of
        theirs goes back to the system. Pinned memory and a GPU's stays taken."""
        assert 0 <= grains <= self.capacity, grains
        for part in self._rows:
            part.give_back(max(grains, self.pinned))

    def pin(self, grains: int, pin: Callable[[Tensor], bool]) -> list[Tensor]:
        """Page-lock the first ``grains``, or as many as the system allows.

        Args:
            pin: locks pages; returns whether it could.

        Returns:
            The pieces that were locked.
        """
        locked: list[Tensor] = []
        pages = lcm(*(PAGE // gcd(part.memory.stride(0), PAGE) for part in self._rows))
        step = max(1, PIN_BYTES // (pages * self.grain_bytes)) * pages  # ends where a page ends
        while self.pinned + step <= grains or self.pinned < grains == self.capacity:
            end = min(self.pinned + step, grains)
            for part in self._rows:
                piece = part.memory[self.pinned : end]
                if not pin(piece):
                    return locked
                locked.append(piece)
            self.pinned = end
        return locked


def grain_bytes(shape: ExpertShape, grains_of: Mapping[int, int]) -> int:
    """Bytes of a grain.

    Grains begin on pages, unless experts have several sizes that are not whole pages: that would
    waste much, and reads that do not end on pages go through a buffer anyway.

    Args:
        grains_of: bits of an expert -> grains that must hold it.
    """
    sizes = [shape.nbytes(bits) for bits in grains_of]
    step = PAGE if len(sizes) == 1 or not any(size % PAGE for size in sizes) else _ALIGNMENT
    each = (shape.nbytes(bits) / grains for bits, grains in grains_of.items())
    return -(-ceil(max(each)) // step) * step


def plane_arena(
    shape: ExpertShape,
    grains_of: Mapping[int, int],
    grains: int,
    interleaved: bool,
    device: torch.device | str = "cpu",
    **own: Any,
) -> Arena:
    """Slots for experts as planes, each as in a store's file: scales, then the planes.

    Args:
        shape: of every expert.
        grains_of: the bits that experts may have -> grains of a slot.
        grains: the most there can ever be; main memory is only taken when it is filled.
        interleaved: see `kernels.QuantizedExperts`.
        own: activation, post_norm and ``(S, .)`` biases.
    """
    size = grain_bytes(shape, grains_of)
    rows = _Rows.of(grains, size, torch.device(device))
    kinds: list[list[Tensor]] = []
    blobs: list[tuple[Sequence[Tensor], Tensor]] = []
    for bits, each in grains_of.items():
        used = rows.memory[: grains // each * each].view(-1, each * size)[:, : shape.nbytes(bits)]
        planes, scales = shape.split(used, bits)
        kinds.append([used])
        each_planes = zip(*(plane.unbind() for plane in planes), strict=True)
        blobs += zip(each_planes, scales.unbind(), strict=True)
    experts = from_expert_blobs(shape, blobs, interleaved, **own)
    return Arena(experts.relabelled(arrangement_for(rows.memory.device)), [rows], kinds)


def whole_arena(
    shape: ExpertShape,
    dtype: torch.dtype,
    slots: int,
    device: torch.device | str = "cpu",
    **own: Any,
) -> Arena:
    """As `plane_arena`, for whole experts: two places each, one for each projection."""
    rows = shape.parts * shape.intermediate
    sizes = (rows, shape.hidden), (shape.hidden, shape.intermediate)
    parts = [_Rows.of(slots, a * b * dtype.itemsize, torch.device(device)) for a, b in sizes]
    first, second = (
        part.memory.view(dtype).view(slots, *size) for part, size in zip(parts, sizes, strict=True)
    )
    return Arena(ExpertWeights(first, second, **own), parts, [[part.memory for part in parts]])


@dataclass(frozen=True)
class _Rows:
    """``(N, stride)`` uint8, and its mapping; None for memory of a GPU."""

    memory: Tensor
    mapping: mmap.mmap | None

    @classmethod
    def of(cls, rows: int, nbytes: int, device: torch.device) -> _Rows:
        if device.type != "cpu":
            return cls(torch.empty(rows, nbytes, dtype=torch.uint8, device=device), None)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapping = mmap.mmap(-1, rows * nbytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(torch.frombuffer(mapping, dtype=torch.uint8).view(rows, nbytes), mapping)

    def give_back(self, row: int) -> None:
        """Return the pages behind the first ``row`` rows to the system."""
        start = -(-row * self.memory.stride(0) // PAGE) * PAGE
        if self.mapping is not None and start < len(self.mapping):
            self.mapping.madvise(mmap.MADV_DONTNEED, start)
