"""Which checkpoint tensors become which parameters, worked out from names and shapes alone.

A checkpoint's layout is transformers' business: its own conversion mapping renames, merges
per-expert tensors, concatenates gate and up, transposes. `make_plan` runs that mapping on meta
tensors, so that everything missing, unexpected or mis-shaped is known before a byte is read, and
finds out where each tensor of an expert can be read to directly: the converters that merge experts
stack them along dimension 0 and, at most, put gate beside up, so each source tensor has a place of
its own in the target (`expert_pieces`). Everything else is converted whole.
The matching follows `transformers.core_model_loading.convert_and_load_state_dict_in_model`; it
sees the parameters that `StackedExperts` took the place of, and `_join_stacked` goes on from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from experts.safetensors_io import TensorInfo
from moe.network.stacked import Origin, stacked_origins

Index = tuple[int | slice, ...]


@dataclass
class WeightConversion:
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


@dataclass
class StackedConversion(WeightConversion):
    """Fills a parameter of `StackedExperts` that is no slice of a checkpoint's tensors, as it has
    several origins, or a swapped or converted one.

    Attributes:
        parts: the conversion to each origin, in order.
    """

    parts: list[tuple[Origin, WeightConversion]] = field(default_factory=list)

    def convert(
        self, model: PreTrainedModel, tensors: Mapping[str, list[Tensor]]
    ) -> dict[str, Tensor]:
        (shape,) = self.targets.values()
        made = []
        for origin, conversion in self.parts:
            own = {pattern: tensors[pattern] for pattern in conversion.sources}
            (tensor,) = conversion.convert(model, own).values()
            made.append(origin.part(tensor, shape[0]))
        return {self.first_target: torch.cat(made, 1)}


@dataclass
class LoadPlan:
    """Tensors to read, tensors that may be absent, and everything that is wrong."""

    conversions: list[WeightConversion]
    missing: set[str]  # absent, and allowed to be: tied to another, or ignored by the model class
    ignored: list[str]  # checkpoint tensors that the model class says to ignore
    problems: list[str]


def make_plan(
    model: PreTrainedModel,
    tensors: Mapping[str, TensorInfo],
    renamed: Mapping[str, str | None] = MappingProxyType({}),
) -> LoadPlan:
    """Match `tensors` with the parameters and persistent buffers of `model` (on meta).

    Args:
        renamed: what to take some of the names for; None: the tensor is ignored.
    """
    expected = _expected(model)
    kept = {name: info for name, info in tensors.items() if renamed.get(name, name) is not None}
    conversions, unmatched, problems = _match(model, kept, expected, renamed)
    spare = _drop_spare(model, conversions)
    for conversion in conversions.values():
        problems += _try_on_meta(conversion, model, tensors, expected)
    produced = {name for conversion in conversions.values() for name in conversion.targets}
    tried = {conversion.first_target for conversion in conversions.values()}
    missing = expected.keys() - produced - tried
    info = adjusted(model, without_tied(model, missing), set(unmatched))
    problems += [
        f"missing: {name} {tuple(expected[name].shape)}"
        for name in sorted(info.missing_keys, key=dot_natural_key)
    ]
    problems += [
        f"unexpected: {name} {tensors[name].shape}"
        for key in sorted(info.unexpected_keys, key=dot_natural_key)
        for name in unmatched[key]
    ]
    if info.missing_keys and info.unexpected_keys:
        problems = _under_another_prefix(model, kept, expected, set(info.missing_keys)) or problems
    ignored = [n for key in unmatched.keys() - info.unexpected_keys for n in unmatched[key]]
    if not problems:
        _join_stacked(model, conversions)
    return LoadPlan(list(conversions.values()), missing, sorted([*ignored, *spare]), problems)


_PREFIXES_TRIED = 4


def _under_another_prefix(
    model: PreTrainedModel,
    tensors: Mapping[str, TensorInfo],
    expected: dict[str, Tensor],
    missing: set[str],
) -> list[str]:
    """The one problem of a checkpoint whose names fit once another prefix stands before them."""
    pairs = [(theirs, ours) for theirs in _prefixes(tensors) for ours in _prefixes(missing)]
    tried = [
        (theirs, ours, {n: ours + n.removeprefix(theirs) for n in tensors if n.startswith(theirs)})
        for theirs, ours in pairs
    ]
    # Matching adds and removes the model's own prefix: what fits without that says more.
    tried.sort(key=lambda each: -len(expected.keys() & each[2].values()))
    for theirs, ours, renamed in tried[:_PREFIXES_TRIED]:
        conversions, unmatched, clashes = _match(model, tensors, expected, renamed)
        found = {name for each in conversions.values() for name in _targets(each)}
        info = adjusted(model, missing - found, set(unmatched))
        if not info.missing_keys and not info.unexpected_keys and not clashes:
            shown = f"names of tensors begin with {theirs!r} where the model's begin with"
            return [f"{shown} {ours!r}, and fit otherwise; rename them"]
    return []


def _prefixes(names: Iterable[str]) -> list[str]:
    """Return beginnings that many names share, whole words of up to three, the shortest first."""
    counts = Counter(
        "".join(f"{word}." for word in name.split(".")[:words])
        for name in names
        for words in range(min(4, name.count(".") + 1))
    )
    most = max(counts.values(), default=0)
    return sorted((p for p, n in counts.items() if 2 * n > most), key=len)[:6]


def _targets(conversion: WeightConversion) -> Iterable[str]:
    """Yield the parameters that a transfer fills which was matched, and not yet tried."""
    if conversion.converter is None:
        return [conversion.first_target]
    first, *_ = conversion.converter.target_patterns
    return [
        conversion.first_target.replace(first, each)
        for each in conversion.converter.target_patterns
    ]


def _expected(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's state on meta, with the origins of stacked experts in place of themselves."""
    expected = model.state_dict()
    for block, _, name, origins in stacked_origins(model):
        tensor = expected.pop(name)
        for origin in origins:
            expected[block + origin.name] = tensor.new_empty(origin.shape, device="meta")
    return expected


