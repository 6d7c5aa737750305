"""Load a checkpoint into a model on the meta device, each weight straight to its place.

`plan_weights` says where every weight goes and how large it will be; `load_weights` then reads.
Every parameter is allocated once, in the dtype and on the device where it stays, and filled slice
by slice: beyond the weights themselves only one slice or one expert is in memory. Nothing is
initialised at random, and nothing is read before the plan is free of faults. Buffers that no
checkpoint holds (rotary frequencies) get their values from transformers' own `_init_weights`,
which leaves alone what is marked as loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from experts.linear import QuantizedLinear
from experts.safetensors_io import TensorInfo, fresh
from experts.weights import is_finite
from moe.errors import CheckpointError, listing
from moe.loading.checkpoint import Checkpoint
from moe.loading.plan import Index, LoadPlan, WeightConversion
from moe.loading.progress import LoadProgress, Report
from moe.network.seam import experts_modules, parents_of

SLICE_BYTES = 16 << 20  # large enough for full disk speed, small beside any model

DtypeFor = Callable[[str, torch.dtype], torch.dtype]
"""``(parameter name, dtype in the checkpoint)`` to the dtype that it is kept in."""


@dataclass(frozen=True)
class WeightPlan:
    """The place and the size of every weight; nothing is allocated yet.

    Attributes:
        plan: what is read, and what need not be there.
        dtypes: what each parameter that is read is kept in.
        nbytes: memory of each parameter and buffer; 0 for one that shares another's.
        bytes_to_read: bytes of the checkpoint.
        kept: what of a quantised checkpoint stays as it is, for people; may be empty.
    """

    plan: LoadPlan
    dtypes: dict[str, torch.dtype]
    nbytes: dict[str, int]
    bytes_to_read: int
    kept: str = ""

    def without(self, modules: Collection[str], checkpoint: Checkpoint) -> WeightPlan:
        """The plan without the conversions that fill `modules` only."""
        names = (name for c in self.plan.conversions for name in c.targets)
        own = {name for name in names if name.rpartition(".")[0] in modules}
        return self.without_targets(own, checkpoint)

    def without_targets(self, targets: Collection[str], checkpoint: Checkpoint) -> WeightPlan:
        """The plan without the conversions that fill these parameters only."""
        kept = [c for c in self.plan.conversions if not all(name in targets for name in c.targets)]
        total = sum(checkpoint.tensors[n].nbytes for conversion in kept for n in conversion.names)
        return replace(self, plan=replace(self.plan, conversions=kept), bytes_to_read=total)


def plan_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    dtype_for: DtypeFor,
    make: Callable[[PreTrainedModel, Mapping[str, TensorInfo]], LoadPlan] | None = None,
    renamed: Mapping[str, str | None] = MappingProxyType({}),
) -> WeightPlan:
    """Match the checkpoint with `model` (on meta, see `meta_model`).

    ``dtype_for(parameter name, dtype in the checkpoint)`` gives the dtype that a parameter is kept
    in, unless the architecture fixes it. Raises one `CheckpointError` listing every fault; names
    and shapes are checked from headers, and only tied tensors that are stored twice are read.

    Args:
        renamed: see `moe.loading.plan.make_plan`.
    """
    plan = checkpoint.make_plan(model, renamed) if make is None else make(model, checkpoint.tensors)
    if plan.problems:
        title = f"the weights in {checkpoint.path} do not fit {type(model).__name__}"
        raise CheckpointError(listing(title, plan.problems))
    _share_equal_ties(model, checkpoint, plan)
    dtypes = {
        name: _kept(model, name, checkpoint.tensors[conversion.names[0]].dtype, dtype_for)
        for conversion in plan.conversions
        for name in conversion.targets
    }
    shared = plan.missing & tied_names(model)
    nbytes = {
        name: 0 if name in shared else tensor.numel() * dtypes.get(name, tensor.dtype).itemsize
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    total = sum(checkpoint.tensors[n].nbytes for t in plan.conversions for n in t.names)
    return WeightPlan(plan, dtypes, nbytes, total)


def _kept(
    model: PreTrainedModel, name: str, dtype: torch.dtype, dtype_for: DtypeFor
) -> torch.dtype:
    """The dtype `name` stays in: the caller's choice, unless the architecture fixes another."""
    built = model.get_parameter_or_buffer(name).dtype
    owner, _, last = name.rpartition(".")
    in_planes = last == "scales" and isinstance(model.get_submodule(owner), QuantizedLinear)
    if not built.is_floating_point or in_planes:
        return built
    chosen = dtype_for(name, dtype)
    plan = model._get_dtype_plan(chosen)
    if plan:
        alternation, pattern_by_group, _ = build_glob_alternation(list(plan))
        if match := alternation.search(name):
            assert match.lastgroup is not None  # every branch is a named group
            return plan[pattern_by_group[match.lastgroup]]
    return built if built != model.config.dtype else chosen


