"""One MoE layer's experts as a safetensors file: which tensors in which order, and writing them.

Expert by expert: the scales, then the planes, coarsest first. So an expert at any precision is one
range of bytes, read at once, and the planes it does not want are never touched. Whole weights (16
bits) are one blob an expert: the first projection, then the second. The biases of all experts come
last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from experts.blobs import Entry, FileRecord, write_file
from experts.header import DTYPE_NAMES, DTYPES
from experts.manifest import LayerRecord
from experts.weights import ExpertKey
from kernels import ExpertWeights, QuantizedExperts
from kernels.planes import PLANE_BITS, num_planes
from kernels.reference import AnyExperts

WHOLE = 16
"""Bits of weights that are kept as they are."""


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
) -> LayerRecord:
    """What the manifest says of a layer; ``bits`` of each expert, where they were allotted."""
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
    return LayerRecord.model_validate(record)


def layer_entries(index: int, record: LayerRecord, bits: int, group_size: int) -> list[Entry]:
    """The tensors of a layer's file, in their order, of which experts have at most so many bits."""
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
    directory: Path, index: int, record: LayerRecord, experts: AnyExperts
) -> FileRecord:
    """Write a layer's file. Raises OSError; nothing is left of a file that was not finished."""
    if isinstance(experts, QuantizedExperts):
        bits = max(map(experts.bits_of, range(experts.num_experts)))
        group_size = experts.first.group_size
    else:
        bits, group_size = WHOLE, 64
    entries = layer_entries(index, record, bits, group_size)
    return write_file(directory / record.file, entries, _tensors(experts))


def _tensors(experts: AnyExperts) -> Iterator[Tensor]:
    if isinstance(experts, QuantizedExperts):
        for scales, planes in zip(experts.scales, experts.planes, strict=True):
            yield from (blob.cpu() for blob in (scales, *planes))
    else:
        for first, second in zip(experts.gate_up_EGH, experts.down_EHF, strict=True):
            yield torch.cat([first.flatten(), second.flatten()]).cpu()
    for bias in (experts.gate_up_bias_EG, experts.down_bias_EH):
        if bias is not None:
            yield bias.cpu()
