"""The safetensors files of one model directory, opened, checked and read without `mmap`.

`Checkpoint.open` reads every header and reports every fault of every file in one `CheckpointError`
before a byte of data is touched. Reads are `pread` into the memory where the tensor will live: a
mapped page would count in the resident size next to the copy made from it. Files stay open, so one
that is replaced meanwhile does not mix with what was checked; `verify_unchanged` catches one that
was rewritten in place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experts.files import HeaderError, read_small
from experts.safetensors_io import OpenFile, TensorInfo, contained, open_tensors, pread_exactly
from kernels.planes import PlaneFormat
from kernels.scales import GroupScales
from moe.errors import CheckpointError, listing
from moe.loading.plan import LoadPlan, make_plan
from moe.loading.remote.names import PICKLE_SUFFIXES

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MTP_NAME = "mtp.safetensors"
"""A file beside the model's with its multi-token-prediction layer."""


Span = tuple[Path, int, int]
"""Bytes ``[start, stop)`` of a file."""


class ByteSource(Protocol):
    """A source of the bytes of opened files."""

    def announce(self, spans: Iterable[Span]) -> None:
        """Say what will be read next, and in which order."""
        ...

    def read(self, file: OpenFile, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`; returns the bytes read, fewer only where the file ends."""
        ...

    def identity(self, file: OpenFile) -> list[object]:
        """Return facts that change when a file does, ready for JSON."""
        ...


class LocalBytes:
    """A `ByteSource`: the opened files themselves."""

    def announce(self, spans: Iterable[Span]) -> None:
        pass  # the kernel reads ahead

    def read(self, file: OpenFile, view: memoryview, offset: int) -> int:
        return pread_exactly(file.fd, view, offset)

    def identity(self, file: OpenFile) -> list[object]:
        return [file.path.name, file.status.st_size, file.status.st_mtime_ns]


LOCAL = LocalBytes()


class Checkpoint:
    """Open files and the tensors in them: ``name -> (file, dtype, shape, start, end)``."""

    def __init__(self, path: Path, source: ByteSource = LOCAL) -> None:
        self.path = path
        self._bytes = source
        self._tensors: dict[str, TensorInfo] = {}
        self._open: dict[Path, OpenFile] = {}
        self._closing = ExitStack()

    @classmethod
    def open(
        cls, path: Path, names: Sequence[str] | None = None, source: ByteSource = LOCAL
    ) -> Checkpoint:
        """Open `path`, a model directory, or only the files `names` in it.

        Headers are read from the files, weights from `source`.
        Raises one `CheckpointError` naming every fault.
        """
        checkpoint = cls(path, source)
        problems: list[str] = []
        try:
            weight_map: dict[str, str] = {}
            if names is None:
                names, weight_map = weight_files(path, problems)
            for name in names:
                checkpoint._add_file(name, problems)
            if not problems:
                problems += checkpoint._index_faults(weight_map)
            if problems:
                raise CheckpointError(listing(f"cannot use the weights in {path}", problems))
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType(self._tensors)

    def make_plan(
        self, model: PreTrainedModel, renamed: Mapping[str, str | None] = MappingProxyType({})
    ) -> LoadPlan:
        """Which tensors become which parameters of `model` (on meta), and what is wrong.

        Args:
            renamed: see `moe.loading.plan.make_plan`.
        """
        return make_plan(model, self.tensors, renamed)

    def plane_format(self, name: str) -> PlaneFormat | None:
        """The bit planes that hold a matrix with its own numbers; None where it is no codes."""
        return None

    def read_planes(
        self, name: str, *, rows: slice | None = None, expert: int | None = None
    ) -> tuple[Tensor, GroupScales]:
        """``(N, K)`` unsigned codes of a matrix that has a `plane_format`, and their scales.

        N are outputs, even where a network has the matrix transposed.

        Args:
            expert: of a tensor that joins the matrices of all experts.
        """
        raise KeyError(name)

    def read(self, name: str, *, rows: slice | None = None) -> Tensor:
        """A fresh CPU tensor of `name`; `rows` takes a slice (step 1) of its first dimension."""
        info = self._tensors[name]
        shape = info.shape
        if rows is not None:
            start, stop, _ = rows.indices(shape[0])
            shape = (max(stop - start, 0), *shape[1:])
        out = torch.empty(shape, dtype=info.dtype)
        self.read_into(name, out, rows=rows)
        return out

    def read_into(self, name: str, out: Tensor, *, rows: slice | None = None) -> None:
        """Read `name` (or `rows` of it) into `out`: CPU, contiguous, of the same dtype and shape.

        Raises `CheckpointError` naming file and tensor when the bytes cannot be read.
        """
        info = self._tensors[name]
        offset = info.start
        if rows is not None:
            start, _, step = rows.indices(info.shape[0])
            assert step == 1, "rows must be consecutive"
            offset += start * (info.nbytes // max(info.shape[0], 1))
        assert out.is_contiguous()
        assert out.dtype == info.dtype
        if out.numel() == 0:
            return
        view = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            got = self._bytes.read(self._open[info.file], view, offset)
        except OSError as error:
            raise CheckpointError(
                f"cannot read tensor {name!r} from {info.file}: {error.strerror}"
            ) from error
        if got != len(view):
            raise CheckpointError(
                f"{info.file} ended inside tensor {name!r}: {got} of {len(view)} bytes; "
                "the file was truncated after it was opened, load it again when it is complete"
            )

    def announce(self, names: Iterable[str]) -> None:
        """Say which tensors will be read next, and in which order."""
        self._bytes.announce(
            (info.file, info.start, info.end) for info in map(self._tensors.__getitem__, names)
        )

    def fingerprint(self) -> list[list[object]]:
        """For each file, what changes when its weights do; ready for JSON."""
        return [self._bytes.identity(file) for file in self._open.values()]

    def verify_unchanged(self) -> None:
        """Raise `CheckpointError` where a file was rewritten in place since `open`."""
        changed = [
            f"{file.path.name} was changed while it was read; load it again"
            for file in self._open.values()
            if not file.unchanged
        ]
        if changed:
            raise CheckpointError(listing(f"the weights in {self.path} moved", changed))

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_file(self, name: str, problems: list[str]) -> None:
        try:
            file = open_tensors(self.path, name)
        except HeaderError as error:
            problems.append(f"{name}: {error}")
            return
        self._closing.callback(os.close, file.fd)
        for tensor in sorted(file.tensors.keys() & self._tensors.keys()):
            other = self._tensors[tensor].file.name
            problems.append(f"{name}: tensor {tensor!r} is also in {other}")
        self._open[file.path] = file
        self._tensors |= file.tensors

    def _index_faults(self, weight_map: Mapping[str, str]) -> list[str]:
        """Tensors that the index promises and that are not in the file it names."""
        resolved = {name: contained(self.path, name) for name in set(weight_map.values())}
        return [
            f"{name}: does not hold tensor {tensor!r}, which {INDEX_NAME} places there"
            for tensor, name in weight_map.items()
            if tensor not in self._tensors or self._tensors[tensor].file != resolved[name]
        ]


MODEL_SUFFIXES = ".safetensors", ".bin", ".gguf", ".json"


def model_files(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the files that make a model what it is: they change when it does.

    A hot set (`offload.hot_set`) is none of them.
    """
    found = {}
    for file in sorted(path.iterdir()):
        if file.suffix in MODEL_SUFFIXES and "hot-set" not in file.name:
            with suppress(OSError):  # a link to nowhere, or deleted meanwhile
                status = file.stat()
                found[file.name] = status.st_size, status.st_mtime_ns
    return found


def weight_files(path: Path, problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """The safetensors files to open, and the index's ``tensor -> file`` where there is one.

    ``model.safetensors`` (and ``mtp.safetensors``, if it is beside it), else what the index names,
    else every ``*.safetensors``: the order of `PreTrainedModel.from_pretrained`, but for the last.
    Names in the index are as little trusted as the weights: they are only opened through
    `experts.safetensors_io`.
    """
    try:
        present = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot list {path}: {error.strerror}") from error
    if SINGLE_NAME in present:
        return [name for name in (SINGLE_NAME, MTP_NAME) if name in present], {}
    if INDEX_NAME in present:
        weight_map = _read_index(path, problems)
        return sorted(set(weight_map.values())), weight_map
    names = [name for name in present if name.endswith(".safetensors")]
    if not names:
        raise CheckpointError(_no_weights(path, present))
    return names, {}


def _no_weights(path: Path, present: list[str]) -> str:
    pickles = [name for name in present if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{path} holds only pickle weights ({', '.join(pickles[:5])}), which can run code when "
            "opened and are never read here; re-save the model as safetensors "
            "(save_pretrained in transformers >= 5 does)"
        )
    return (
        f"no .safetensors file in {path}: expected {SINGLE_NAME} or {INDEX_NAME} with its shards "
        f"(found: {', '.join(present[:8]) or 'nothing'})"
    )


def _read_index(path: Path, problems: list[str]) -> dict[str, str]:
    index: Any = None
    try:
        index = json.loads(read_small(contained(path, INDEX_NAME)).decode())
    except (OSError, ValueError, RecursionError, HeaderError) as error:
        problems.append(f"{INDEX_NAME}: cannot be read: {error}")
        return {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{INDEX_NAME}: has no weight_map (tensor name -> file name)")
        return {}
    for key, value in weight_map.items():
        if not isinstance(value, str):
            problems.append(f"{INDEX_NAME}: the file of tensor {key!r} is not a string")
    return {key: value for key, value in weight_map.items() if isinstance(value, str)}