def _share_equal_ties(model: PreTrainedModel, checkpoint: Checkpoint, plan: LoadPlan) -> None:
    """Load one tensor of a tied pair where both are stored with equal bytes.

    Unequal ones are both loaded, and `tie_weights` leaves them apart with a warning.
    """
    renamed = {t.first_target: t for t in plan.conversions if t.converter is None}
    for target, source in model.all_tied_weights_keys.items():
        if target in renamed and source in renamed:
            first, second = renamed[target].names[0], renamed[source].names[0]
            if same_bytes(checkpoint, first, second):
                plan.conversions.remove(renamed[target])
                plan.missing.add(target)


def tied_names(model: PreTrainedModel) -> set[str]:
    """Parameters that share memory with another, and those others."""
    tied = model.all_tied_weights_keys
    return set(tied) | set(tied.values())


@dataclass(frozen=True)
class LoadReport:
    """Differences between a checkpoint and the model class that are no faults."""

    ignored: tuple[str, ...]  # checkpoint tensors that the model class says to ignore
    computed: tuple[str, ...]  # absent and allowed to be: filled by transformers' own rule


def load_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    weights: WeightPlan,
    *,
    device: torch.device | str,
    report: Report = lambda _: None,
    check_finite: bool = False,
    modules: Collection[str] = (),
    complete: Callable[[str], object] = lambda _: None,
) -> LoadReport:
    """Fill every parameter and buffer of `model` as `plan_weights` has found.

    Parameters end up without `requires_grad`.

    Args:
        weights: of `plan_weights`.
        device: where parameters go.
        report: called after every slice.
        check_finite: refuse NaN and infinity.
        modules: names of modules whose weights are read in one piece each.
        complete: called with the name of each of `modules` as soon as it is full; may take its
            weights away.

    Raises:
        CheckpointError: a file cannot be read or changed meanwhile, or ``check_finite`` found bad
            values, by name.
    """
    plan, done = weights.plan, 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(LoadProgress("loading weights", done, weights.bytes_to_read))

    advance(0)
    reader = WeightReader(checkpoint, check_finite, advance)
    waiting = Counter(name for t in plan.conversions for name in modules_of(t, modules))
    groups = in_order(plan.conversions, checkpoint, modules)
    checkpoint.announce(name for group in groups for name in reader.order(group))
    for group in groups:
        places = {
            name: fresh(shape, weights.dtypes[name], device)
            for conversion in group
            for name, shape in conversion.targets.items()
        }
        reader.fill(group, model, places)
        for name, place in places.items():
            _install(model, name, place)
        del places
        for name in (name for conversion in group for name in modules_of(conversion, modules)):
            waiting[name] -= 1
            if not waiting[name]:
                complete(name)
    checkpoint.verify_unchanged()
    if reader.not_finite:
        raise CheckpointError(listing(f"bad values in {checkpoint.path}", reader.not_finite))
    _finish(model, plan.missing, torch.device(device))
    return LoadReport(tuple(plan.ignored), tuple(sorted(plan.missing - tied_names(model))))