def _drop_spare(model: PreTrainedModel, conversions: Mapping[str, WeightConversion]) -> list[str]:
    """Leave out the tensors of experts that no token can reach; their names."""
    dropped = []
    for block, experts, _, origins in stacked_origins(model):
        for origin in origins if experts.spare else ():
            conversion = conversions.get(block + origin.name)
            if conversion is None or not _merges_experts(conversion):
                continue
            for pattern, names in conversion.sources.items():
                before, after = _around_number(names)
                spare = {
                    f"{before}{experts.num_experts + number}{after}"
                    for number in range(experts.spare)
                }
                dropped += [name for name in names if name in spare]
                conversion.sources[pattern] = [name for name in names if name not in spare]
    return dropped


def _join_stacked(model: PreTrainedModel, conversions: dict[str, WeightConversion]) -> None:
    """Conversions to stacked experts in place of those to their origins."""
    for block, experts, name, origins in stacked_origins(model):
        parts = [(o, conversions.pop(block + o.name)) for o in origins]
        shape = experts.get_parameter(name.rpartition(".")[2]).shape
        (origin, single), *others = parts
        whole = single.converter is not None and not single.pieces
        if others or whole or origin.swapped or origin.shape != shape:
            sources = {p: n for _, part in parts for p, n in part.sources.items()}
            conversions[name] = StackedConversion(name, None, sources, {name: shape}, [], parts)
        else:
            conversions[name] = replace(single, first_target=name, targets={name: shape})


