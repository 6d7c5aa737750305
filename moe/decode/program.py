"""A program: lowered operations in stages, their memory, and the records for C++.

A stage is a run of instructions for each row, the products of all rows that are ready together, one
attention or one recurrent layer (kernels/cpu/program.h). `Program` orders the units of a `Lowering`
by what they read and write, gives every buffer a place in a step's memory that it shares with
buffers whose lives do not overlap, and writes the records. The same program reads prompts, whose
tokens are rows that follow each other.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from dataclasses import replace
from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from kernels import PlaneMatrix
from kernels.cpu import program as native
from kernels.cpu.decode import DecoderLayerRecord
from kernels.cpu.interface import integers
from kernels.cpu.program import Code, Element, Kind, Space
from kernels.cpu.recurrence import NativeCall
from moe.decode.copies import disjoint, parts_read, parts_written, without_copies
from moe.decode.lower import Lowering
from moe.decode.patterns import with_patterns
from moe.decode.recorder import DecodeTrace, Value
from moe.decode.records import DescriptionRecords
from moe.decode.units import (
    AttentionOf,
    ExpertsOf,
    IndexerOf,
    Instruction,
    Operand,
    Product,
    Recurrent,
    Selection,
    Unit,
    collapsed,
    element_of,
    is_whole,
    reads_of,
    values_of,
    writes_of,
)
from moe.describe.description import NotDescribed
from moe.kv.layout import LayerKey, Shape, StateKey

_ALIGNED = 64
_SPLIT = 512  # keys of a split, as in kernels/cpu/heads.h
_STATES = (Space.BEFORE, Space.AFTER)
_UNEVEN = (Code.TOP, Code.QUANTISE)  # outputs have other sizes than inputs


def room_of(x: Operand) -> int:
    """Elements of a buffer from an operand's first one on."""
    tensor = x.meta if isinstance(x, Value) else x
    return tensor.untyped_storage().nbytes() // tensor.dtype.itemsize - int(tensor.storage_offset())


