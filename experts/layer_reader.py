"""Reads one MoE layer's file (`experts.layer_file`) into memory that kernels take as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.blobs import as_bytes
from experts.header import DTYPES
from experts.layer_file import WHOLE, blob_name
from experts.manifest import LayerRecord, StoreError
from experts.opening import OpenFile
from experts.reading import FileReader, fresh_bytes
from experts.weights import ExpertKey, ExpertShape, from_expert_blobs
from kernels import ExpertWeights
from kernels.reference import AnyExperts

READ_BYTES = 16 << 20


def read_layer(
    file: OpenFile,
    index: int,
    record: LayerRecord,
    layout: ExpertShape,
    bits: int,
    like: ExpertWeights,
    device: torch.device,
    advance: Callable[[int], object],
) -> AnyExperts:
    """See `experts.store.Store.load_layer`; the file's tensors are those of `layer_entries`."""
    with FileReader(file) as source:
        read = _Reader(file, source, device, advance)
        own: dict[str, Any] = {"activation": like.activation, "post_norm": like.post_norm}
        for field, name in (("gate_up_bias_EG", "gate_up_bias"), ("down_bias_EH", "down_bias")):
            if (tensor := f"layers.{index}.{name}") in file.tensors:
                own[field] = read.tensor(tensor)
        if bits == WHOLE:
            return ExpertWeights(*_whole(read, index, record), **own)
        widths = [record.bits_of(expert, bits) for expert in range(record.experts)]
        blobs = _planes(read, index, layout, widths)
        return from_expert_blobs(layout, blobs, record.interleaved, **own)


def _whole(read: _Reader, index: int, record: LayerRecord) -> tuple[Tensor, Tensor]:
    """Both projections of all experts."""
    dtype, rows = DTYPES[record.dtype], record.parts * record.intermediate
    shapes = (record.experts, rows, record.hidden), (record.experts, record.hidden, -1)
    sizes = record.hidden * rows, record.hidden * record.intermediate
    first, second = (
        fresh_bytes(record.experts * size * dtype.itemsize).view(dtype).view(shape)
        for shape, size in zip(shapes, sizes, strict=True)
    )
    for expert, (one, two) in enumerate(zip(first, second, strict=True)):
        start = read.start(ExpertKey(index, expert), "whole")
        read.into(one, start)
        read.into(two, start + one.nbytes)
    return first.to(read.device), second.to(read.device)


def _planes(
    read: _Reader, index: int, layout: ExpertShape, widths: Sequence[int]
) -> list[tuple[list[Tensor], Tensor]]:
    """The first bits of each expert, as many as `widths` says, and the scales."""
    sizes = [layout.nbytes(bits) for bits in widths]
    starts = [read.start(ExpertKey(index, expert), "scales") for expert in range(len(widths))]
    memory = fresh_bytes(sum(sizes))
    read.ranges(memory, starts, sizes)
    blobs = []
    for expert, bits in zip(memory.to(read.device).split(sizes), widths, strict=True):
        planes, scales = layout.split(expert[None], bits)
        blobs.append(([plane[0] for plane in planes], scales[0]))
    return blobs


@dataclass(frozen=True)
class _Reader:
    """Reads byte ranges of one file into fresh memory; `advance` hears of every slice."""

    file: OpenFile
    source: FileReader
    device: torch.device
    advance: Callable[[int], object]

    def start(self, key: ExpertKey, blob: str) -> int:
        return self.file.tensors[blob_name(key, blob)].start

    def tensor(self, name: str) -> Tensor:
        info = self.file.tensors[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self.into(tensor, info.start)
        return tensor.to(self.device)

    def ranges(self, place: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Ranges one after the other into `place`; neighbours in the file are read as one."""
        runs: list[list[int]] = []
        for start, size in zip(starts, sizes, strict=True):
            if runs and sum(runs[-1]) == start:
                runs[-1][1] += size
            else:
                runs.append([start, size])
        for part, (start, _) in zip(place.split([size for _, size in runs]), runs, strict=True):
            self.into(part, start)

    def into(self, place: Tensor, start: int) -> None:
        view = as_bytes(place)
        for offset in range(0, len(view), READ_BYTES):
            part = view[offset : offset + READ_BYTES]
            try:
                got = self.source.read(part, start + offset)
            except OSError as error:
                raise StoreError(f"cannot read {self.file.path}: {error.strerror}") from error
            if got != len(part):
                raise StoreError(
                    f"{self.file.path} ended at byte {start + offset + got}: it was truncated "
                    "after it was opened"
                )
            self.advance(got)
