"""One MoE layer's experts as a safetensors file: which tensors in which order, writing, reading.

First plane 0 of every expert, then plane 1, plane 2, the scales and the biases: a coarser layer is
read in one go, and the planes it does not want are never touched. Whole weights (16 bits) are one
blob an expert: the first projection, then the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.blobs import Entry, FileRecord, as_bytes, write_file
from experts.header import DTYPES, pread_exactly
from experts.manifest import LayerRecord, StoreError
from experts.opening import OpenFile
from experts.weights import ExpertKey, ExpertShape, from_blobs
from kernels import ExpertWeights, QuantizedExperts
from kernels.planes import num_planes
from kernels.reference import AnyExperts

READ_BYTES = 16 << 20
WHOLE = 16
"""Bits of weights that are kept as they are."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def layer_file_name(index: int) -> str:
    return f"experts-{index:05}.safetensors"


def blob_name(key: ExpertKey, blob: str) -> str:
    """Name of a blob: ``plane0``, ``plane1``, ``plane2``, ``scales`` or ``whole``."""
    return f"layers.{key.layer}.experts.{key.expert}.{blob}"


def layer_record(index: int, module: str, whole: ExpertWeights, interleaved: bool) -> LayerRecord:
    """What the manifest says of a layer."""
    biases = (whole.gate_up_bias_EG, whole.down_bias_EH)
    first, second = (None if bias is None else _NAMES[bias.dtype] for bias in biases)
    record = {
        "module": module,
        "file": layer_file_name(index),
        "experts": whole.num_experts,
        "hidden": whole.hidden_size,
        "intermediate": whole.intermediate_size,
        "parts": whole.gate_up_EGH.shape[1] // whole.intermediate_size,
        "interleaved": interleaved,
        "dtype": _NAMES[whole.gate_up_EGH.dtype],
        "gate_up_bias": first,
        "down_bias": second,
    }
    return LayerRecord.model_validate(record)


def layer_entries(index: int, record: LayerRecord, bits: int, group_size: int) -> list[Entry]:
    """The tensors of a layer's file, in their order."""
    shape = record.shape(group_size)
    if bits == WHOLE:
        weights = record.hidden * record.intermediate * (record.parts + 1)
        blobs = [("whole", DTYPES[record.dtype], weights)]
    else:
        blobs = [
            (f"plane{plane}", torch.uint8, shape.plane_bytes(plane))
            for plane in range(num_planes(bits))
        ]
        blobs.append(("scales", torch.float16, shape.num_scales))
    entries = [
        Entry(blob_name(ExpertKey(index, expert), name), dtype, (size,))
        for name, dtype, size in blobs
        for expert in range(record.experts)
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
    directory: Path, index: int, record: LayerRecord, experts: AnyExperts
) -> FileRecord:
    """Write a layer's file. Raises OSError; nothing is left of a file that was not finished."""
    if isinstance(experts, QuantizedExperts):
        bits, group_size = experts.bits_of(0), experts.first.group_size
    else:
        bits, group_size = WHOLE, 64
    entries = layer_entries(index, record, bits, group_size)
    return write_file(directory / record.file, entries, _tensors(experts))


def _tensors(experts: AnyExperts) -> Iterator[Tensor]:
    if isinstance(experts, QuantizedExperts):
        for blobs in zip(*experts.planes, strict=True):
            yield from (blob.cpu() for blob in blobs)
        yield from (scales.cpu() for scales in experts.scales)
    else:
        for first, second in zip(experts.gate_up_EGH, experts.down_EHF, strict=True):
            yield torch.cat([first.flatten(), second.flatten()]).cpu()
    for bias in (experts.gate_up_bias_EG, experts.down_bias_EH):
        if bias is not None:
            yield bias.cpu()


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
    read = _Reader(file, device, advance)
    own: dict[str, Any] = {"activation": like.activation, "post_norm": like.post_norm}
    for field, name in (("gate_up_bias_EG", "gate_up_bias"), ("down_bias_EH", "down_bias")):
        if (tensor := f"layers.{index}.{name}") in file.tensors:
            own[field] = read.rows(tensor)
    zero, count = ExpertKey(index, 0), record.experts
    if bits == WHOLE:
        dtype, start = DTYPES[record.dtype], file.tensors[blob_name(zero, "whole")].start
        rows = record.parts * record.intermediate
        first = torch.empty(count, rows, record.hidden, dtype=dtype)
        second = torch.empty(count, record.hidden, record.intermediate, dtype=dtype)
        for weight in (half for pair in zip(first, second, strict=True) for half in pair):
            read.into(weight, start)
            start += weight.nbytes
        return ExpertWeights(first.to(device), second.to(device), **own)
    planes = [read.rows(blob_name(zero, f"plane{p}"), count) for p in range(num_planes(bits))]
    scales = read.rows(blob_name(zero, "scales"), count)
    return from_blobs(layout, planes, scales, record.interleaved, **own)


@dataclass(frozen=True)
class _Reader:
    """Reads byte ranges of one file into fresh memory; `advance` hears of every slice."""

    file: OpenFile
    device: torch.device
    advance: Callable[[int], object]

    def rows(self, name: str, *count: int) -> Tensor:
        """The tensor `name`; with a count, it and those that follow it, stacked."""
        info = self.file.tensors[name]
        tensor = torch.empty(*count, *info.shape, dtype=info.dtype)
        self.into(tensor, info.start)
        return tensor.to(self.device)

    def into(self, place: Tensor, start: int) -> None:
        view = as_bytes(place)
        for offset in range(0, len(view), READ_BYTES):
            part = view[offset : offset + READ_BYTES]
            try:
                got = pread_exactly(self.file.fd, part, start + offset)
            except OSError as error:
                raise StoreError(f"cannot read {self.file.path}: {error.strerror}") from error
            if got != len(part):
                raise StoreError(
                    f"{self.file.path} ended at byte {start + offset + got}: it was truncated "
                    "after it was opened"
                )
            self.advance(got)
