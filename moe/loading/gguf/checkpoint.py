"""The tensors of GGUF files, decoded as they are read, each expert by itself.

llama.cpp's names become a network's by the table of the ``gguf`` package; experts of a layer lie in
one tensor for each of gate, up and down, and are presented as one tensor an expert, so that the
loader can read each to where it stays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
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
from moe.loading.gguf.config import Architecture, architecture
from moe.loading.gguf.directory import open_all
from moe.loading.gguf.header import FLOATS, GgufTensor, decode, kind_name, package
from moe.loading.gguf.planes import TYPES
from moe.loading.plan import Index, LoadPlan, WeightConversion, adjusted, without_tied
from moe.loading.schemes import Coding
from moe.network.seam import experts_modules

# Where the tensors of a GGUF file go in a network, by the table of names in the package
# ``gguf``.
#
# A layer's experts lie in one tensor for each of gate, up and down, whatever the network has.


@dataclass(frozen=True)
class TensorTarget:
    """Where a stored tensor goes in a network.

    Attributes:
        target: the parameter.
        index: which part of it; behind the expert's number, where it has one.
        each: it holds all experts, and is presented as one tensor for each.
        heads: rows are in the order of pairs that turn together, in this many heads; 0: not.
        transposed: the network has columns where the file has rows.
    """

    target: str
    index: Index = ()
    each: bool = False
    heads: int = 0
    transposed: bool = False


def targets_of(
    model: PreTrainedModel, name: str, known: Architecture, expected: Mapping[str, Tensor]
) -> Iterator[tuple[str, TensorTarget]]:
    """Where the tensors that a file may have go, by their names in it."""
    gguf_coding, config = package(), model.config
    kinds = {kind: number for number, kind in gguf_coding.MODEL_ARCH_NAMES.items()}
    table = gguf_coding.get_tensor_name_map(kinds[name], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    experts = {f"{path}.{own}" for path, m in experts_modules(model) for own in m._parameters}
    for path, module in experts_modules(model):
        block = table.get_name(f"{path}.down_proj").rpartition(".")[0]
        yield from _expert_targets(block, path, module)
    for target in expected.keys() - experts:
        for theirs, ending in _spellings(target):
            if (found := table.get_name(theirs)) is not None:
                own = heads.get(found.rpartition(".")[2], 0) if known.pairs else 0
                yield f"{found}{ending}", TensorTarget(target, heads=own)


def _spellings(target: str) -> Iterator[tuple[str, str]]:
    """Names that llama.cpp's table may know a parameter by, each with the ending of its tensor."""
    for name in (target, target.replace(".mlp.", ".block_sparse_moe.")):
        stem, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias"):
            yield stem, f".{leaf}"
        else:
            yield name, ".weight"
            yield name.removesuffix("_bias"), ".bias"


def _expert_targets(block: str, path: str, module: Any) -> Iterator[tuple[str, TensorTarget]]:
    """Of a layer's experts. Legend: gate and up one behind the other, or in turns."""
    turned = bool(module.is_transposed)
    width = module.gate_up_proj.shape[2 if turned else 1] // 2
    halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    if module.is_concatenated:
        halves = {"gate": slice(0, width), "up": slice(width, None)}
        yield (
            f"{block}.ffn_gate_up_exps.weight",
            TensorTarget(f"{path}.gate_up_proj", (), True, 0, turned),
        )
    for part, half in halves.items():
        index = (slice(None), half) if turned else (half,)
        goal = TensorTarget(f"{path}.gate_up_proj", index, each=True, transposed=turned)
        yield f"{block}.ffn_{part}_exps.weight", goal
        yield (
            f"{block}.ffn_{part}_exps.bias",
            TensorTarget(f"{path}.gate_up_proj_bias", (slice(None), half)),
        )
    yield f"{block}.ffn_down_exps.weight", TensorTarget(f"{path}.down_proj", (), True, 0, turned)
    yield f"{block}.ffn_down_exps.bias", TensorTarget(f"{path}.down_proj_bias")


FEW_VALUES = {"Q4_0", "Q5_0", "MXFP4"}
"""Types whose weights are whole multiples of a scale, 16 at most."""


