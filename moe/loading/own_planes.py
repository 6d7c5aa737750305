"""Weights that a checkpoint has quantised already and that stay as they are: its codes, its scales.

`find_own` finds the modules of a network whose weights lie in the checkpoint as groups of codes
with scales (`Checkpoint.plane_format`): linear layers, the input embedding, and the experts of a
layer where all have one format a projection. `OwnReader` reads them straight into bit planes, which
take about the bytes of the file (kernels/scales.py). All others are read as floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experts.embedding import QuantizedEmbedding
from experts.linear import QuantizedLinear
from experts.weights import ExpertShape, from_blobs, is_interleaved, split_parts
from kernels import PlaneMatrix, QuantizedExperts
from kernels.planes import PlaneFormat, PlaneLayout, float_values
from kernels.scales import GroupScales, has_float_codes, powers_of_two
from moe.errors import CheckpointError
from moe.loading.checkpoint import Checkpoint
from moe.loading.load import WeightPlan, WeightReader
from moe.loading.plan import Index, LoadPlan, WeightConversion
from moe.network.seam import (
    expert_shape,
    experts_modules,
    routing_modules,
    take_beside,
    weight_names,
)
from moe.network.stored_embedding import StoredEmbedding, backbone_dtype
from moe.settings import ModelSettings

_PIECE_CODES = 1 << 22
"""Codes that are rearranged at once."""


@dataclass(frozen=True)
class Piece:
    """A stored matrix of one expert: one part of its first projection, all, or its second.

    Attributes:
        place: number of the part, ``parts`` for the second projection; None: all parts.
        joined: the stored tensor has the matrices of all experts.
    """

    name: str
    expert: int
    place: int | None
    joined: bool = False


@dataclass(frozen=True)
class OwnExperts:
    """The source of one layer's experts."""

    shape: ExpertShape
    pieces: tuple[Piece, ...]
    beside: tuple[WeightConversion, ...]  # biases


