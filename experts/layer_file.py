"""The file of one MoE layer in a store: its layout, and writing and reading it.

Experts follow one another. Each has its scales, then its bit planes, coarsest first, each a tensor
("blob"): so an expert at any precision is one range of bytes, read at once, and finer planes are
never touched. Whole weights (16 bits) are one blob an expert: the first projection, then the
second. The biases of all experts come last. `layer_entries` lists the tensors in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.manifest import MoELayerRecord, StoreError
from experts.safetensors_io import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    FileReader,
    FileRecord,
    OpenFile,
    as_bytes,
    fresh_bytes,
    write_file,
)
from experts.weights import ExpertKey, ExpertShape, from_expert_blobs
from kernels import ExpertWeights, QuantizedExperts
from kernels.planes import PLANE_BITS, num_planes
from kernels.reference import AnyExperts

WHOLE = 16
"""Bits of weights that are kept as they are."""
READ_BYTES = 16 << 20
"""Most bytes of one read of a layer."""


def layer_file_name(index: int) -> str:
    return f"experts-{index:05}.safetensors"


def blob_name(key: ExpertKey, blob: str) -> str:
    """Name of a blob: ``scales``, ``plane0`` to ``plane3`` or ``whole``."""
    return f"layers.{key.layer}.experts.{key.expert}.{blob}"


def plane_name(plane: int) -> str:
    return f"plane{plane}"


def layer_record(
    index: int,
    module: str,
    whole: ExpertWeights,
    interleaved: bool,
    bits: Sequence[int] | None = None,
) -> MoELayerRecord:
    """A layer's record for the manifest.

    Args:
        bits: of each expert, where they were allotted one by one.
    """
    biases = (whole.gate_up_bias_EG, whole.down_bias_EH)
    first, second = (None if bias is None else DTYPE_NAMES[bias.dtype] for bias in biases)
    record = {
        "module": module,
        "file": layer_file_name(index),
        "experts": whole.num_experts,
        "hidden": whole.hidden_size,
        "intermediate": whole.intermediate_size,
        "parts": whole.gate_up_EGH.shape[1] // whole.intermediate_size,
        "interleaved": interleaved,
        "dtype": DTYPE_NAMES[whole.gate_up_EGH.dtype],
        "gate_up_bias": first,
        "down_bias": second,
        "bits": None if bits is None else tuple(bits),
    }
    return MoELayerRecord.model_validate(record)


def layer_entries(index: int, record: MoELayerRecord, bits: int, group_size: int) -> list[Entry]:
    """The tensors of a layer's file in order, with at most ``bits`` of each expert."""
    shape = record.shape(group_size)
    weights = record.hidden * record.intermediate * (record.parts + 1)
    whole = [("whole", DTYPES[record.dtype], weights)]
    nested = [("scales", torch.float16, shape.num_scales)]
    nested += [
        (plane_name(plane), torch.uint8, shape.plane_bytes(plane))
        for plane in range(len(PLANE_BITS))
    ]

    def blobs(expert: int) -> list[tuple[str, torch.dtype, int]]:
        if bits == WHOLE:
            return whole
        return nested[: 1 + num_planes(record.bits_of(expert, bits))]

    entries = [
        Entry(blob_name(ExpertKey(index, expert), name), dtype, (size,))
        for expert in range(record.experts)
        for name, dtype, size in blobs(expert)
    ]
    for name, dtype_name, width in (
        ("gate_up_bias", record.gate_up_bias, record.parts * record.intermediate),
        ("down_bias", record.down_bias, record.hidden),
    ):
        if dtype_name is not None:
            bias = Entry(f"layers.{index}.{name}", DTYPES[dtype_name], (record.experts, width))
            entries.append(bias)
    return entries


def write_layer(
    directory: Path, index: int, record: MoELayerRecord, experts: AnyExperts
) -> FileRecord:
    """Write a layer's file. Raises OSError; an unfinished file is removed."""
    if isinstance(experts, QuantizedExperts):
        bits = max(map(experts.bits_of, range(experts.num_experts)))
        group_size = experts.first.group_size
    else:
        bits, group_size = WHOLE, 64
    entries = layer_entries(index, record, bits, group_size)
    return write_file(directory / record.file, entries, _tensors(experts))


def _tensors(experts: AnyExperts) -> Iterator[Tensor]:
    if isinstance(experts, QuantizedExperts):
        experts = experts.for_device(torch.device("cpu"))
        for scales, planes in zip(experts.scales, experts.planes, strict=True):
            yield from (blob.cpu() for blob in (scales, *planes))
    else:
        for first, second in zip(experts.gate_up_EGH, experts.down_EHF, strict=True):
            yield torch.cat([first.flatten(), second.flatten()]).cpu()
    for bias in (experts.gate_up_bias_EG, experts.down_bias_EH):
        if bias is not None:
            yield bias.cpu()


def read_layer(
    file: OpenFile,
    index: int,
    record: MoELayerRecord,
    layout: ExpertShape,
    bits: int,
    like: ExpertWeights,
    device: torch.device,
    advance: Callable[[int], object],
    check: Callable[[int, Sequence[Tensor]], object],
) -> AnyExperts:
    """See `Store.load_layer`; the file's tensors are those of `layer_entries`.

    Args:
        check: called with each expert and its bytes on the CPU, see `Store.check`.
    """
    with FileReader(file) as source:
        read = _Reader(file, source, device, advance)
        own: dict[str, Any] = {"activation": like.activation, "post_norm": like.post_norm}
        for field, name in (("gate_up_bias_EG", "gate_up_bias"), ("down_bias_EH", "down_bias")):
            if (tensor := f"layers.{index}.{name}") in file.tensors:
                own[field] = read.tensor(tensor)
        if bits == WHOLE:
            return ExpertWeights(*_whole(read, index, record, check), **own)
        widths = [record.bits_of(expert, bits) for expert in range(record.experts)]
        blobs = _planes(read, index, layout, widths, check)
        return from_expert_blobs(layout, blobs, record.interleaved, **own)


def _whole(
    read: _Reader,
    index: int,
    record: MoELayerRecord,
    check: Callable[[int, Sequence[Tensor]], object],
) -> tuple[Tensor, Tensor]:
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
        check(expert, (one, two))
    return first.to(read.device), second.to(read.device)


def _planes(
    read: _Reader,
    index: int,
    layout: ExpertShape,
    widths: Sequence[int],
    check: Callable[[int, Sequence[Tensor]], object],
) -> list[tuple[list[Tensor], Tensor]]:
    """Planes and scales of the first ``widths[expert]`` bits of each expert."""
    sizes = [layout.nbytes(bits) for bits in widths]
    starts = [read.start(ExpertKey(index, expert), "scales") for expert in range(len(widths))]
    memory = fresh_bytes(sum(sizes))
    read.ranges(memory, starts, sizes)
    for expert, part in enumerate(memory.split(sizes)):
        check(expert, (part,))
    blobs = []
    for expert, bits in zip(memory.to(read.device).split(sizes), widths, strict=True):
        planes, scales = layout.split(expert[None], bits)
        blobs.append(([plane[0] for plane in planes], scales[0]))
    return blobs


@dataclass(frozen=True)
class _Reader:
    """Reads byte ranges of one file; `advance` is called with the bytes of every read."""

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
        """Read ranges one after the other into `place`; adjacent ones are read as one."""
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