def gguf_coding(config: dict[str, Any]) -> Coding:
    """What `moe.loading.gguf.config` notes of the types of tensors."""
    few = set(config["expert_types"]) <= FEW_VALUES
    return Coding(f"GGUF ({', '.join(config['types'])})", few_values=few)


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
        self._stored: dict[str, tuple[GgufTensor, TensorTarget]] = {}
        self._last: tuple[str, Tensor] | None = None
        files = open_all(sorted(file.resolve() for file in path.glob("*.gguf")))
        for file in files:
            self._closing.callback(os.close, file.fd)
            self._open[file.path] = OpenFile(file.path, file.fd, file.status, {})
        self._architecture = architecture(files[0].metadata)
        self._found = {name: tensor for file in files for name, tensor in file.tensors.items()}

    def make_plan(
        self, model: PreTrainedModel, renamed: Mapping[str, str | None] = MappingProxyType({})
    ) -> LoadPlan:
        expected = model.state_dict()
        targets = dict(targets_of(model, *self._architecture, expected))
        self._tensors, self._stored = {}, {}
        pieces: dict[str, list[tuple[str, Index]]] = {}
        problems = []
        for name, tensor in self._found.items():
            goal = targets.get(name)
            if goal is None:
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
        return LoadPlan(conversions, missing, [], problems)

    def _present(
        self, name: str, tensor: GgufTensor, goal: TensorTarget, expected: Tensor
    ) -> list[tuple[str, Index]]:
        """Add to `tensors` what fills a place in a parameter; raises ValueError if it does not."""
        if goal.each:
            count = len(expected)
            if tensor.shape[0] != count:
                raise ValueError(f"the configuration says {count} experts")
            size = (tensor.end - tensor.start) // count
            found = []
            for expert in range(count):
                start = tensor.start + expert * size
                own = replace(tensor, shape=tensor.shape[1:], start=start, end=start + size)
                at = replace(goal, index=(expert, *goal.index), each=False)
                found += self._present(f"{name}[{expert}]", own, at, expected)
            return found
        place = expected[goal.index].shape
        given = tensor.shape[::-1] if goal.transposed else tensor.shape
        if [size for size in given if size > 1] != [size for size in place if size > 1]:
            raise ValueError(f"the configuration says {tuple(place)}")
        if goal.heads and place[0] % (2 * goal.heads):
            raise ValueError(f"{place[0]} rows are not pairs in {goal.heads} heads")
        if not goal.transposed:
            tensor = replace(tensor, shape=tuple(place))
        kind = FLOATS.get(kind_name(tensor.kind))
        dtype = self._dtype if kind is None else getattr(torch, kind)
        info = TensorInfo(tensor.file, torch.float32, tuple(place), tensor.start, tensor.end)
        self._tensors[name] = _as(dtype, info)
        self._stored[name] = tensor, goal
        return [(name, goal.index)]

    def announce(self, names: Iterable[str]) -> None:
        stored = (self._stored[name][0] for name in names)
        self._bytes.announce((tensor.file, tensor.start, tensor.end) for tensor in stored)

    def read(self, name: str, *, rows: slice | None = None) -> Tensor:
        tensor, goal = self._stored[name]
        if not goal.heads and not goal.transposed:
            return self._decoded(name, tensor, rows or slice(None))
        if self._last is None or self._last[0] != name:
            self._last = None  # one rearranged tensor at a time
            whole = self._decoded(name, tensor, slice(None))
            if goal.heads:  # what turns together: side by side in the file, else half a head apart
                whole = whole.unflatten(0, (goal.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            self._last = name, whole.mT if goal.transposed else whole
        return self._last[1][rows or slice(None)]

    def read_into(self, name: str, out: Tensor, *, rows: slice | None = None) -> None:
        out.copy_(self.read(name, rows=rows))

    def plane_format(self, name: str) -> PlaneFormat | None:
        tensor, _ = self._stored[name]
        known = TYPES.get(kind_name(tensor.kind))
        return known.format if known is not None and len(tensor.shape) == 2 else None

    def read_planes(self, name: str, *, rows: slice | None = None) -> tuple[Tensor, GroupScales]:
        tensor, goal = self._stored[name]
        own = TYPES[kind_name(tensor.kind)]
        some = slice(None) if goal.heads or rows is None else rows
        raw = torch.from_numpy(self._raw(name, tensor, some))
        size = package().GGML_QUANT_SIZES[package().GGMLQuantizationType(tensor.kind)][1]
        codes, scales = own.read(raw.view(-1, raw.shape[1] // size, size))
        if goal.heads:
            order = torch.arange(len(codes)).view(goal.heads, -1, 2).transpose(1, 2).flatten()
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
