"""One conversion of a loading plan: checkpoint tensors in, model tensors out, through transformers.

A converter of transformers takes all tensors of a target at once: a layer's experts two or three
times over. The converters that merge experts only stack them along dimension 0 and, at most, put
gate beside up; for those `expert_pieces` says where in the target each tensor lies, so that it can
be read there without a copy. Everything else is converted whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
)

Index = tuple[int | slice, ...]


@dataclass
class Transfer:
    """One conversion: `sources` (pattern -> checkpoint names, in stacking order) to `targets`."""

    first_target: str
    converter: WeightConverter | None  # None: one tensor, renamed
    sources: dict[str, list[str]] = field(default_factory=dict)
    targets: dict[str, torch.Size] = field(default_factory=dict)
    pieces: list[tuple[str, Index]] = field(default_factory=list)  # empty: convert whole

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def convert(
        self, model: PreTrainedModel, tensors: Mapping[str, list[Tensor]]
    ) -> dict[str, Tensor]:
        """Target name -> tensor, from the tensors of each source pattern."""
        if self.converter is None:
            ((tensor,),) = tensors.values()
            return {self.first_target: tensor}
        self.converter.collected_tensors = dict(tensors)  # type: ignore[arg-type]  # or futures
        done = self.converter.convert(self.first_target, model=model, config=model.config)
        return {name: got[0] if isinstance(got, list) else got for name, got in done.items()}


def expert_pieces(
    transfer: Transfer, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, Index]]:
    """``(checkpoint name, index into the one target)`` of each source; empty: convert it whole.

    The transfer's shapes have been found to fit, so the pieces cover the target.
    """
    if transfer.converter is None:
        return [(transfer.names[0], ())]
    if not _stacks_experts(transfer.converter):
        return []
    last = transfer.converter.operations[-1]
    pieces: list[tuple[str, Index]] = []
    start = 0
    for pattern in transfer.converter.source_patterns:  # the order in which they are concatenated
        names = transfer.sources.get(pattern, [])
        if not isinstance(last, Concatenate):
            pieces += [(name, (expert,)) for expert, name in enumerate(names)]
            continue
        dim = last.dim - 1  # of one expert's row
        stop = start + shapes[names[0]][dim]
        part = (*[slice(None)] * dim, slice(start, stop))
        pieces += [(name, (expert, *part)) for expert, name in enumerate(names)]
        start = stop
    return pieces


def _stacks_experts(converter: WeightConverter) -> bool:
    """Whether `converter` stacks along dimension 0, then at most concatenates along another."""
    first, *rest = converter.operations
    return (
        type(first) is MergeModulelist
        and first.dim == 0
        and len(rest) <= 1
        and all(type(op) is Concatenate and op.dim > 0 for op in rest)
    )


def expert_faults(transfer: Transfer, count: int) -> list[str]:
    """Experts of a merged target that are absent, or not among the `count` it has, by name.

    transformers stacks what is there in the order of its names, and its patterns take any character
    for a dot: an absent or misspelt name could put experts in each other's place.
    """
    if transfer.converter is None or type(transfer.converter.operations[0]) is not MergeModulelist:
        return []
    faults = []
    for names in transfer.sources.values():
        before, after = _around_number(names)
        wanted = {f"{before}{expert}{after}" for expert in range(count)}
        missing = sorted(wanted - set(names), key=dot_natural_key)
        faults += [f"missing: {name}" for name in missing]
        faults += [f"unexpected: {name}" for name in names if name not in wanted]
    return faults


def _around_number(names: list[str]) -> tuple[str, str]:
    """What stands before and after the expert's number in most of the names."""
    seen: Counter[tuple[str, str]] = Counter()
    for name in names:
        parts = name.split(".")
        for place in reversed(range(len(parts))):  # of equal counts, the rightmost number
            if parts[place].isdecimal():
                before, after = [*parts[:place], ""], ["", *parts[place + 1 :]]
                seen[".".join(before), ".".join(after)] += 1
    return seen.most_common(1)[0][0] if seen else (names[0], "")
