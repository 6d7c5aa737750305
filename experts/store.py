"""The expert store: a directory from which any expert can be read at any precision.

It holds a manifest (`experts.manifest`), a safetensors file with the trunk, and one for each MoE
layer (`experts.layer_file`). `Store` opens it and reads experts; `moe convert` writes it.

Each tensor has a checksum, which `Store.check` compares: disks change bits in silence. A run that
compared every read would take 4 % longer (`lab.offload.checksums`), so experts that are read again
and again are not checked each time (`offload.open_store.DiskSource`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from experts.files import HeaderError
from experts.layer_file import WHOLE, blob_name, layer_entries, plane_name, read_layer
from experts.manifest import Manifest, MoELayerRecord, StoreError, read_manifest
from experts.safetensors_io import (
    Entry,
    FileRecord,
    OpenFile,
    TensorInfo,
    digest_of,
    open_tensors,
    read_record,
)
from experts.weights import ExpertKey
from kernels import ExpertWeights
from kernels.cpu.checksum import crc32
from kernels.planes import num_planes
from kernels.reference import AnyExperts

CHECKING = 4
"""Threads that compare checksums while a layer is loaded."""


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
