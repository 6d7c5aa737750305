"""The expert store: a directory from which any expert can be read at any precision.

It holds a manifest (`experts.manifest`), a safetensors file with the trunk, and one for each MoE
layer. `Store` opens and reads it; `write_layer` writes a layer's file.

In a layer's file, experts follow one another. Each has its scales, then its bit planes, coarsest
first, each a tensor ("blob"): so an expert at any precision is one range of bytes, read at once,
and finer planes are never touched. Whole weights (16 bits) are one blob an expert: the first
projection, then the second. The biases of all experts come last.

Each blob has a checksum, which `Store.check` compares: disks change bits in silence. A run that
compared every read would take 4 % longer (`benchmarks.checksums`), so experts that are read again
and again are not checked each time (`offload.open_store.DiskSource`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.manifest import Manifest, MoELayerRecord, StoreError, read_manifest
from experts.safetensors_io import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    FileReader,
    FileRecord,
    HeaderError,
    OpenFile,
    TensorInfo,
    as_bytes,
    digest_of,
    fresh_bytes,
    open_tensors,
    read_record,
    write_file,
)
from experts.weights import ExpertKey, ExpertShape, from_expert_blobs
from kernels import ExpertWeights, QuantizedExperts
from kernels.cpu.checksum import crc32
from kernels.planes import PLANE_BITS, num_planes
from kernels.reference import AnyExperts

WHOLE = 16
"""Bits of weights that are kept as they are."""
CHECKING = 4
"""Threads that compare checksums while a layer is loaded."""
READ_BYTES = 16 << 20
"""Most bytes of one read of a layer."""


class Store:
    """An open store, whose headers and sizes agree with its manifest.

    Attributes:
        directory: where it is.
        manifest: its manifest.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._files: dict[str, OpenFile] = {}
        self._closing = ExitStack()
        self._sums: dict[str, dict[str, int]] = {}

    @classmethod
    def open(cls, directory: Path, *, drafts: bool = True) -> Store:
        """Raises one `StoreError` naming every file and tensor at fault.

        Args:
            drafts: with the experts of a multi-token-prediction layer, if there is one; its files
                are checked in any case.
        """
        store = cls(directory, read_manifest(directory))
        problems = []
        try:
            for name, record in store.manifest.files.items():
                try:
                    store._open(name, record)
                except HeaderError as error:
                    problems.append(f"{name}: {error}")
            for index, layer in enumerate(store.manifest.layers):
                if layer.file in store._files:
                    problems += store._layer_faults(index, layer)
            if problems:
                shown = "\n".join(f"  - {problem}" for problem in problems[:50])
                raise StoreError(f"cannot use the store {directory}:\n{shown}")
            if not drafts:
                store.manifest = store.manifest.without_drafts()
        except BaseException:
            store.close()
            raise
        return store

    def file(self, layer: int) -> OpenFile:
        """The open file of a layer: its path, its descriptor, and what `fstat` said of it."""
        return self._files[self.manifest.layers[layer].file]

    def blob(self, key: ExpertKey, blob: str) -> TensorInfo:
        """File and bytes of one blob of an expert; see `blob_name`."""
        return self.file(key.layer).tensors[blob_name(key, blob)]

    def prefix(self, key: ExpertKey, bits: int) -> range:
        """The bytes of its layer's file that hold the first ``bits`` of an expert, or all it has.

        They are in the order of `ExpertShape.split`; 16 bits: whole weights. A finer prefix begins
        with the coarser one. Biases are not in it.
        """
        if bits == WHOLE:
            whole = self.blob(key, "whole")
            return range(whole.start, whole.end)
        bits = self.manifest.layers[key.layer].bits_of(key.expert, bits)
        last = self.blob(key, plane_name(num_planes(bits) - 1))
        return range(self.blob(key, "scales").start, last.end)

    def check(self, key: ExpertKey, bits: int, parts: Sequence[Tensor]) -> None:
        """Compare the checksums of an expert's prefix that was read; without any, do nothing.

        Args:
            parts: its bytes, as `prefix` has them, in contiguous tensors that follow one another.

        Raises:
            StoreError: one is wrong.
        """
        sums = self._sums_of(self.manifest.layers[key.layer].file)
        tensors = self.file(key.layer).tensors
        spans = [(part.data_ptr(), part.nbytes) for part in parts]
        for name in self._blobs(key, bits) if sums else ():
            if not spans:
                return  # a shorter prefix
            tensor = blob_name(key, name)
            found, left = 0, tensors[tensor].nbytes
            while left:
                address, size = spans[0]
                taken = min(left, size)
                found, left = crc32(address, taken, found), left - taken
                spans[0] = address + taken, size - taken
                if taken == size:
                    del spans[0]
            if found != sums[tensor]:
                raise StoreError(
                    f"{self.file(key.layer).path} is damaged: {tensor} does not have its checksum; "
                    "convert or copy the store again (moe convert --verify reads all of it)"
                )

    def _blobs(self, key: ExpertKey, bits: int) -> list[str]:
        if bits == WHOLE:
            return ["whole"]
        bits = self.manifest.layers[key.layer].bits_of(key.expert, bits)
        return ["scales", *map(plane_name, range(num_planes(bits)))]

    def _sums_of(self, name: str) -> dict[str, int]:
        """Checksums by tensor; empty if the file was written without them."""
        if name not in self._sums:
            tensors = self._files[name].tensors
            sums = self.manifest.files[name].sums
            if sums is not None and len(sums) != len(tensors):
                raise StoreError(f"{name} has {len(tensors)} tensors and {len(sums)} checksums")
            in_order = sorted(tensors, key=lambda tensor: tensors[tensor].start)
            self._sums[name] = dict(zip(in_order, sums or (), strict=False))
        return self._sums[name]

    def layer_bytes(self, bits: int) -> int:
        """Bytes that `load_layer` reads for all layers together."""
        manifest = self.manifest
        return sum(
            entry.nbytes
            for index, layer in enumerate(manifest.layers)
            for entry in layer_entries(index, layer, bits, manifest.group_size)
        )

    def verify(self, advance: Callable[[int], object] = lambda _: None) -> None:
        """Read every byte; raise `StoreError` if a checksum is wrong."""
        damaged = []
        for name, record in self.manifest.files.items():
            try:
                found = read_record(self._files[name].fd)
            except (OSError, ValueError) as error:
                damaged.append(f"{name}: {error}")
                continue
            advance(record.nbytes)
            if not record.is_of(found):
                damaged.append(f"{name}: its bytes do not have the checksum in the manifest")
        if damaged:
            shown = "\n".join(f"  - {problem}" for problem in damaged)
            raise StoreError(f"{self.directory} is damaged, convert or copy it again:\n{shown}")

    def verify_unchanged(self) -> None:
        """Raise `StoreError` if a file was rewritten in place since `open`."""
        for name, file in self._files.items():
            if not file.unchanged:
                raise StoreError(f"{self.directory / name} was changed while it was read")

    def load_layer(
        self,
        index: int,
        bits: int,
        like: ExpertWeights,
        device: torch.device,
        advance: Callable[[int], object] = lambda _: None,
    ) -> AnyExperts:
        """The experts of a layer.

        Args:
            index: which MoE layer.
            bits: prefix to read, at most what the store has; 16 for whole weights.
            like: the architecture's own experts, on meta: all but the weights is from these.
            device: where the weights go.
            advance: called with the bytes of every read.

        Raises:
            StoreError: the bytes cannot be read.
        """
        record = self.manifest.layers[index]
        layout = record.shape(self.manifest.group_size)
        with ThreadPoolExecutor(CHECKING) as pool:
            checks: list[Future[None]] = []

            def check(expert: int, parts: Sequence[Tensor]) -> None:
                key = ExpertKey(index, expert)
                checks.append(pool.submit(self.check, key, bits, parts))

            file = self.file(index)
            read = read_layer(file, index, record, layout, bits, like, device, advance, check)
            for checked in checks:
                checked.result()
        return read

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str, record: FileRecord) -> None:
        file = open_tensors(self.directory, name)
        self._closing.callback(os.close, file.fd)
        size = file.status.st_size
        if size != record.nbytes:
            raise HeaderError(f"has {size} bytes, the manifest says {record.nbytes}")
        data = min((info.start for info in file.tensors.values()), default=size)
        if digest_of(os.pread(file.fd, data, 0)).hexdigest() != record.header:
            raise HeaderError("has a header that is not the one that was written")
        self._files[name] = file

    def _entries(self, index: int) -> list[Entry]:
        manifest = self.manifest
        return layer_entries(index, manifest.layers[index], manifest.bits, manifest.group_size)

    def _layer_faults(self, index: int, layer: MoELayerRecord) -> list[str]:
        """Tensors that are not where the manifest puts them, to the byte."""
        found = self._files[layer.file].tensors
        start = min((info.start for info in found.values()), default=0)
        faults = []
        entries = self._entries(index)
        for entry in entries:
            info = found.get(entry.name)
            if info is None:
                faults.append(f"{layer.file}: tensor {entry.name!r} is missing")
            elif (info.dtype, info.shape, info.start) != (entry.dtype, entry.shape, start):
                faults.append(
                    f"{layer.file}: tensor {entry.name!r} is {info.dtype} {info.shape} at byte "
                    f"{info.start}, expected {entry.dtype} {entry.shape} at byte {start}"
                )
            start += entry.nbytes
        if extra := sorted(found.keys() - {entry.name for entry in entries}):
            faults.append(f"{layer.file}: tensor {extra[0]!r} does not belong there")
        return faults


# The layout of a layer's file, and writing it


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


# Reading a layer's file into memory that kernels take as it is


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
