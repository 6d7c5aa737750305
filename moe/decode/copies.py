"""Leaves copies out of a decode program: most of what a recorded token copies can be read where it
comes from, or made where it goes.

`without_copies` takes the units of `moe.decode.lower` in order, and gives fewer that compute the
same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.program import Code, Space
from moe.decode.recorder import Value
from moe.decode.units import (
    AttentionOf,
    ExpertsOf,
    IndexerOf,
    Instruction,
    Product,
    Recurrent,
    Unit,
    element_of,
    is_whole,
    reads_of,
    values_of,
    writes_of,
)

_PARTIAL = (Code.SCATTER, Code.SCATTER_ADD, Code.GATHER, Code.TOP)
_FIXED = (*_PARTIAL, Code.QUANTISE, Code.SORT_CHOICE)  # operands must stay as they lie
_STATES = (Space.BEFORE, Space.AFTER)
_Move = Callable[[Tensor], Value | None]


def without_copies(
    units: Sequence[Unit], spaces: Mapping[int, Space], before: set[int]
) -> list[Unit]:
    """
    Args:
        spaces: buffers that lie elsewhere than in a step's memory.
        before: buffers of recurrent states as they were before the token.
    """
    units = _stored_directly(_without_state_copies(units, before), spaces)
    units = _needed(_read_directly(_needed(units, spaces), spaces), spaces)
    return _written_directly(units, spaces)


def through(use: Tensor, source: Tensor, target: Tensor) -> Tensor | None:
    """The elements of ``source`` that ``use`` shows, seen in ``target``, which has the same numbers
    elsewhere; None if ``use`` shows others too, or strides cannot say it. ``use`` and ``source``
    are views of one buffer."""
    dims = _joined_dims(source, target)
    if any(s < inner * n for (_, s, _), (n, inner, _) in pairwise(dims)):
        return None
    if any(s <= 0 for _, s, _ in dims):
        return None
    left = int(use.storage_offset()) - int(source.storage_offset())
    offset, last = int(target.storage_offset()), [0] * len(dims)
    for at, (size, stride, other) in enumerate(dims):
        last[at], left = divmod(left, stride)
        if not 0 <= last[at] < size:
            return None
        offset += last[at] * other
    strides = []
    for size, stride in zip(use.shape, use.stride(), strict=True):
        at = next((i for i, (_, s, _) in enumerate(dims) if s <= stride), len(dims))
        if size == 1 or stride == 0:
            strides.append(0)
        elif at == len(dims) or stride % dims[at][1]:
            return None
        else:
            last[at] += (size - 1) * (stride // dims[at][1])
            strides.append(stride // dims[at][1] * dims[at][2])
    if left or any(end >= size for end, (size, _, _) in zip(last, dims, strict=True)):
        return None
    return target.as_strided(tuple(use.shape), tuple(strides), offset)


def _joined_dims(source: Tensor, target: Tensor) -> list[tuple[int, int, int]]:
    """Sizes, and strides in both, of their dimensions with more than one element, the longest
    strides of the source first; neighbours joined where both allow it."""
    dims = [x for x in zip(source.shape, source.stride(), target.stride(), strict=True) if x[0] > 1]
    joined: list[tuple[int, int, int]] = []
    for size, stride, other in sorted(dims, key=lambda x: -x[1]):
        if joined and joined[-1][1:] == (stride * size, other * size):
            size *= joined.pop()[0]
        joined.append((size, stride, other))
    return joined


def disjoint(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two views of one buffer share no element; None: all of it."""
    if one is None or other is None:
        return False
    parts = [(tuple(x.shape), tuple(x.stride()), int(x.storage_offset())) for x in (one, other)]
    return _disjoint(*sorted(parts))


