"""Where every weight of a checkpoint goes, and how large it will be, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from experts.header import TensorInfo
from experts.linear import QuantizedLinear
from moe.errors import CheckpointError
from moe.loading.checkpoint import Checkpoint, listing
from moe.loading.plan import Plan
from moe.loading.reader import same_bytes

DtypeFor = Callable[[str, torch.dtype], torch.dtype]
"""``(parameter name, dtype in the checkpoint)`` to the dtype that it is kept in."""


@dataclass(frozen=True)
class WeightPlan:
    """Where every weight goes, and how large it will be; nothing is allocated yet.

    Attributes:
        plan: what is read, and what need not be there.
        dtypes: what each parameter that is read is kept in.
        nbytes: memory of each parameter and buffer; 0 for one that shares another's.
        bytes_to_read: bytes of the checkpoint.
    """

    plan: Plan
    dtypes: dict[str, torch.dtype]
    nbytes: dict[str, int]
    bytes_to_read: int

    def without(self, modules: Collection[str], checkpoint: Checkpoint) -> WeightPlan:
        """The plan but for what fills `modules` only."""
        kept = [
            transfer
            for transfer in self.plan.transfers
            if not all(name.rpartition(".")[0] in modules for name in transfer.targets)
        ]
        total = sum(checkpoint.tensors[n].nbytes for transfer in kept for n in transfer.names)
        return replace(self, plan=replace(self.plan, transfers=kept), bytes_to_read=total)


def plan_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    dtype_for: DtypeFor,
    make: Callable[[PreTrainedModel, Mapping[str, TensorInfo]], Plan] | None = None,
) -> WeightPlan:
    """Match the checkpoint with `model` (on meta, see `meta_model`).

    ``dtype_for(parameter name, dtype in the checkpoint)`` gives the dtype that a parameter is kept
    in, unless the architecture fixes it. Raises one `CheckpointError` listing every fault; names
    and shapes are checked from headers, and only tied tensors that are stored twice are read.
    """
    plan = checkpoint.make_plan(model) if make is None else make(model, checkpoint.tensors)
    if plan.problems:
        title = f"the weights in {checkpoint.path} do not fit {type(model).__name__}"
        raise CheckpointError(listing(title, plan.problems))
    _share_equal_ties(model, checkpoint, plan)
    dtypes = {
        name: _kept(model, name, checkpoint.tensors[transfer.names[0]].dtype, dtype_for)
        for transfer in plan.transfers
        for name in transfer.targets
    }
    shared = plan.missing & tied_names(model)
    nbytes = {
        name: 0 if name in shared else tensor.numel() * dtypes.get(name, tensor.dtype).itemsize
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    total = sum(checkpoint.tensors[n].nbytes for t in plan.transfers for n in t.names)
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


def tied_names(model: PreTrainedModel) -> set[str]:
    """Parameters that share memory with another, and those others."""
    tied = model.all_tied_weights_keys
    return set(tied) | set(tied.values())