class StateLayout:
    """The place of each recurrent state in one float32 tensor that holds all of a sequence."""

    def __init__(self, states: dict[StateKey, Value], initial: Mapping[StateKey, int]) -> None:
        self._initial = initial
        self._metas = {key: value.meta for key, value in states.items()}
        sizes = [-(-meta.numel() * meta.itemsize // _ALIGNED) * 16 for meta in self._metas.values()]
        self.offsets = dict(zip(states, accumulate(sizes, initial=0), strict=False))
        self.size = sum(sizes)

    def state(self, memory: Tensor, key: StateKey) -> Tensor:
        """One state in such a tensor."""
        start, meta = self.offsets[key], self._metas[key]
        own = memory[start : start + meta.numel() * meta.itemsize // 4]
        return own.view(meta.dtype).view(meta.shape)

    def begin(self, memory: Tensor) -> None:
        """Fill such a tensor as it is before the first token."""
        memory.zero_()
        for key, number in self._initial.items():
            self.state(memory, key).fill_(number)


class Program:
    """A trace as the records of a compiled program.

    Attributes:
        record: for C++.
        experts: of each layer of experts, in order.
        hidden: size of the rows that experts read.
        layers: what keeps rows in a sequence's cache, by its index in the records.
        states: of the recurrent layers.
        shapes: of the rows of each of them, and how many tokens a row stands for.
        rotations: the tables that indexers rotate their keys by, and the records that point there.
        logits_last: nothing is made of all rows behind their logits; of a prompt only those that
            are asked for are made then.
        final_width: H of the final hidden states that it hands on; 0: it does not.
    """

    def __init__(self, trace: DecodeTrace, records: DescriptionRecords) -> None:
        lowering = Lowering(trace)
        self._records, self._kept = records, list[Any]()
        self.states = StateLayout(trace.before, trace.initial)
        self._place_states(trace, lowering)
        self._place_logits(trace, lowering)
        self._place_hidden(trace, lowering)
        self._lowering = lowering
        units = without_copies(lowering.units, lowering.spaces, set(self._before))
        units = with_patterns(units, set(lowering.spaces))
        units = _with_intervals(units, lowering.spaces)
        self.experts = [unit for unit in units if isinstance(unit, ExpertsOf)]
        sizes = {(unit.hidden, unit.top_k) for unit in self.experts}
        if len(sizes) > 1:
            raise NotDescribed("layers choose different numbers of experts")
        self.hidden, self.top_k = sizes.pop() if sizes else (0, 0)
        assert trace.logits is not None
        self.vocabulary = trace.logits.meta.shape[-1]
        self.layers: list[LayerKey] = []
        self.shapes: dict[LayerKey, tuple[Shape, int]] = {}
        self._stages = _stages(units, set(self._before))
        self._check_states()
        self._pitches = self._find_pitches()
        self._bases, self._row_bytes, self._kept_bytes = self._places()
        self.record = self._write()

    def latents(self, *, prompts: bool = False) -> dict[nn.Module, Tensor]:
        """The weight ``(heads, rows, R)`` of each module that expands latents.

        Args:
            prompts: only of those that expand them by this weight in prompts, too.
        """
        attentions = [unit for unit, *_ in self._stages if isinstance(unit, AttentionOf)]
        found = [x.attends.latents for x in attentions if not (prompts and x.attends_together)]
        return {latents.leaf: latents.expansion for latents in found if latents is not None}

    @property
    def float_weights(self) -> int:
        """Weights of the products with matrices of floats, a layer of experts, without the head."""
        products = [unit for stage in self._stages for unit in stage if isinstance(unit, Product)]
        weights = [unit.projection.weight for unit in products]
        floats = (x.numel() for x in weights if isinstance(x, Tensor) and len(x) < self.vocabulary)
        return sum(floats) // max(len(self.experts), 1)

    def scratch_bytes(self, tokens: int) -> int:
        """About what a row needs beside its own memory where it has so many tokens before it."""
        splits, sizes = -(-tokens // _SPLIT), [0]
        for unit, *_ in self._stages:
            if isinstance(unit, AttentionOf) and not unit.attends_together:
                latents, (heads, _) = unit.attends.latents, unit.query.meta.shape
                size = unit.value.meta.shape[1] if latents is None else latents.expansion.shape[2]
                sizes.append(4 * heads * size * (splits + 1))
            elif isinstance(unit, IndexerOf):
                sizes.append(4 * tokens)
        return max(sizes)

    def _place_states(self, trace: DecodeTrace, lowering: Lowering) -> None:
        """New states are made in place, where they are buffers of their own."""
        self._offsets: dict[int, int] = {}
        for key, value in trace.before.items():
            after = trace.after.get(key)
            if after is None or after.meta.shape != value.meta.shape:
                raise NotDescribed("a recurrent state changes its shape, or is not kept")
            if value.meta.dtype not in (torch.float32, torch.int64):
                raise NotDescribed(f"a recurrent state is {value.meta.dtype}")
            lowering.spaces[value.buffer] = Space.BEFORE
            if not is_whole(after) or after.buffer in lowering.spaces:
                made = lowering.fresh(after.meta.shape, value.meta.dtype)
                lowering.emit(Code.COPY, made, after)
                after = made
            lowering.spaces[after.buffer] = Space.AFTER
            for state in (value, after):
                self._offsets[state.buffer] = 4 * self.states.offsets[key]
        self._before = [value.buffer for value in trace.before.values()]

    def _place_logits(self, trace: DecodeTrace, lowering: Lowering) -> None:
        logits = trace.logits
        assert logits is not None
        if not is_whole(logits) or logits.buffer in lowering.spaces:
            made = lowering.fresh(logits.meta.shape)
            lowering.emit(Code.COPY, made, logits)
            logits = made
        lowering.spaces[logits.buffer] = Space.LOGITS

    def _place_hidden(self, trace: DecodeTrace, lowering: Lowering) -> None:
        self.final_width = 0
        if trace.hidden is not None:
            final = lowering.fresh(trace.hidden.meta.shape)
            lowering.emit(Code.COPY, final, trace.hidden)
            lowering.spaces[final.buffer] = Space.FINAL
            self.final_width = trace.hidden.meta.shape[-1]

    def _check_states(self) -> None:
        """Rows of one sequence follow each other within a stage only: a state must be whole before
        a later row reads it."""
        first, last = dict[int, int](), dict[int, int]()
        for index, stage in enumerate(self._stages):
            for unit in stage:
                for buffer in reads_of(unit):
                    if buffer in self._offsets:
                        first.setdefault(self._offsets[buffer], index)
                for buffer in writes_of(unit):
                    if buffer in self._offsets:
                        last[self._offsets[buffer]] = index
        before = {self._offsets[buffer] for buffer in self._before}
        for offset in before & first.keys():
            if last.get(offset, 0) > first[offset]:
                raise NotDescribed("a recurrent state is read and written in different stages")

    def _places(self) -> tuple[dict[int, int], int, int]:
        """Offset of each buffer in a row's memory of its space, and the sizes of these memories:
        of what lasts until the next layer of experts, and of what lasts longer (`Space.KEPT`)."""
        lives: dict[int, list[int]] = {}
        segment = list(accumulate(isinstance(stage[0], ExpertsOf) for stage in self._stages))
        for index, stage in enumerate(self._stages):
            for unit in stage:
                for buffer in (*reads_of(unit), *writes_of(unit)):
                    if buffer not in self._lowering.spaces:
                        lives.setdefault(buffer, [index, index])[1] = index
        # Rows of a prompt go through a segment some at a time: until the last of them has read a
        # buffer, the first ones have written all others of the segment.
        kept = {
            buffer: (segment[first], segment[last])
            for buffer, (first, last) in lives.items()
            if segment[first] != segment[last]
        }
        self._lowering.spaces.update(dict.fromkeys(kept, Space.KEPT))
        others, kept_bytes = self._placed(kept)
        rows, row_bytes = self._placed({b: life for b, life in lives.items() if b not in kept})
        return rows | others, row_bytes, kept_bytes

    def _placed(self, lives: Mapping[int, Sequence[int]]) -> tuple[dict[int, int], int]:
        """Places for buffers, by the first and the last stage or segment of each, and the end of
        all."""
        bases, end, taken = dict[int, int](), 0, list[tuple[int, int, int]]()
        for buffer, (first, last) in sorted(lives.items(), key=lambda item: item[1][0]):
            taken = [place for place in taken if place[2] >= first]
            size = -(-self._pitches[buffer] // _ALIGNED) * _ALIGNED + _ALIGNED
            start = 0
            for low, high, _ in sorted(taken):
                if low - start >= size:
                    break
                start = max(start, high)
            taken.append((start, start + size, last))
            bases[buffer] = start
            end = max(end, start + size)
        return bases, end

    def _find_pitches(self) -> dict[int, int]:
        """Bytes of each buffer."""
        sizes, codes = dict[int, int](), dict[int, int]()
        for stage in self._stages:
            for unit in stage:
                for value in values_of(unit):
                    meta = value.meta
                    count = meta.untyped_storage().nbytes() // meta.dtype.itemsize
                    sizes[value.buffer] = count * element_of(meta.dtype).bytes
                if isinstance(unit, Instruction) and unit.code is Code.QUANTISE:
                    assert isinstance(unit.out, Value)
                    row = native.code_row_bytes(*unit.sizes)
                    codes[unit.out.buffer] = unit.count * row
        return sizes | codes

    # Records

    def _write(self) -> native.ProgramRecord:
        record_of: dict[type, Callable[[Any], Any]] = {
            Instruction: self._instruction,
            Product: self._product,
            AttentionOf: self._attention,
            Recurrent: self._recurrent,
            IndexerOf: self._indexer,
            Selection: self._selection,
        }
        records: dict[Kind, list[Any]] = {kind: [] for kind, _ in _STAGES.values()}
        stages, segments, work, tail = list[Any](), [0], 0, 0
        logits_at: list[int] = []  # stages that write them
        for stage in self._stages:
            own = type(stage[0])
            if own is ExpertsOf:
                segments.append(tail := len(stages))
                continue
            kind, _ = _STAGES[own]
            begin = len(records[kind])
            records[kind] += map(record_of[own], stage)
            ordered = kind == Kind.ROWS and any(map(self._touches_states, stage))
            stages.append(native.StageRecord(begin, len(records[kind]), kind, ordered))
            if not all(map(self._only_makes_logits, stage)):
                tail = len(stages)
            logits_at += [len(stages) - 1] * any(map(self._writes_logits, stage))
            work += sum(map(_multiplications, stage))
        self.logits_last = tail <= min(logits_at)
        ends = integers([*segments, len(stages)])
        arrays = {kind: native.array(record, records[kind]) for kind, record in _STAGES.values()}
        indexers = [unit for (unit, *_) in self._stages if isinstance(unit, IndexerOf)]
        self.rotations = [
            (unit.indexer.rotation.table, record.indexer.rotation)
            for unit, record in zip(indexers, arrays[Kind.INDEXER], strict=True)
            if unit.indexer.rotation is not None
        ]
        kept = [*arrays.values(), native.array(native.StageRecord, stages), ends]
        self._kept += kept
        sizes = self._row_bytes, self._kept_bytes, 4 * self.vocabulary, tail, work
        return native.ProgramRecord(*map(addressof, kept), len(self.experts), *sizes)

    def _writes_logits(self, unit: Unit) -> bool:
        return any(self._lowering.spaces.get(x) is Space.LOGITS for x in writes_of(unit))

    def _only_makes_logits(self, unit: Unit) -> bool:
        """Nothing but logits may depend on it, if that holds for all units behind it."""
        spaces = {self._lowering.spaces.get(buffer, Space.ROW) for buffer in writes_of(unit)}
        alone = isinstance(unit, Instruction | Product | Selection)
        return alone and spaces <= {Space.ROW, Space.KEPT, Space.LOGITS}

    def _touches_states(self, unit: Unit) -> bool:
        return any(buffer in self._offsets for buffer in (*reads_of(unit), *writes_of(unit)))

    def _instruction(self, unit: Instruction) -> native.InstructionRecord:
        sizes, strides = collapsed(unit)
        for x, own in zip((unit.out, *unit.inputs), strides, strict=True):
            reach = sum((n - 1) * stride for n, stride in zip(sizes, own, strict=True))
            assert unit.code in _UNEVEN or reach < room_of(x), (unit, reach)
        dims = len(sizes)
        fill = [0] * (native.DIMS - dims)
        operands = [
            native.OperandRecord(self._place(x), (native.SIZE * native.DIMS)(*own, *fill))
            for x, own in zip((unit.out, *unit.inputs), strides, strict=True)
        ]
        operands += [native.OperandRecord()] * (4 - len(operands))
        return native.InstructionRecord(
            *operands, (native.SIZE * native.DIMS)(*sizes, *fill), unit.count, unit.every,
            unit.number, unit.code, dims,
        )  # fmt: skip

    def _place(self, x: Operand) -> native.PlaceRecord:
        if isinstance(x, Tensor):
            return self._constant(x)
        element = element_of(x.meta.dtype)
        offset = x.meta.storage_offset() * element.bytes
        space = self._lowering.spaces.get(x.buffer, Space.ROW)
        if space in _STATES:
            return native.PlaceRecord(0, 0, offset + self._offsets[x.buffer], space, element)
        count = x.meta.untyped_storage().nbytes() // x.meta.dtype.itemsize
        if space in (Space.ROW, Space.KEPT):
            pitch = self._pitches[x.buffer]
            return native.PlaceRecord(self._bases[x.buffer], pitch, offset, space, element)
        return native.PlaceRecord(0, count * element.bytes, offset, space, element)

    def _place_or_none(self, x: Value | None) -> native.PlaceRecord:
        if x is None:
            return native.PlaceRecord(0, 0, 0, Space.CONSTANT, Element.FLOAT)
        return self._place(x)

    def _constant(self, x: Tensor) -> native.PlaceRecord:
        """A constant by its address; strides stay valid, as only its elements change their type."""
        element = element_of(x.dtype)
        dtype = {Element.FLOAT: torch.float32, Element.INTEGER: torch.int64}.get(element)
        if dtype is not None and x.dtype != dtype:
            raise AssertionError("constants are converted before")
        self._kept.append(x)
        return native.PlaceRecord(x.data_ptr(), 0, 0, Space.CONSTANT, element)

    def _product(self, unit: Product) -> native.ProjectedRecord:
        group = 0
        if isinstance(unit.projection.weight, PlaneMatrix):
            group = unit.projection.weight.layout.format.row_group
        assert unit.out.meta.numel() == unit.multiple * unit.projection.rows, unit
        record = native.ProjectedRecord(self._records.matrix(unit.projection))
        setattr(record, "from", self._place(unit.rows))
        if unit.codes is not None:
            record.codes = self._place(unit.codes)
        record.out, record.multiple, record.group = self._place(unit.out), unit.multiple, group
        return record

    def _selection(self, unit: Selection) -> native.SelectedRecord:
        self._kept.append(unit.matrices)
        _, rows, columns = unit.matrices.shape
        record = native.SelectedRecord(
            unit.matrices.data_ptr(), multiple=unit.rows.meta.shape[0], rows=rows, columns=columns
        )
        setattr(record, "from", self._place(unit.rows))
        record.ids, record.out = self._place(unit.ids), self._place(unit.out)
        return record

    def _attention(self, unit: AttentionOf) -> native.AttendedRecord:
        layer, attends = DecoderLayerRecord(), unit.attends
        layer.attention = self._records.given_attention(
            self._cache(attends.layer), unit.query.meta.shape, unit.key.meta.shape,
            unit.value.meta.shape, attends.view, attends.latents, unit.attends_together,
        )  # fmt: skip
        self._shape_of_attention(unit)
        places = (self._place(x) for x in (unit.query, unit.key, unit.value, unit.out))
        extras = unit.chosen, unit.sinks, unit.bias, unit.entry
        others = (self._place_or_none(x) for x in extras)
        most = 0 if unit.chosen is None else unit.chosen.meta.numel()
        reach = 0 if unit.bias is None else unit.bias.meta.shape[1]
        cache, rate = (0, 0) if attends.entries is None else attends.entries
        entries = self._cache(cache) if rate else 0
        return native.AttendedRecord(
            layer, *places, *others, most, reach, attends.pool, entries, rate
        )

    def _shape_of_attention(self, unit: AttentionOf) -> None:
        (heads, key), (_, value) = unit.key.meta.shape, unit.value.meta.shape
        if unit.attends.latents is not None:
            key -= value
        self.shapes[unit.attends.layer] = Shape(heads, key, value), 1
        if unit.attends.entries is not None:
            cache, rate = unit.attends.entries
            self.shapes[cache] = Shape(1, key, 0), rate

    def _indexer(self, unit: IndexerOf) -> native.IndexedRecord:
        heads, indexer = unit.weights.meta.numel(), unit.indexer
        bias = None if indexer.bias is None else indexer.bias.float().contiguous()
        self._kept.append(bias)
        self.shapes[indexer.cache] = Shape(1, unit.key.meta.numel(), 0), indexer.rate
        record = native.IndexerRecord(
            self._cache(indexer.cache), heads, unit.query.meta.numel() // heads, indexer.top_k,
            indexer.rate, indexer.pool, unit.key.meta.numel(),
            None if bias is None else bias.data_ptr(), self._records.norm(indexer.norm),
            self._records.rotation(indexer.rotation),
        )  # fmt: skip
        places = map(self._place, (unit.query, unit.weights, unit.key, unit.out))
        return native.IndexedRecord(record, *places, unit.out.meta.numel())

    def _recurrent(self, unit: Recurrent) -> native.RecurredRecord:
        call = NativeCall.of(unit.recurrence)
        self._kept.append(call)
        rows = [self._place_or_none(x) for x in unit.rows]
        before = self._place_or_none(unit.before)
        return native.RecurredRecord(
            addressof(call.record), (native.PlaceRecord * 5)(*rows), before,
            self._place(unit.after), self._place(unit.out),
            native.RECURRENT_KINDS.index(type(call.record)), len(rows),
            self._follow_each_other(unit),
        )  # fmt: skip

    def _follow_each_other(self, unit: Recurrent) -> bool:
        """One call can take many tokens: each one's state is that of the one before, and what they
        make lies side by side."""
        states = [None if x is None else self._lowering.spaces.get(x.buffer) for x in
                  (unit.before, unit.after)]  # fmt: skip
        one = unit.recurrence.out[:2] == (1, 1)
        return states == [*_STATES] and one and is_whole(unit.out)

    def _cache(self, layer: LayerKey) -> int:
        if layer not in self.layers:
            self.layers.append(layer)
        return self.layers.index(layer)


def _with_intervals(units: Sequence[Unit], spaces: Mapping[int, Space]) -> list[Unit]:
    """The units, where instructions that only make entries run for tokens that add one."""
    wanted = dict[int, int]()  # of each buffer, by which of how many tokens it is read
    made: list[Unit] = []
    for unit in reversed(units):
        own, rates = 1, dict[int, int]()
        if isinstance(unit, Instruction) and not spaces.keys() & {*writes_of(unit)}:
            own = gcd(*(wanted.get(buffer, 1) for buffer in writes_of(unit)))
            unit = replace(unit, every=own)
        elif isinstance(unit, AttentionOf) and unit.entry and unit.attends.entries:
            rates[unit.entry.buffer] = unit.attends.entries[1]
        elif isinstance(unit, IndexerOf):
            rates[unit.key.buffer] = unit.indexer.rate
        for buffer in reads_of(unit):
            wanted[buffer] = gcd(wanted.get(buffer, 0), rates.get(buffer, own))
        made.append(unit)
    return made[::-1]


def _stages(units: Sequence[Unit], before: set[int]) -> list[list[Unit]]:
    """The units in stages: each unit behind those that it depends on, rows before products before
    attention before experts. What reads states comes as late as it can, so that it shares a stage
    with what writes them."""
    waits_for, followers = _dependences(units)
    stage_of, kinds = _first_stages(units, waits_for, followers)
    rows_stages = [index for index, kind in enumerate(kinds) if kind is Instruction]
    late = set[int]()
    for index, unit in enumerate(units):
        reads_states = not before.isdisjoint(reads_of(unit))
        if isinstance(unit, Instruction) and (reads_states or index in late):
            late.add(index)
            late.update(f for f in followers[index] if isinstance(units[f], Instruction))
    for index in sorted(late, reverse=True):
        latest = min(
            (_latest(units[f], stage_of[f], rows_stages) for f in followers[index]), default=0
        )
        stage_of[index] = max(stage_of[index], latest)
    stages: list[list[Unit]] = [[] for _ in kinds]
    for index, unit in enumerate(units):
        stages[stage_of[index]].append(unit)
    return [stage for stage in stages if stage]


def _latest(follower: Unit, stage: int, rows_stages: Sequence[int]) -> int:
    """The last stage of instructions that a follower in ``stage`` can come behind."""
    if isinstance(follower, Instruction):
        return stage
    return max(index for index in rows_stages if index < stage)


_STAGES: dict[type, tuple[Kind, type[Any]]] = {
    Instruction: (Kind.ROWS, native.InstructionRecord),
    Product: (Kind.PRODUCTS, native.ProjectedRecord),
    AttentionOf: (Kind.ATTENTION, native.AttendedRecord),
    Recurrent: (Kind.RECURRENCE, native.RecurredRecord),
    IndexerOf: (Kind.INDEXER, native.IndexedRecord),
    Selection: (Kind.SELECTION, native.SelectedRecord),
}
"""Units of a stage -> its kind, and what C++ reads of each; in the order of a `ProgramRecord`."""


def _multiplications(unit: Unit) -> int:
    """For a row, to choose the number of threads by."""
    if isinstance(unit, Product):
        return unit.projection.rows * unit.rows.meta.shape[-1]
    if isinstance(unit, Selection):
        return unit.rows.meta.shape[0] * unit.matrices[0].numel()
    return 0


def _first_stages(
    units: Sequence[Unit], waits_for: list[int], followers: Sequence[Sequence[int]]
) -> tuple[list[int], list[type]]:
    """The earliest stage of each unit, and the kind of each stage."""
    ready: dict[type | None, list[int]] = {
        kind: [] for kind in (Instruction, Product, ExpertsOf, None)
    }

    def free(index: int) -> None:
        kind = type(units[index])
        insort(ready[kind if kind in ready else None], index)

    def place(stage: Sequence[int]) -> None:
        for index in stage:
            stage_of[index] = len(kinds)
            for follower in followers[index]:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    free(follower)

    stage_of, kinds = [0] * len(units), list[type]()
    for index, count in enumerate(waits_for):
        if not count:
            free(index)
    while any(ready.values()):
        if rows := ready[Instruction]:
            kind: type = Instruction
            while rows:
                place([rows.pop(0)])
        elif products := ready[Product]:
            kind, first = Product, units[products[0]]
            stage = [index for index in products if units[index].multiple == first.multiple]  # type: ignore[union-attr]
            ready[Product] = [index for index in products if index not in stage]
            place(stage)
        else:
            others = ready[None] or ready[ExpertsOf]
            kind = type(units[others[0]])
            place([others.pop(0)])
        kinds.append(kind)
    return stage_of, kinds


def _dependences(units: Sequence[Unit]) -> tuple[list[int], list[list[int]]]:
    """Return how many others each unit waits for, and which ones wait for it. Units that write
    different parts of a buffer do not wait for each other."""
    before: list[set[int]] = [set() for _ in units]
    writers: dict[int, list[tuple[int, Tensor | None]]] = defaultdict(list)
    readers: dict[int, list[tuple[int, Tensor | None]]] = defaultdict(list)
    for index, unit in enumerate(units):
        for buffer, part in parts_read(unit):
            before[index].update(i for i, own in writers[buffer] if not disjoint(own, part))
            readers[buffer].append((index, part))
        for buffer, part in parts_written(unit):
            for own in (readers[buffer], writers[buffer]):
                before[index].update(i for i, x in own if not disjoint(x, part))
                own[:] = [x for x in own if x[0] == index or not _covers(part, x[1])]
            writers[buffer].append((index, part))
        before[index].discard(index)
    followers: list[list[int]] = [[] for _ in units]
    for index, own_units in enumerate(before):
        for other in own_units:
            followers[other].append(index)
    return [len(own) for own in before], followers


def _covers(part: Tensor | None, other: Tensor | None) -> bool:
    """Return whether a part of a buffer surely has all elements of another."""
    if part is None:
        return True
    return other is not None and (part.shape, part.stride(), part.storage_offset()) == (
        other.shape, other.stride(), other.storage_offset()
    )  # fmt: skip
