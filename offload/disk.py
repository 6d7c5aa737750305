"""Experts of a store on their way from its files into slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.header import pread_exactly
from experts.store import Store
from experts.weights import ExpertKey
from offload.arena import Arena
from offload.errors import OffloadError
from offload.transfer import Read, Reader, Transfer


@dataclass(frozen=True)
class Biases:
    """Of all experts of a layer: too small to be read one by one.

    Attributes:
        gate_up_EG, down_EH: float32 on the CPU, or None.
    """

    gate_up_EG: Tensor | None
    down_EH: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(bias.nbytes for bias in (self.gate_up_EG, self.down_EH) if bias is not None)


def read_biases(store: Store, layer: int) -> Biases:
    """Raises `OffloadError` where the file cannot be read."""
    file = store.file(layer)

    def read(name: str) -> Tensor | None:
        info = file.tensors.get(f"layers.{layer}.{name}")
        if info is None:
            return None
        raw = bytearray(info.nbytes)
        try:
            got = pread_exactly(file.fd, memoryview(raw), info.start)
        except OSError as error:
            raise OffloadError(f"cannot read {file.path}: {error.strerror}") from error
        if got != info.nbytes:
            raise OffloadError(f"{file.path} ended early: it was truncated after it was opened")
        return torch.frombuffer(raw, dtype=info.dtype).view(info.shape).float()

    return Biases(read("gate_up_bias"), read("down_bias"))


class DiskSource:
    """Fills slots of main memory from a store; see `offload.filling.Source`.

    Args:
        store: stays open as long as this is used.
        bits: of the experts; 16 for whole ones.
        reader: reads the store's files.
        arena: the slots' memory.
        biases: of each layer.
    """

    def __init__(
        self, store: Store, bits: int, reader: Reader, arena: Arena, biases: Sequence[Biases]
    ) -> None:
        self._store = store
        self._starts = [
            [store.prefix(ExpertKey(at, expert), bits).start for expert in range(layer.experts)]
            for at, layer in enumerate(store.manifest.layers)
        ]
        self._reader, self._arena, self._biases = reader, arena, list(biases)
        self._places: dict[int, list[Tensor]] = {}  # of slots: made once, as somebody waits

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Transfer:
        file, places = self._store.file(layer), self._places.get(slot)
        if places is None:
            places = self._places[slot] = self._arena.places(slot)
        reads, offset = [], self._starts[layer][expert]
        for place in places:
            reads.append(Read(file.fd, file.path, offset, place, file.status))
            offset += place.numel()
        self._put_biases(self._biases[layer], expert, slot)
        what = f"expert {expert} of MoE layer {layer}"
        return self._reader.submit(reads, urgent=urgent, what=what)

    def _put_biases(self, biases: Biases, expert: int, slot: int) -> None:
        slots = self._arena.experts
        if biases.gate_up_EG is not None and slots.gate_up_bias_EG is not None:
            slots.gate_up_bias_EG[slot] = biases.gate_up_EG[expert]
        if biases.down_EH is not None and slots.down_bias_EH is not None:
            slots.down_bias_EH[slot] = biases.down_EH[expert]