@dataclass(frozen=True)
class OwnPlanes:
    """The modules whose weights stay as the checkpoint has them.

    Attributes:
        experts: by the name of the experts' module.
        tables: stored name and format of linear layers and of the embedding, by module.
        tied: output heads that share the table of the embedding, and its module.
    """

    experts: Mapping[str, OwnExperts] = field(default_factory=dict)
    tables: Mapping[str, tuple[str, PlaneFormat]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def summary(self, network: PreTrainedModel) -> str:
        """Say which weights stay as they are, and at which size; empty where none does."""
        if not (self.experts or self.tables):
            return ""
        weights = 0
        for name, layer in self.experts.items():
            module: Any = network.get_submodule(name)
            one = (layer.shape.parts + 1) * layer.shape.hidden * layer.shape.intermediate
            weights += module.num_experts * one
        for name in self.tables:
            weights += network.get_parameter(f"{name}.weight").numel()
        bits = 8 * sum(self.nbytes(network).values()) / weights
        kept = [f"the experts of {len(self.experts)} layers"] if self.experts else []
        kept += [f"{len(self.tables)} other matrices"] if self.tables else []
        return (
            f"{' and '.join(kept)} keep their codes, with scales and offsets, at {bits:.2f} bits a "
            "weight"
        )

    def without(self, weights: WeightPlan, checkpoint: Checkpoint) -> WeightPlan:
        """Return the plan of everything else that is read."""
        own = {f"{name}.weight" for name in self.tables}
        found = weights.without(self.experts, checkpoint).without_targets(own, checkpoint)
        missing = found.plan.missing - {f"{name}.weight" for name in self.tied}
        return replace(found, plan=replace(found.plan, missing=missing))

    def nbytes(self, network: PreTrainedModel) -> dict[str, int]:
        """Memory of each parameter that becomes planes."""
        sizes = {}
        for name, (_, own) in self.tables.items():
            sizes[f"{name}.weight"] = table_layout(network.get_submodule(name), own).nbytes(8)
        for name, _ in self.tied.items():
            sizes[f"{name}.weight"] = 0
        for name, layer in self.experts.items():
            module: Any = network.get_submodule(name)
            first, second = weight_names(module)
            sizes[f"{name}.{first}"] = module.num_experts * layer.shape.nbytes(8)
            sizes[f"{name}.{second}"] = 0
        return sizes


@dataclass
class OwnReader:
    """Reads the modules of an `OwnPlanes` into the network, which is on meta.

    Attributes:
        dtypes: that biases are kept in.
        device: that planes are made on.
        check_finite: note scales that are NaN or infinite.
        advance: called with every number of bytes read.
        not_finite: one line for each matrix with such scales.
    """

    own: OwnPlanes
    network: PreTrainedModel
    checkpoint: Checkpoint
    dtypes: Mapping[str, torch.dtype]
    device: torch.device
    check_finite: bool
    advance: Callable[[int], None]
    not_finite: list[str] = field(default_factory=list)

    def read_tables(self) -> None:
        """Replace the linear layers and the embedding."""
        network, own = self.network, self.own
        embedding, dtype = network.get_input_embeddings(), backbone_dtype(network)
        tables = sorted(own.tables.items(), key=lambda item: self._position(item[1][0]))
        self.checkpoint.announce(stored for _, (stored, _) in tables)
        for name, (stored, format) in tables:
            module = network.get_submodule(name)
            matrix = self._matrix(stored, table_layout(module, format))
            made = QuantizedEmbedding(matrix, dtype) if module is embedding else None
            _put(network, name, made or _linear(module, matrix))
            for head in (head for head, table in own.tied.items() if table == name):
                _put(network, head, _linear(network.get_submodule(head), matrix))

    def read_experts(self, name: str) -> QuantizedExperts:
        """The experts of one layer, whose module then has no parameters."""
        own, module = self.own.experts[name], self.network.get_submodule(name)
        pieces = sorted(own.pieces, key=lambda piece: self._position(piece.name))
        biases = [stored for conversion in own.beside for stored in conversion.names]
        self.checkpoint.announce([*biases, *(piece.name for piece in pieces)])
        for weight in weight_names(module):
            del module._parameters[weight]
        self._read_biases(module, own.beside)
        beside = take_beside(module)
        shape = own.shape
        interleaved = shape.parts == 2 and is_interleaved(beside["activation"], shape.intermediate)
        count = 1 + max(piece.expert for piece in pieces)
        memory = torch.empty(count, shape.nbytes(8), dtype=torch.uint8, device=self.device)
        blobs, scales = shape.split(memory, 8)
        for piece in pieces:
            expert = piece.expert if piece.joined else None
            codes_NK, numbers = self._read(piece.name, expert=expert)
            for place, rows in _places(piece, shape, len(codes_NK), interleaved):
                layout = shape.second if place == shape.parts else shape.first
                made = PlaneMatrix.of_file(codes_NK[rows], numbers.rows(rows), layout)
                for plane, blob in enumerate(made.planes):
                    start = place * shape.first.plane_bytes(plane)
                    blobs[plane][piece.expert, start : start + blob.numel()] = blob
                start = place * shape.first.scale_bytes
                scales[piece.expert, start : start + made.scales.numel()] = made.scales
            nbytes, done = self.checkpoint.tensors[piece.name].nbytes, piece.expert
            if piece.joined:
                nbytes = nbytes * (done + 1) // count - nbytes * done // count
            self.advance(nbytes)
        return from_blobs(shape, blobs, scales, interleaved, **beside)

    def _read_biases(self, module: nn.Module, conversions: Sequence[WeightConversion]) -> None:
        reader = WeightReader(self.checkpoint, self.check_finite, self.advance, self.not_finite)
        places = {
            target: torch.empty(shape, dtype=self.dtypes[target], device=self.device)
            for conversion in conversions
            for target, shape in conversion.targets.items()
        }
        if conversions:
            reader.fill(conversions, self.network, places)
        for target, place in places.items():
            setattr(module, target.rpartition(".")[2], nn.Parameter(place, requires_grad=False))

    def _matrix(self, name: str, layout: PlaneLayout) -> PlaneMatrix:
        """A stored matrix, some rows at a time."""
        step = max(16, _PIECE_CODES // layout.columns // 16 * 16)
        widths = range(len(layout.format.plane_bits))
        sizes = [*map(layout.plane_bytes, widths), layout.scale_bytes]
        blobs = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        left = list(blobs)
        for start in range(0, layout.rows, step):
            codes_NK, numbers = self._read(name, slice(start, min(start + step, layout.rows)))
            made = PlaneMatrix.of_file(codes_NK, numbers, replace(layout, rows=len(codes_NK)))
            for index, blob in enumerate((*made.planes, made.scales)):
                left[index][: blob.numel()] = blob
                left[index] = left[index][blob.numel() :]
        self.advance(self.checkpoint.tensors[name].nbytes)
        *planes, scales = blobs
        return PlaneMatrix(layout, tuple(planes), scales)

    def _read(
        self, name: str, rows: slice | None = None, expert: int | None = None
    ) -> tuple[Tensor, GroupScales]:
        codes_NK, numbers = self.checkpoint.read_planes(name, rows=rows, expert=expert)
        own = self.checkpoint.plane_format(name)
        if own is not None and own != _format_on(self.device, own):
            codes_NK, numbers = _in_halves(codes_NK, numbers)
            if not numbers.is_finite:
                raise CheckpointError(
                    f"{name} in {self.checkpoint.tensors[name].file.name} has scales above 65536, "
                    "whose halves float16 cannot hold; set model.expert_bits: 16 to decode it"
                )
        if self.check_finite and not numbers.is_finite:
            fault = f"{name} in {self.checkpoint.tensors[name].file.name} holds NaN or infinity"
            if fault not in self.not_finite[-1:]:
                self.not_finite.append(fault)
        # Planes are made on the device, where that takes no time.
        return codes_NK.to(self.device), numbers.to(self.device)

    def _position(self, name: str) -> tuple[str, int]:
        info = self.checkpoint.tensors[name]
        return str(info.file), info.start


def find_own(
    network: PreTrainedModel,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    settings: ModelSettings,
    *,
    device: torch.device,
) -> OwnPlanes:
    """The modules that the settings leave as they are stored, and that are stored as codes.

    On a GPU the embedding is not one of them, as the host would wait for the check of its ids.
    """

    def format_of(stored: str) -> PlaneFormat | None:
        own = checkpoint.plane_format(stored)
        return own if own is None else _format_on(device, own)

    by_target = {c.first_target: c for c in plan.conversions}
    experts: dict[str, OwnExperts] = {}
    if settings.expert_bits is None and settings.expert_dtype == "auto":
        for name, module in experts_modules(network):
            if (found := _own_experts(name, module, by_target, format_of, checkpoint)) is not None:
                experts[name] = found
    tables: dict[str, tuple[str, PlaneFormat]] = {}
    input_table = network.get_input_embeddings()
    for name in _candidates(network, settings):
        if device.type != "cpu" and network.get_submodule(name) is input_table:
            continue
        conversion = by_target.get(f"{name}.weight")
        if conversion is not None and len(conversion.pieces) == 1:
            ((stored, index),) = conversion.pieces
            own = format_of(stored)
            if own is not None and index in ((), (slice(None),)):
                tables[name] = stored, own
    tied = {}
    for target, source in network.all_tied_weights_keys.items():
        head, table = target.removesuffix(".weight"), source.removesuffix(".weight")
        if table in tables and target in plan.missing:
            if type(network.get_submodule(head)) is nn.Linear and settings.head_bits is None:
                tied[head] = table
            else:
                del tables[table]
    return OwnPlanes(experts, tables, tied)


def _format_on(device: torch.device, own: PlaneFormat) -> PlaneFormat | None:
    """The format that kernels of the device read such weights in; None: they are decoded.

    On CPUs MXFP4 becomes whole numbers of 5 bits, and FP8 is decoded.
    """
    if device.type != "cpu" or not has_float_codes(own.scales):
        return own
    return PlaneFormat(own.group_size, 5, "centred") if own.scales == "mxfp4" else None


def _in_halves(codes_NK: Tensor, scales: GroupScales) -> tuple[Tensor, GroupScales]:
    """MXFP4 as whole numbers of halves, around 16, and float16 scales."""
    numbers = 2 * float_values(codes_NK, "mxfp4") + 16
    scale_ND = powers_of_two(scales.scale_ND) / 2
    return numbers.to(torch.uint8), GroupScales(scale_ND.half())


def _candidates(network: PreTrainedModel, settings: ModelSettings) -> Iterator[str]:
    """Linear layers and the embedding that the settings leave as they are stored."""
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    routing = dict(routing_modules(network))
    for name, module in network.named_modules():
        if module is embedding:
            if type(module) in (nn.Embedding, StoredEmbedding) and settings.trunk_bits is None:
                yield name
        elif type(module) is nn.Linear:
            bits = settings.head_bits if module is head else settings.trunk_bits
            if bits is None and (module is head or name not in routing):
                yield name


def _own_experts(
    name: str,
    module: Any,
    by_target: Mapping[str, WeightConversion],
    format_of: Callable[[str], PlaneFormat | None],
    checkpoint: Checkpoint,
) -> OwnExperts | None:
    shape = expert_shape(module, 64)
    targets = [f"{name}.{weight}" for weight in weight_names(module)]
    if not all(target in by_target and by_target[target].pieces for target in targets):
        return None
    pieces, formats = [], []
    for second, target in enumerate(targets):
        own = by_target[target].pieces
        kinds = {format_of(stored) for stored, _ in own}
        kind = kinds.pop() if len(kinds) == 1 else None
        whole = len(own) == 1 and own[0][1] in ((), (slice(None),))
        joined = whole and len(checkpoint.tensors[own[0][0]].shape) == 3
        if joined:
            own = [(own[0][0], (expert,)) for expert in range(module.num_experts)]
        places = [_place(index, shape.parts, bool(second)) for _, index in own]
        if kind is None or any(place is None for place in places):
            return None
        formats.append(kind)
        for (stored, _), found in zip(own, places, strict=True):
            assert found is not None
            pieces.append(Piece(stored, *found, joined))
    owned = (target for target in by_target if target.startswith(f"{name}."))
    beside = tuple(by_target[target] for target in owned if target not in targets)
    shape = replace(shape, own=(formats[0], formats[1]))
    return OwnExperts(shape, tuple(sorted(pieces, key=lambda p: (p.expert, p.place or 0))), beside)


def _place(index: Index, parts: int, second: bool) -> tuple[int, int | None] | None:
    """Expert and place of what is read to a place of a stacked parameter; None: another order."""
    expert, *rest = index if index else (None,)
    cuts = [cut for cut in rest if cut != slice(None)]
    if not isinstance(expert, int) or len(cuts) > 1:
        return None
    if second:
        return None if cuts else (expert, parts)
    if not cuts:
        return expert, None if parts > 1 else 0
    (cut,) = cuts
    return (expert, int(cut.start != 0)) if isinstance(cut, slice) else None


def _places(
    piece: Piece, shape: ExpertShape, rows: int, interleaved: bool
) -> Iterator[tuple[int, slice | Tensor]]:
    """Each part of a piece, and which of its rows it has."""
    if piece.place is not None:
        yield piece.place, slice(None)
        return
    for part, own in enumerate(split_parts(torch.arange(rows)[:, None], shape.parts, interleaved)):
        yield part, own[:, 0]


def table_layout(module: nn.Module, own: PlaneFormat) -> PlaneLayout:
    """Layout of the table of a linear layer or of an embedding."""
    if isinstance(module, nn.Linear):
        return PlaneLayout(module.out_features, module.in_features, *own)
    assert isinstance(module, nn.Embedding)
    return PlaneLayout(module.num_embeddings, module.embedding_dim, *own)


def _linear(module: nn.Module, matrix: PlaneMatrix) -> QuantizedLinear:
    assert isinstance(module, nn.Linear)
    made = QuantizedLinear(
        matrix.layout, matrix.bits, module.bias, torch.device("meta"), module.weight.dtype
    )
    made.hold(matrix)
    return made


def _put(network: PreTrainedModel, name: str, module: Any) -> None:
    module._is_hf_initialized = True  # transformers asks every module
    network.set_submodule(name, module)
    tied = network.all_tied_weights_keys
    for target in [t for t, source in tied.items() if f"{name}.weight" in (t, source)]:
        del tied[target]