def _match(
    model: PreTrainedModel,
    tensors: Mapping[str, TensorInfo],
    expected: dict[str, Tensor],
    given_names: Mapping[str, str | None],
) -> tuple[dict[str, WeightConversion], dict[str, list[str]], list[str]]:
    """Transfers by first target, checkpoint names by unmatched target, and clashes."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    conversions: dict[str, WeightConversion] = {}
    unmatched: dict[str, list[str]] = {}
    problems: list[str] = []
    for name in sorted(tensors, key=dot_natural_key):
        given = given_names.get(name) or name
        target, pattern = rename_source_key(given, renamings, converters, prefix, expected)
        if target not in expected and given in expected:
            target, pattern = rename_source_key(given, [], [], prefix, expected)
        if target not in expected:
            for each in by_pattern[pattern].target_patterns if pattern is not None else [target]:
                first = by_pattern[pattern].target_patterns[0] if pattern is not None else target
                unmatched.setdefault(target.replace(first, each), []).append(name)
            continue
        if target not in conversions:
            copy = deepcopy(by_pattern[pattern]) if pattern is not None else None
            conversions[target] = WeightConversion(target, copy)
        conversion = conversions[target]
        renamed = pattern is None
        if (conversion.converter is None) != renamed or (renamed and conversion.sources):
            problems.append(f"both {conversion.names[0]} and {name} give {target}; remove one")
            continue
        conversion.sources.setdefault(pattern or name, []).append(name)
    return conversions, unmatched, problems


def _try_on_meta(
    conversion: WeightConversion,
    model: PreTrainedModel,
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, Tensor],
) -> list[str]:
    """Fill in `targets` and `pieces`; returns what is wrong."""
    count = expected[conversion.first_target].shape[:1].numel()
    if faults := expert_faults(conversion, count):
        return faults
    metas = {
        pattern: [_meta(tensors[name]) for name in names]
        for pattern, names in conversion.sources.items()
    }
    given = sum(tensor.numel() for group in metas.values() for tensor in group)
    what = conversion.names[0]
    if len(conversion.names) > 1:
        what = f"{conversion.first_target} (from {what} and {len(conversion.names) - 1} more)"
    try:
        results = conversion.convert(model, metas)
    except Exception as error:  # an operation met shapes it cannot work on
        return [f"wrong shape: {what}: cannot be converted: {error}"]
    problems = []
    for name, result in results.items():
        if name not in expected:
            problems.append(f"unexpected: {what} gives {name}, which the model does not have")
        elif result.shape != expected[name].shape:
            problems.append(
                f"wrong shape: {what} is {tuple(result.shape)}, "
                f"the configuration says {tuple(expected[name].shape)}"
            )
        elif result.is_floating_point() != expected[name].is_floating_point():
            problems.append(
                f"wrong dtype: {what} is {result.dtype}, the model has {expected[name].dtype}"
            )
    if not problems and given != sum(result.numel() for result in results.values()):
        problems.append(f"wrong shape: {what}: the conversion leaves some of it unused")
    conversion.targets = {name: result.shape for name, result in results.items()}
    if not problems:
        conversion.pieces = expert_pieces(
            conversion, {n: tensors[n].shape for n in conversion.names}
        )
    return problems


def _meta(info: TensorInfo) -> Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def without_tied(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """`missing` without parameters that share memory with one that is there."""
    groups: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, {source}).add(target)
    return missing - {name for group in groups.values() if group - missing for name in group}


def adjusted(model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> LoadStateDictInfo:
    """Both sets without what the model class itself says to ignore."""
    info = LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return info


def expert_pieces(
    conversion: WeightConversion, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, Index]]:
    """``(checkpoint name, index into the one target)`` of each source; empty: convert it whole.

    The conversion's shapes have been found to fit, so the pieces cover the target.
    """
    if conversion.converter is None:
        return [(conversion.names[0], ())]
    if not _stacks_experts(conversion.converter):
        return []
    last = conversion.converter.operations[-1]
    pieces: list[tuple[str, Index]] = []
    start = 0
    for pattern in conversion.converter.source_patterns:  # the order in which they are concatenated
        names = conversion.sources.get(pattern, [])
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
    """Return whether `converter` stacks along dimension 0, then at most concatenates along
    another."""
    first, *rest = converter.operations
    return (
        type(first) is MergeModulelist
        and first.dim == 0
        and len(rest) <= 1
        and all(type(op) is Concatenate and op.dim > 0 for op in rest)
    )


def expert_faults(conversion: WeightConversion, count: int) -> list[str]:
    """Experts of a merged target that are absent, or not among the `count` it has, by name.

    transformers stacks what is there in the order of its names, and its patterns take any character
    for a dot: an absent or misspelt name could put experts in each other's place.
    """
    if not _merges_experts(conversion):
        return []
    faults = []
    for names in conversion.sources.values():
        before, after = _around_number(names)
        wanted = {f"{before}{expert}{after}" for expert in range(count)}
        missing = sorted(wanted - set(names), key=dot_natural_key)
        faults += [f"missing: {name}" for name in missing]
        faults += [f"unexpected: {name}" for name in names if name not in wanted]
    return faults


def _merges_experts(conversion: WeightConversion) -> bool:
    converter = conversion.converter
    return converter is not None and type(converter.operations[0]) is MergeModulelist


def _around_number(names: list[str]) -> tuple[str, str]:
    """Return the text before and after the expert's number in most of the names."""
    seen: Counter[tuple[str, str]] = Counter()
    for name in names:
        parts = name.split(".")
        for place in reversed(range(len(parts))):  # of equal counts, the rightmost number
            if parts[place].isdecimal():
                before, after = [*parts[:place], ""], ["", *parts[place + 1 :]]
                seen[".".join(before), ".".join(after)] += 1
    return seen.most_common(1)[0][0] if seen else (names[0], "")
