"""The arena: memory of all slots, each room for one expert, at addresses that never change.

It is presented to the kernels once, as one layer whose experts are the slots, so their tables of
addresses stay valid whatever the cache does. Slots of different sizes share the memory, see
`offload.slots`. In main memory address space is reserved for as much as there can ever be; memory
is taken when a slot is filled and given back when slots are taken away. Legend: S slots, N grains.
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
from kernels import ExpertWeights
from kernels.reference import AnyExperts

PAGE = 4096
_ALIGNMENT = 64
PIN_BYTES = 1 << 30
"""Locked with one call: what the system refuses is not more than this."""
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # in `mmap` from Python 3.13 on


class Arena:
    """Memory of S slots; see `plane_arena` and `whole_arena`.

    Attributes:
        experts: the slots as the experts of one layer; `dataclasses.replace` gives a layer its
            own activation.
        capacity: N, grains there can be.
        grains: that may be used now.
        grain_bytes: memory of one.
        pinned: grains, from the first on, whose memory is page-locked.
    """

    def __init__(
        self, experts: AnyExperts, rows: Sequence[_Rows], kinds: Sequence[Sequence[Tensor]]
    ) -> None:
        self.experts = experts
        self.capacity = self.grains = rows[0].memory.shape[0]
        self.grain_bytes = sum(part.memory.stride(0) for part in rows)
        self.pinned = 0
        self._rows, self._kinds = list(rows), list(kinds)
        self._firsts = [0, *accumulate(len(parts[0]) for parts in kinds)]

    def places(self, slot: int) -> list[Tensor]:
        """Where the bytes of an expert go, in the order of a store's file: 1-D uint8 views.

        Args:
            slot: in ``[0, S)``.
        """
        kind = bisect_right(self._firsts, slot) - 1
        return [part[slot - self._firsts[kind]] for part in self._kinds[kind]]

    def biases(self, slot: int) -> list[Tensor]:
        """The rows of the biases that there are, first projection first."""
        both = self.experts.gate_up_bias_EG, self.experts.down_bias_EH
        return [bias[slot] for bias in both if bias is not None]

    def move(self, source: int, target: int) -> None:
        """Copy a slot to one of the same size, its biases included."""
        old = self.places(source) + self.biases(source)
        for new, part in zip(self.places(target) + self.biases(target), old, strict=True):
            new.copy_(part)

    def resize(self, grains: int) -> None:
        """Use the first ``grains`` only; pageable memory of the others goes back to the system.

        Their contents are lost. Pinned and device memory stays taken.
        """
        assert 0 <= grains <= self.capacity, grains
        for part in self._rows:
            part.give_back(max(grains, self.pinned))
        self.grains = grains

    def pin(self, grains: int, pin: Callable[[Tensor], bool]) -> list[Tensor]:
        """Page-lock the first grains, as many of ``grains`` as the system lets us.

        Args:
            pin: locks pages, or says that it cannot.

        Returns:
            What was locked, piece by piece.
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
    """Memory of a grain, so that experts of so many bits have room in so many grains.

    They begin on pages, but where sizes differ and are no whole pages: much would be lost, and
    reads that do not end on pages go through a buffer anyway.
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
    """Room for experts as planes, each as in a store's file: scales, then the planes.

    Args:
        shape: of every expert.
        grains_of: the bits that they may have, and what those take.
        grains: the most there can ever be. Main memory is only taken when it is filled.
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
    return Arena(from_expert_blobs(shape, blobs, interleaved, **own), [rows], kinds)


def whole_arena(
    shape: ExpertShape,
    dtype: torch.dtype,
    slots: int,
    device: torch.device | str = "cpu",
    **own: Any,
) -> Arena:
    """As `plane_arena`, for whole experts: two places each, the first projection's and then the
    second's."""
    rows = shape.parts * shape.intermediate
    sizes = (rows, shape.hidden), (shape.hidden, shape.intermediate)
    parts = [_Rows.of(slots, a * b * dtype.itemsize, torch.device(device)) for a, b in sizes]
    first, second = (
        part.memory.view(dtype).view(slots, *size) for part, size in zip(parts, sizes, strict=True)
    )
    return Arena(ExpertWeights(first, second, **own), parts, [[part.memory for part in parts]])


@dataclass(frozen=True)
class _Rows:
    """``(N, stride)`` uint8, and the mapping it lies in if it is ours."""

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
        """The pages behind the first ``row`` rows, where they are ours to give."""
        start = -(-row * self.memory.stride(0) // PAGE) * PAGE
        if self.mapping is not None and start < len(self.mapping):
            self.mapping.madvise(mmap.MADV_DONTNEED, start)