@lru_cache(maxsize=4096)
def _disjoint(one: Any, other: Any) -> bool:
    spans = [
        (offset, offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
        for shape, strides, offset in (one, other)
    ]
    (begin, end), (first, last) = spans
    if end < first or last < begin:
        return True
    seen = torch.zeros(max(end, last) + 1, dtype=torch.bool)
    shape, strides, offset = one
    plain = [n if s else 1 for n, s in zip(shape, strides, strict=True)]
    seen.as_strided(plain, strides, offset).fill_(True)
    return not bool(seen.as_strided(*other).any())


def parts_written(unit: Unit) -> list[tuple[int, Tensor | None]]:
    """Buffers that a unit writes, and which part; None: perhaps all of it."""
    if isinstance(unit, ExpertsOf) or (isinstance(unit, Instruction) and unit.code in _FIXED):
        return [(buffer, None) for buffer in writes_of(unit)]
    found = (unit.after, unit.out) if isinstance(unit, Recurrent) else (unit.out,)
    return [(x.buffer, x.meta) for x in found if isinstance(x, Value)]


def parts_read(unit: Unit) -> list[tuple[int, Tensor | None]]:
    """Buffers that a unit reads, and which part; None: perhaps all of it."""
    buffers = reads_of(unit)
    if isinstance(unit, ExpertsOf) or (isinstance(unit, Instruction) and unit.code in _FIXED):
        return [(buffer, None) for buffer in buffers]
    return [(x.buffer, x.meta) for x in values_of(unit) if x.buffer in buffers]


def _read_directly(units: Sequence[Unit], spaces: Mapping[int, Space]) -> list[Unit]:
    """The units, reading what copies were made of in place of the copies. Copies stay."""
    made: list[Unit] = []
    copies: dict[int, list[tuple[Value, Value]]] = defaultdict(list)  # by buffer: copy and source
    copied_to: dict[int, set[int]] = defaultdict(set)  # by the source's buffer
    for unit in units:
        for buffer in dict.fromkeys(reads_of(unit)):
            for copy, source in copies[buffer]:
                unit = _reading(unit, copy, source) or unit
        for buffer, part in parts_written(unit):
            copies[buffer] = [x for x in copies[buffer] if disjoint(x[0].meta, part)]
            for other in copied_to[buffer]:
                copies[other] = [
                    (copy, source)
                    for copy, source in copies[other]
                    if source.buffer != buffer or disjoint(source.meta, part)
                ]
        pair = _copy_of(unit)
        if pair is not None and spaces.get(pair[1].buffer) not in _STATES:
            copies[pair[0].buffer].append(pair)
            copied_to[pair[1].buffer].add(pair[0].buffer)
        made.append(unit)
    return made


def _reading(unit: Unit, copy: Value, source: Value) -> Unit | None:
    """The unit with the operands that it only reads moved from a copy to its source; None if it
    cannot read them there as fast."""
    if copy.buffer in writes_of(unit):
        return None

    def move(meta: Tensor) -> Value | None:
        found = through(meta, copy.meta, source.meta)
        if found is None or _last_stride(found) not in (0, 1, _last_stride(meta)):
            return None
        return Value(source.buffer, found)

    return _moved(unit, copy.buffer, move)


def _last_stride(meta: Tensor) -> int:
    strides = [s for n, s in zip(meta.shape, meta.stride(), strict=True) if n > 1]
    return strides[-1] if strides else 0


def _written_directly(units: Sequence[Unit], spaces: Mapping[int, Space]) -> list[Unit]:
    """The units without copies of what can be made where the copy would be."""
    kept: list[Unit | None] = list(units)
    touching: dict[int, set[int]] = defaultdict(set)
    for index, unit in enumerate(units):
        for buffer in (*reads_of(unit), *writes_of(unit)):
            touching[buffer].add(index)
    for index in range(len(kept)):
        current = kept[index]
        pair = None if current is None else _copy_of(current)
        if pair is None or any(x.buffer in spaces for x in pair):
            continue
        out, source = pair

        def move(meta: Tensor, out: Value = out, source: Value = source) -> Value | None:
            found = through(meta, source.meta, out.meta)
            return None if found is None else Value(out.buffer, found)

        moved = _all_moved(kept, index, touching, out, source, move)
        if moved is None:
            continue
        for at, other in moved.items():
            kept[at] = other
        kept[index] = None
        touching[out.buffer] |= touching.pop(source.buffer)
        touching[out.buffer].discard(index)
    return [unit for unit in kept if unit is not None]


def _all_moved(
    units: Sequence[Unit | None],
    index: int,
    touching: Mapping[int, set[int]],
    out: Value,
    source: Value,
    move: _Move,
) -> dict[int, Unit] | None:
    """All units that read or write a source, doing so in its copy; None if one cannot."""
    for at in touching[out.buffer] - {index}:
        unit = units[at]
        if unit is not None:
            for buffer, part in parts_written(unit):
                if buffer == out.buffer and not disjoint(part, out.meta):
                    return None
    moved: dict[int, Unit] = {}
    for at in touching[source.buffer] - {index}:
        unit = units[at]
        if unit is None:
            continue
        made = None
        if at < index or source.buffer not in writes_of(unit):
            made = _moved(unit, source.buffer, move)
        if made is None:
            return None
        moved[at] = made
    return moved


def _copy_of(unit: Unit) -> tuple[Value, Value] | None:
    """The copy and its source, if the unit copies between buffers of one type."""
    if not isinstance(unit, Instruction) or unit.code is not Code.COPY:
        return None
    (source,), out = unit.inputs, unit.out
    if not isinstance(source, Value) or not isinstance(out, Value) or source.buffer == out.buffer:
        return None
    same = element_of(source.meta.dtype) == element_of(out.meta.dtype)
    return (out, source) if same else None


def _moved(unit: Unit, buffer: int, move: _Move) -> Unit | None:
    """The unit with all operands in this buffer moved; None if one cannot be, or must lie as it
    does."""

    def of(x: Any, lies_well: Callable[[Value, Value], bool]) -> Any:
        if not isinstance(x, Value) or x.buffer != buffer:
            return x
        found = move(x.meta)
        if found is None or not lies_well(x, found):
            raise _CannotMove
        return found

    def whole(x: Any) -> Any:  # the rows of a step lie side by side then
        return of(x, lambda _, found: is_whole(found))

    def alike(x: Any) -> Any:
        return of(x, _strides_alike)

    def never(x: Any) -> Any:
        return of(x, lambda *_: False)

    try:
        match unit:
            case Instruction() if unit.code not in _FIXED:
                out, *inputs = (of(x, lambda *_: True) for x in (unit.out, *unit.inputs))
                return replace(unit, out=out, inputs=tuple(inputs))
            case Product():
                never(unit.codes)
                return replace(unit, rows=whole(unit.rows), out=whole(unit.out))
            case AttentionOf():
                never(unit.chosen)
                names = ("query", "key", "value", "out", "sinks", "bias", "entry")
                return replace(unit, **{name: whole(getattr(unit, name)) for name in names})
            case Recurrent():
                never(unit.before)
                never(unit.after)
                rows = tuple(map(alike, unit.rows))
                return replace(unit, rows=rows, out=alike(unit.out))
            case _:
                return None
    except _CannotMove:
        return None


class _CannotMove(Exception):
    """An operand stays where it is."""


def _strides_alike(one: Value, other: Value) -> bool:
    pairs = zip(one.meta.shape, one.meta.stride(), other.meta.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)


def _needed(units: Sequence[Unit], spaces: Mapping[int, Space]) -> list[Unit]:
    """The units whose results are used, in order."""
    results = (Space.AFTER, Space.LOGITS, Space.FINAL)
    wanted = {buffer for buffer, space in spaces.items() if space in results}
    kept: list[Unit] = []
    for unit in reversed(units):
        always = isinstance(unit, ExpertsOf | AttentionOf | IndexerOf)
        if always or not wanted.isdisjoint(writes_of(unit)):
            wanted.update(reads_of(unit))
            kept.append(unit)
    return kept[::-1]


def _without_state_copies(units: Sequence[Unit], before: set[int]) -> list[Unit]:
    """The units with whole copies of states left out: transformers copies a state before a layer
    changes it in place. Units read the state itself until they write to its copy."""
    kept: list[Unit] = []
    copies: dict[int, tuple[Value, Instruction]] = {}  # by buffer: the state, and the copy of it

    def of_state(x: Any) -> Any:
        found = copies.get(x.buffer) if isinstance(x, Value) else None
        return x if found is None else Value(found[0].buffer, x.meta)

    for unit in units:
        if isinstance(unit, Instruction):
            unit = replace(unit, inputs=tuple(map(of_state, unit.inputs)))
        elif isinstance(unit, Recurrent):
            unit = replace(unit, before=of_state(unit.before))
        if isinstance(unit, Instruction) and _is_whole_copy(unit):
            (source,), out = unit.inputs, unit.out
            assert isinstance(source, Value)
            assert isinstance(out, Value)
            if source.buffer in before:
                copies[out.buffer] = source, unit
                continue
        for buffer in (*reads_of(unit), *writes_of(unit)):
            found = copies.pop(buffer, None)
            if found is not None and not (
                isinstance(unit, Instruction) and _overwrites(unit, found[1])
            ):
                kept.append(found[1])
        kept.append(unit)
    return [*kept, *(copy for _, copy in copies.values())]


def _stored_directly(units: Sequence[Unit], spaces: Mapping[int, Space]) -> list[Unit]:
    """The units without whole copies of a recurrent layer's new state to where it is kept: the
    layer writes it there."""
    made = {x.after.buffer: at for at, x in enumerate(units) if isinstance(x, Recurrent)}
    kept: list[Unit | None] = list(units)
    for index, unit in enumerate(units):
        if not (isinstance(unit, Instruction) and _is_whole_copy(unit)):
            continue
        (source,), out = unit.inputs, unit.out
        assert isinstance(source, Value)
        assert isinstance(out, Value)
        at = made.get(source.buffer)
        if at is None or spaces.get(out.buffer) != Space.AFTER or source.buffer in spaces:
            continue
        others = [other for other in units if other is not unit and other is not units[at]]
        if not any(_touches(other, {source.buffer, out.buffer}) for other in others):
            layer = units[at]
            assert isinstance(layer, Recurrent)
            kept[at], kept[index] = replace(layer, after=Value(out.buffer, layer.after.meta)), None
    return [unit for unit in kept if unit is not None]


def _touches(unit: Unit, buffers: set[int]) -> bool:
    return not buffers.isdisjoint((*reads_of(unit), *writes_of(unit)))


def _is_whole_copy(unit: Instruction) -> bool:
    """It copies all of one buffer to all of another."""
    return unit.code is Code.COPY and all(
        isinstance(x, Value) and is_whole(x) for x in (unit.out, *unit.inputs)
    )


def _overwrites(unit: Instruction, copy: Instruction) -> bool:
    out, whole = unit.out, copy.out
    assert isinstance(out, Value)
    assert isinstance(whole, Value)
    return unit.code not in _PARTIAL and out.meta.numel() == whole.meta.numel()
