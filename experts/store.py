"""The elastic store: experts on disk as planes, each blob one contiguous tensor.

A directory with a manifest (`experts.manifest`), the trunk in one safetensors file, and one file
for each MoE layer (`experts.layer_file`). Any blob can be read alone, at `Store.blob`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from experts.layer_file import WHOLE, blob_name, layer_entries, plane_name, read_layer
from experts.manifest import LayerRecord, Manifest, StoreError, read_manifest
from experts.safetensors_io import (
    Entry,
    FileRecord,
    HeaderError,
    OpenFile,
    TensorInfo,
    digest_of,
    open_tensors,
    read_record,
)
from experts.weights import ExpertKey
from kernels import ExpertWeights
from kernels.planes import num_planes
from kernels.reference import AnyExperts


class Store:
    """An open store. Everything but the data has been checked: nothing is read out of place.

    Attributes:
        directory: where it is.
        manifest: what it says about itself.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._files: dict[str, OpenFile] = {}
        self._closing = ExitStack()

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Raises one `StoreError` naming every file and tensor at fault."""
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
        """Bytes of its layer's file that hold the first ``bits`` of an expert, or all it has.

        They lie as `ExpertShape.split` wants them; 16 for whole weights. What a finer prefix has
        more follows on the coarser one. Biases are elsewhere.
        """
        if bits == WHOLE:
            whole = self.blob(key, "whole")
            return range(whole.start, whole.end)
        bits = self.manifest.layers[key.layer].bits_of(key.expert, bits)
        last = self.blob(key, plane_name(num_planes(bits) - 1))
        return range(self.blob(key, "scales").start, last.end)

    def layer_bytes(self, bits: int) -> int:
        """Bytes that `load_layer` reads of all layers together."""
        manifest = self.manifest
        return sum(
            entry.nbytes
            for index, layer in enumerate(manifest.layers)
            for entry in layer_entries(index, layer, bits, manifest.group_size)
        )

    def verify(self, advance: Callable[[int], object] = lambda _: None) -> None:
        """Read every byte and raise `StoreError` where it is not the one that was written."""
        damaged = []
        for name, record in self.manifest.files.items():
            try:
                found = read_record(self._files[name].fd)
            except (OSError, ValueError) as error:
                damaged.append(f"{name}: {error}")
                continue
            advance(record.nbytes)
            if found != record:
                damaged.append(f"{name}: its bytes do not have the checksum in the manifest")
        if damaged:
            shown = "\n".join(f"  - {problem}" for problem in damaged)
            raise StoreError(f"{self.directory} is damaged, convert or copy it again:\n{shown}")

    def verify_unchanged(self) -> None:
        """Raise `StoreError` where a file was rewritten in place since `open`."""
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
        """The experts of a layer, with all but their weights from `like`.

        Args:
            index: which MoE layer.
            bits: prefix to read, at most what the store has; 16 for whole weights.
            like: the architecture's own experts, on meta.
            device: where they are put.
            advance: told every number of bytes read.

        Raises:
            StoreError: the bytes cannot be read.
        """
        record = self.manifest.layers[index]
        layout = record.shape(self.manifest.group_size)
        return read_layer(self.file(index), index, record, layout, bits, like, device, advance)

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

    def _layer_faults(self, index: int, layer: LayerRecord) -> list[str]:
        """What is not where the manifest puts it, to the byte."""
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
