"""Weights from a checkpoint into a model built on the meta device, each straight to its place.

Every parameter is allocated once, in the dtype and on the device where it stays, and filled by
slices: beyond the weights themselves only one slice or one expert is in memory. Nothing is
initialised at random, and nothing is read before `make_plan` has found no fault. Buffers that no
checkpoint holds (rotary frequencies) get their values from transformers' own `_init_weights`,
which leaves alone what is marked as loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from moe.errors import CheckpointError
from moe.loading.checkpoint import Checkpoint, listing
from moe.loading.plan import Plan, make_plan
from moe.loading.reader import WeightReader, same_bytes
from moe.loading.transfer import Transfer

DtypeFor = Callable[[str, torch.dtype], torch.dtype]


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did. `weight_bytes` is the memory kept, shared tensors counted once."""

    weight_bytes: int
    bytes_read: int
    seconds: float
    tied: tuple[str, ...]  # parameters that share the memory of another
    ignored: tuple[str, ...]  # checkpoint tensors that the model class says to ignore
    computed: tuple[str, ...]  # absent and allowed to be: filled by transformers' own rule


def load_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype_for: DtypeFor,
    progress: bool,
    check_finite: bool = False,
) -> LoadReport:
    """Fill every parameter and buffer of `model` (on meta, see `meta_model`).

    ``dtype_for(parameter name, dtype in the checkpoint)`` gives the dtype that a parameter is kept
    in, unless the architecture fixes it. `progress` draws a bar of bytes on stderr; `check_finite`
    refuses NaN and infinity by name. Parameters end up without `requires_grad`. Raises one
    `CheckpointError` listing every fault; names and shapes are checked before anything is read.
    """
    started = time.perf_counter()
    plan = make_plan(model, checkpoint.tensors)
    if plan.problems:
        title = f"the weights in {checkpoint.path} do not fit {type(model).__name__}"
        raise CheckpointError(listing(title, plan.problems))
    _share_equal_ties(model, checkpoint, plan)
    total = sum(checkpoint.tensors[n].nbytes for t in plan.transfers for n in t.names)
    with _bar(progress) as bar:
        task = bar.add_task("loading weights", total=total)
        reader = WeightReader(checkpoint, check_finite, lambda count: bar.advance(task, count))
        for transfer in sorted(plan.transfers, key=lambda t: _position(t, checkpoint)):
            dtype = checkpoint.tensors[transfer.names[0]].dtype
            places = {
                name: torch.empty(shape, dtype=_kept(model, name, dtype, dtype_for), device=device)
                for name, shape in transfer.targets.items()
            }
            reader.fill(transfer, model, places)
            for name, place in places.items():
                _install(model, name, place)
    checkpoint.verify_unchanged()
    if reader.not_finite:
        raise CheckpointError(listing(f"bad values in {checkpoint.path}", reader.not_finite))
    tied = _finish(model, plan.missing, torch.device(device))
    return LoadReport(
        weight_bytes=sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        bytes_read=total,
        seconds=time.perf_counter() - started,
        tied=tuple(sorted(tied)),
        ignored=tuple(plan.ignored),
        computed=tuple(sorted(plan.missing - _tied_names(model))),
    )


def _position(transfer: Transfer, checkpoint: Checkpoint) -> tuple[str, int]:
    first = checkpoint.tensors[transfer.names[0]]
    return str(first.file), first.start


def _kept(
    model: PreTrainedModel, name: str, dtype: torch.dtype, dtype_for: DtypeFor
) -> torch.dtype:
    """The dtype `name` stays in: the caller's choice, unless the architecture fixes another."""
    built = model.get_parameter_or_buffer(name).dtype
    if not built.is_floating_point:
        return built
    chosen = dtype_for(name, dtype)
    plan = model._get_dtype_plan(chosen)
    if plan:
        alternation, pattern_by_group, _ = build_glob_alternation(list(plan))
        if match := alternation.search(name):
            assert match.lastgroup is not None  # every branch is a named group
            return plan[pattern_by_group[match.lastgroup]]
    return built if built != model.config.dtype else chosen


def _install(model: PreTrainedModel, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        value = nn.Parameter(value, requires_grad=False)
    value._is_hf_initialized = True  # type: ignore[attr-defined]  # or `_init_weights` would overwrite it
    setattr(module, leaf, value)


def _share_equal_ties(model: PreTrainedModel, checkpoint: Checkpoint, plan: Plan) -> None:
    """Where both tensors of a tied pair are stored with equal bytes, load one of them.

    Unequal ones are both loaded, and `tie_weights` leaves them apart with a warning.
    """
    renamed = {t.first_target: t for t in plan.transfers if t.converter is None}
    for target, source in model.all_tied_weights_keys.items():
        if target in renamed and source in renamed:
            first, second = renamed[target].names[0], renamed[source].names[0]
            if same_bytes(checkpoint, first, second):
                plan.transfers.remove(renamed[target])
                plan.missing.add(target)


def _tied_names(model: PreTrainedModel) -> set[str]:
    tied = model.all_tied_weights_keys
    return set(tied) | set(tied.values())


@torch.no_grad()
def _finish(model: PreTrainedModel, missing: set[str], device: torch.device) -> set[str]:
    """Tie, and compute what no checkpoint holds; the order is that of `_finalize_model_loading`."""
    names = _tied_names(model)
    for name in names:
        model.get_parameter_or_buffer(name)._is_hf_initialized = True
    absent: Any = missing - names  # declared as a list, used as a set
    model._move_missing_keys_from_meta_to_device(absent, {"": device}, None, None)
    model._initialize_missing_keys(is_quantized=False)
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert not tensor.is_meta, f"{name} was left without a value"
    return missing & names


def _bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not shown,
    )
