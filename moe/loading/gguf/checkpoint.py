"""The tensors of GGUF files, decoded as they are read, each expert by itself.

llama.cpp's names become a network's by `moe.loading.gguf.architectures`; experts of a layer lie in
one tensor for each of gate, up and down, and are presented as one tensor an expert, so that the
loader can read each to where it stays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from experts.safetensors_io import OpenFile, TensorInfo
from kernels.planes import PlaneFormat
from kernels.scales import GroupScales
from moe.errors import CheckpointError
from moe.loading.checkpoint import LOCAL, ByteSource, Checkpoint
from moe.loading.gguf.architectures import NAMES, Architecture
from moe.loading.gguf.config import ROTARY_TENSORS, architecture
from moe.loading.gguf.header import FLOATS, GgufTensor, decode, kind_name, package
from moe.loading.gguf.layouts import AS_IT_IS, WHOLE, Part, TensorLayout
from moe.loading.gguf.parts import open_all
from moe.loading.gguf.planes import TYPES
from moe.loading.plan import Index, LoadPlan, WeightConversion, adjusted, without_tied
from moe.loading.schemes import Coding
from moe.network.seam import experts_modules


@dataclass(frozen=True)
class TensorTarget:
    """The place of a stored tensor, or of a part of it, in a network.

    Attributes:
        target: the parameter.
        parts: of the tensor, each with its place in the parameter; a layout may have others.
        index: where all of them are, in front of their own places.
        layout: what else is different.
    """

    target: str
    parts: tuple[Part, ...] = WHOLE
    index: Index = ()
    layout: TensorLayout = AS_IT_IS


def targets_of(
    model: PreTrainedModel,
    known: Architecture,
    expected: Mapping[str, Tensor],
    stored: Iterable[str],
) -> Iterator[tuple[str, TensorTarget]]:
    """Yield the places of a file's tensors, by their names in it; tensors without a place are left
    out."""
    names = NAMES | dict(known.names)
    experts = {
        int(next(part for part in path.split(".") if part.isdigit())): (path, module)
        for path, module in experts_modules(model)
    }
    for name in stored:
        block, number, stem, leaf = _split(name)
        if block and int(number) in experts:
            goal = _expert_target(stem, leaf, *experts[int(number)])
            if goal is not None:
                yield name, goal
                continue
        if stem not in names:
            continue
        path = f"{known.layers}.{number}.{names[stem]}" if block else names[stem]
        target = next((own for own in (f"{path}.{leaf}", path) if own in expected), None)
        if target is not None:
            yield name, TensorTarget(target, layout=known.layouts.get(stem, AS_IT_IS))


def _split(name: str) -> tuple[str, str, str, str]:
    """``blk``, the layer's number, the tensor's name, and ``weight`` or ``bias``; each may be
    empty."""
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        stem, leaf = name, ""
    block, number, own = (*stem.split(".", 2), "", "")[:3]
    if block == "blk" and number.isdecimal():
        return block, number, own, leaf
    return "", "", stem, leaf


def _expert_target(stem: str, leaf: str, path: str, module: Any) -> TensorTarget | None:
    """The target of a tensor with weights of all experts of a layer or, in old files, of one of
    them. Gate and up lie one behind the other, or in turns."""
    kind, _, number = stem.removeprefix("ffn_").removesuffix("_exps").partition(".")
    single = number.isdecimal() and len(number) < 6 and int(number) < module.num_experts
    if not (stem.endswith("_exps") or single) or kind not in (*_HALVES, "gate_up", "down"):
        return None
    turned, bias = bool(module.is_transposed), "_bias" if leaf == "bias" else ""
    own = "down_proj" if kind == "down" else "gate_up_proj" if module.has_gate else "up_proj"
    index: Index = ()
    if kind in _HALVES and module.has_gate:
        width = module.gate_up_proj.shape[2 if turned else 1] // 2
        halves = (slice(0, width), slice(width, None))
        half = (halves if module.is_concatenated else _TURNS)[_HALVES.index(kind)]
        index = (slice(None), half) if turned and not bias else (half,)
    elif kind == "gate_up" and not module.is_concatenated:
        return None
    if bias:
        return TensorTarget(f"{path}.{own}_bias", index=(slice(None), *index))
    chosen = [int(number)] if single else range(module.num_experts)
    parts = (Part(slice(None) if single else e, (e, *index), turned) for e in chosen)
    return TensorTarget(f"{path}.{own}", tuple(parts))


_HALVES = ("gate", "up")
_TURNS = (slice(0, None, 2), slice(1, None, 2))


@dataclass(frozen=True)
class Placed:
    """A stored tensor, or a part of one, and how it becomes what a network has; see `TensorLayout`.

    Attributes:
        transposed: rows in the file are columns in the network.
    """

    tensor: GgufTensor
    order: Tensor | None
    columns: Tensor | None
    value: Callable[[Tensor], Tensor] | None
    transposed: bool

    @property
    def as_it_is(self) -> bool:
        changes = (self.order, self.columns, self.value)
        return not self.transposed and all(change is None for change in changes)

    def arranged(self, stored: Tensor) -> Tensor:
        if self.order is not None:
            stored = stored[self.order]
        if self.columns is not None:
            stored = stored[..., self.columns]
        if self.value is not None:
            stored = self.value(stored)
        return stored.mT if self.transposed else stored


def _same_but_for_ones(
    given: tuple[int, ...], place: tuple[int, ...], layout: TensorLayout
) -> bool:
    """Return whether a tensor fills a place as it lies: both have the same sizes above 1, or the
    place is a vector, whose numbers may lie in rows."""
    flat = len(place) == 1 and layout.order is None and math.prod(given) == place[0]
    return flat or [size for size in given if size > 1] == [size for size in place if size > 1]


FEW_VALUES = {"Q4_0", "Q5_0", "MXFP4"}
"""Types whose weights are whole multiples of a scale, 16 at most."""


def gguf_coding(config: dict[str, Any]) -> Coding:
    """Read the types of tensors that `moe.loading.gguf.config` has noted."""
    few = set(config["expert_types"]) <= FEW_VALUES
    decoded = tuple(kind for kind in config["types"] if kind not in TYPES | FLOATS)
    return Coding(f"GGUF ({', '.join(config['types'])})", few_values=few, decoded=decoded)


class GgufCheckpoint(Checkpoint):
    """Open GGUF files. `tensors` are there once a network was planned (`make_plan`).

    `read` gives decoded weights in float32, so that they are rounded once, where they are kept.

    Args:
        path: a directory of `moe.loading.gguf.directory`.
        dtype: what quantised weights are presented in.
        source: of the weights; headers are read from the files in any case.

    Raises:
        CheckpointError: a file is damaged, or has tensors of a type that cannot be decoded.
    """

    def __init__(self, path: Path, dtype: torch.dtype, source: ByteSource = LOCAL) -> None:
        super().__init__(path, source)
        self._dtype = dtype
        self._stored: dict[str, Placed] = {}
        self._last: tuple[str, Tensor] | None = None
        # The names here have the order of the parts, those in a hub's cache have none.
        files = open_all([file.resolve() for file in sorted(path.glob("*.gguf"))])
        for file in files:
            self._closing.callback(os.close, file.fd)
            self._open[file.path] = OpenFile(file.path, file.fd, file.status, {})
        self._found = {name: tensor for file in files for name, tensor in file.tensors.items()}
        name, self._architecture = architecture(files[0].metadata, self._found)
        self._drafting = bool(files[0].metadata.get(f"{name}.nextn_predict_layers"))
        self._config: Any = None

    def make_plan(
        self, model: PreTrainedModel, renamed: Mapping[str, str | None] = MappingProxyType({})
    ) -> LoadPlan:
        expected = model.state_dict()
        targets = dict(targets_of(model, self._architecture, expected, self._found))
        self._tensors, self._stored, self._config = {}, {}, model.config
        layers = f"{self._architecture.layers}.{{}}."
        ignored, problems = [], []
        pieces: dict[str, list[tuple[str, Index]]] = {}
        for name, tensor in self._found.items():
            goal = targets.get(name)
            if name in ROTARY_TENSORS:
                continue  # a part of the configuration
            if goal is None:
                number = _split(name)[1]
                drafts = number and not any(n.startswith(layers.format(number)) for n in expected)
                if drafts and self._drafting:
                    ignored.append(name)
                else:
                    problems.append(f"unexpected: {name} {tensor.shape}")
                continue
            try:
                found = self._present(name, tensor, goal, expected[goal.target])
                pieces.setdefault(goal.target, []).extend(found)
            except ValueError as error:
                problems.append(f"wrong shape: {name} is {tensor.shape}: {error}")
        conversions = []
        for target, own in pieces.items():
            given = sum(math.prod(self._tensors[name].shape) for name, _ in own)
            if given != expected[target].numel():
                problems.append(f"missing or twice there: a part of {target} beside {own[0][0]}")
            if len({self._tensors[name].dtype for name, _ in own}) > 1:  # a place has one dtype
                self._tensors |= {name: _as(torch.float32, self._tensors[name]) for name, _ in own}
            sources, shapes = {target: [name for name, _ in own]}, {target: expected[target].shape}
            conversions.append(WeightConversion(target, None, sources, shapes, own))
        missing = expected.keys() - {goal.target for n, goal in targets.items() if n in self._found}
        absent = adjusted(model, without_tied(model, missing), set()).missing_keys
        problems += [f"missing: {name} {tuple(expected[name].shape)}" for name in sorted(absent)]
        return LoadPlan(conversions, missing, ignored, problems)

    def _present(
        self, name: str, tensor: GgufTensor, goal: TensorTarget, expected: Tensor
    ) -> list[tuple[str, Index]]:
        """Add to `tensors` what fills places in a parameter; raises ValueError if it does not."""
        count, layout, parts = tensor.shape[0], goal.layout, goal.parts
        if layout.parts is not None:
            parts = tuple(layout.parts(self._config, count))
        single = [part.rows for part in parts if isinstance(part.rows, int)]
        if single and len(single) != count:
            raise ValueError(f"the configuration says {len(single)} experts or heads")
        size = (tensor.end - tensor.start) // count
        kind = FLOATS.get(kind_name(tensor.kind))
        dtype = self._dtype if kind is None else getattr(torch, kind)
        found = []
        for number, part in enumerate(parts):
            whole = part.rows == slice(None)
            piece = name if whole else f"{name}[{number}]"
            index = (*goal.index, *part.index)
            place = tuple(expected[index].shape)
            if isinstance(part.rows, int):
                first, last, shape = part.rows, part.rows + 1, tensor.shape[1:]
            else:
                first, last, _ = part.rows.indices(count)
                shape = (last - first, *tensor.shape[1:])
            given = shape[::-1] if part.transposed else shape
            if not part.transposed and _same_but_for_ones(given, place, layout):
                shape = place
            elif given != place:
                raise ValueError(f"the configuration says {place}")
            start, end = tensor.start + first * size, tensor.start + last * size
            own = replace(tensor, shape=shape, start=start, end=end)
            config, columns = self._config, shape[-1]
            self._stored[piece] = Placed(
                own,
                None if layout.order is None else layout.order(config, shape[0]),
                None if layout.columns is None else layout.columns(config, columns),
                layout.value,
                part.transposed,
            )
            info = TensorInfo(own.file, torch.float32, place, start, end)
            self._tensors[piece] = _as(dtype, info)
            found.append((piece, index))
        return found

    def announce(self, names: Iterable[str]) -> None:
        stored = (self._stored[name].tensor for name in names)
        self._bytes.announce((tensor.file, tensor.start, tensor.end) for tensor in stored)

    def read(self, name: str, *, rows: slice | None = None) -> Tensor:
        stored = self._stored[name]
        tensor = stored.tensor
        if stored.as_it_is:
            return self._decoded(name, tensor, rows or slice(None))
        if self._last is None or self._last[0] != name:
            self._last = None  # one rearranged tensor at a time
            self._last = name, stored.arranged(self._decoded(name, tensor, slice(None)))
        return self._last[1][rows or slice(None)]

    def read_into(self, name: str, out: Tensor, *, rows: slice | None = None) -> None:
        out.copy_(self.read(name, rows=rows))

    def plane_format(self, name: str) -> PlaneFormat | None:
        stored = self._stored[name]
        known = TYPES.get(kind_name(stored.tensor.kind))
        fits = stored.value is None and stored.columns is None and len(stored.tensor.shape) == 2
        return known.format if known is not None and fits else None

    def read_planes(
        self, name: str, *, rows: slice | None = None, expert: int | None = None
    ) -> tuple[Tensor, GroupScales]:
        assert expert is None, "experts have names of their own here"
        tensor, order = self._stored[name].tensor, self._stored[name].order
        own = TYPES[kind_name(tensor.kind)]
        some = slice(None) if order is not None or rows is None else rows
        raw = torch.from_numpy(self._raw(name, tensor, some))
        size = package().GGML_QUANT_SIZES[package().GGMLQuantizationType(tensor.kind)][1]
        codes, scales = own.read(raw.view(-1, raw.shape[1] // size, size))
        if order is not None:
            order = order[rows or slice(None)]
            return codes[order], scales.rows(order)
        return codes, scales

    def _decoded(self, name: str, tensor: GgufTensor, rows: slice) -> Tensor:
        """Rows of a stored tensor, along its first dimension, in float32."""
        raw = self._raw(name, tensor, rows)
        values = decode(raw.reshape(-1), tensor.kind)
        return torch.from_numpy(values).view(len(raw), *tensor.shape[1:])

    def _raw(self, name: str, tensor: GgufTensor, rows: slice) -> NDArray[np.uint8]:
        """``(rows, bytes)`` of a stored tensor."""
        start, stop, _ = rows.indices(tensor.shape[0])
        size = (tensor.end - tensor.start) // tensor.shape[0]
        raw = np.empty((stop - start, size), np.uint8)
        file, offset = self._open[tensor.file], tensor.start + start * size
        if self._bytes.read(file, raw.reshape(-1).data, offset) != raw.size:
            raise CheckpointError(
                f"{tensor.file} ended inside tensor {name!r}; the file was truncated after it was "
                "opened, load it again when it is complete"
            )
        return raw


def _as(dtype: torch.dtype, info: TensorInfo) -> TensorInfo:
    """A header entry as of numbers of this dtype."""
    return replace(info, dtype=dtype, end=info.start + math.prod(info.shape) * dtype.itemsize)