def _install(model: PreTrainedModel, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        value = nn.Parameter(value, requires_grad=False)
    value._is_hf_initialized = True  # type: ignore[attr-defined]  # or `_init_weights` would overwrite it
    setattr(module, leaf, value)


@torch.no_grad()
def _finish(model: PreTrainedModel, missing: set[str], device: torch.device) -> None:
    """Tie, and compute what no checkpoint holds; the order is that of `_finalize_model_loading`."""
    names = tied_names(model)
    for name in names:
        model.get_parameter_or_buffer(name)._is_hf_initialized = True
    parents = parents_of(model)
    for _, experts in experts_modules(model):  # some blocks would initialise what is taken away
        block: Any = parents[experts]
        block._is_hf_initialized = True
    absent: Any = missing - names  # declared as a list, used as a set
    model._move_missing_keys_from_meta_to_device(absent, {"": device}, None, None)
    model._initialize_missing_keys(is_quantized=False)
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert not tensor.is_meta, f"{name} was left without a value"


@dataclass
class WeightReader:
    """Fills preallocated tensors from a checkpoint, a slice or an expert at a time.

    Attributes:
        advance: called with every number of bytes read.
        not_finite: with ``check_finite``, one line for each tensor that holds NaN or infinity.
    """

    checkpoint: Checkpoint
    check_finite: bool
    advance: Callable[[int], None]
    not_finite: list[str] = field(default_factory=list)

    def order(self, group: Sequence[WeightConversion]) -> list[str]:
        """The tensors that a group needs, in the order in which `fill` reads them."""
        pieces = [name for _, name, _ in self._pieces(group)]
        whole = [name for one in group if not one.pieces for name in self._by_place(one.names)]
        return pieces + whole

    def fill(
        self,
        group: Sequence[WeightConversion],
        model: PreTrainedModel,
        places: Mapping[str, Tensor],
    ) -> None:
        """Fill `places`: first what is read there directly, in the order of the files."""
        for target, name, index in self._pieces(group):
            self._stream(name, places[target][index])
        for conversion in group:
            if not conversion.pieces:
                read = {name: self._whole(name) for name in self._by_place(conversion.names)}
                whole = {p: [read[n] for n in names] for p, names in conversion.sources.items()}
                del read
                for name, value in conversion.convert(model, whole).items():
                    places[name].copy_(value)

    def _pieces(self, group: Sequence[WeightConversion]) -> list[tuple[str, str, Index]]:
        found = [(one.first_target, *piece) for one in group for piece in one.pieces]
        return sorted(found, key=lambda piece: _place(self.checkpoint, piece[1]))

    def _by_place(self, names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: _place(self.checkpoint, name))

    def _stream(self, name: str, place: Tensor) -> None:
        """`name` into `place`: read there directly where dtype and device allow it."""
        info = self.checkpoint.tensors[name]
        direct = place.device.type == "cpu" and place.dtype == info.dtype and place.is_contiguous()
        for rows in _slices(info):
            part = place if rows is None else place[rows]
            if direct:
                self.checkpoint.read_into(name, part, rows=rows)
                self._count(name, part)
            else:
                staged = self.checkpoint.read(name, rows=rows)
                self._count(name, staged)
                part.copy_(staged)

    def _whole(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(name)
        self._count(name, tensor)
        return tensor

    def _count(self, name: str, part: Tensor) -> None:
        self.advance(part.nbytes)
        if self.check_finite and part.is_floating_point() and part.numel() and not is_finite(part):
            fault = f"{name} in {self.checkpoint.tensors[name].file.name} holds NaN or infinity"
            if fault not in self.not_finite[-1:]:
                self.not_finite.append(fault)


def _slices(info: TensorInfo) -> Iterator[slice | None]:
    """Row ranges of about `SLICE_BYTES`; None for the whole of a small or 0-dimensional tensor."""
    if info.nbytes <= SLICE_BYTES or not info.shape:
        yield None
        return
    step = max(1, SLICE_BYTES * info.shape[0] // info.nbytes)
    for start in range(0, info.shape[0], step):
        yield slice(start, min(start + step, info.shape[0]))


def same_bytes(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Return whether two tensors are stored with equal dtype, shape and bytes."""
    one, two = checkpoint.tensors[first], checkpoint.tensors[second]
    return (one.dtype, one.shape) == (two.dtype, two.shape) and all(
        torch.equal(
            checkpoint.read(first, rows=rows).view(torch.uint8),
            checkpoint.read(second, rows=rows).view(torch.uint8),
        )
        for rows in _slices(one)
    )


def modules_of(conversion: WeightConversion, modules: Collection[str]) -> list[str]:
    """Return the `modules` that own a target of the conversion, once for each target."""
    owners = [name.rpartition(".")[0] for name in conversion.targets]
    return [name for name in owners if name in modules]


def in_order(
    conversions: Sequence[WeightConversion], checkpoint: Checkpoint, modules: Collection[str]
) -> list[list[WeightConversion]]:
    """Conversions by their place in the files, those of each module in one group.

    A module that is quantized or written away as soon as it is complete must not wait half-read for
    files that come later: then all such modules would be in memory at once. One whose weights go on
    in the next file comes last in its first one, so that no file is needed again.
    """
    groups: dict[object, list[WeightConversion]] = {}
    for conversion in conversions:
        owners = modules_of(conversion, modules)
        groups.setdefault(owners[0] if owners else id(conversion), []).append(conversion)

    def key(group: list[WeightConversion]) -> tuple[str, bool, int]:
        places = [_place(checkpoint, name) for one in group for name in one.names]
        first, last = min(places), max(places)
        return first[0], first[0] != last[0], first[1]

    return sorted(groups.values(), key=key)


def _place(checkpoint: Checkpoint, name: str) -> tuple[str, int]:
    info = checkpoint.tensors[name]
    return str(info.file), info.start
