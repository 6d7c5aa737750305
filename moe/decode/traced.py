"""The decode step of a traced model: a program that C++ runs from one layer of experts to the next.

It serves models that no description covers: hybrids, recurrent layers, gates between the heads and
the output, parallel blocks. See `moe.decode.trace` for how the program is made.
Legend: B rows, each one new token; a sequence may have several, at successive positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import Array, addressof
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from kernels.cpu import decode as native
from kernels.cpu.program import StatesRecord
from moe.decode.compiled import (
    PATIENCE,
    CachePlaces,
    CompiledStep,
    RotaryRecords,
    TokenEmbedding,
)
from moe.decode.program import Program, StateLayout
from moe.decode.records import CompiledPass
from moe.decode.step import CompiledExperts, split_logits
from moe.kv.cache import KVCache, SequenceCache, StateKey, States
from moe.network.packed_pass import Work


class TracedStep(CompiledStep):
    """A traced model's step."""

    def __init__(
        self,
        program: Program,
        embedding: nn.Module,
        kernel: native.NativeDecode,
        inside: Sequence[CompiledExperts] = (),
    ) -> None:
        self._program, self._embedding = program, TokenEmbedding(embedding)
        self._free = FreeStates(program.states.size)
        self._tables = RotaryRecords(program.rotations)
        super().__init__(kernel, [unit.layer for unit in program.experts], program.top_k, inside)

    def takes(self, work: Sequence[Work]) -> bool:
        """Whether all sequences have all states: a state may begin with its first entry only."""
        return all(self._has_states(item.cache) for item in work)

    def _has_states(self, cache: SequenceCache) -> bool:
        assert isinstance(cache, KVCache)
        states = cache.states
        if isinstance(states, FlatStates):
            return True
        return all(key in states for key in self._program.states.offsets)

    def _model(self, experts: Array[native.ExpertsRecord]) -> native.ModelRecord:
        return native.ModelRecord(
            None, addressof(self._program.record), addressof(experts), None, None,
            self._embedding.address, len(experts), self._top_k, PATIENCE,
        )  # fmt: skip

    def _begin(self, work: Sequence[Work]) -> CompiledPass:
        program, places = self._program, CachePlaces(work, self._program.layers)
        self._tables.reserve(places.end)
        rows, width = places.rows, self._embedding.width
        x_BH, (h_BH, routed_BH) = torch.empty(rows, width), torch.empty(2, rows, program.hidden)
        self._embedding.fill(places, x_BH)
        states = RowStates(work, program.states, self._free)
        memory = torch.empty(rows * program.record.row_bytes, dtype=torch.uint8)
        own = states.record(places.tokens, memory)
        record = native.StepRecord(
            rows, width, len(program.layers), x_BH.data_ptr(), h_BH.data_ptr(), None,
            *places.pointers, addressof(own), *places.seen, *places.formats,
            torch.get_num_threads(), places.bounds,
        )  # fmt: skip
        kept = x_BH, places, states, memory, own
        sizes = (rows, program.vocabulary), self._moe_layers[-1], self._top_k
        return CompiledPass(self._kernel, record, h_BH, routed_BH, *sizes, kept, states)

    def _end(self, work: Sequence[Work], step: CompiledPass) -> list[Tensor]:
        sizes = [len(item.token_ids) for item in work]
        states = step.states
        assert isinstance(states, RowStates)
        for item, size, after in zip(work, sizes, states.after_each(sizes), strict=True):
            assert isinstance(item.cache, KVCache)
            item.cache.advance(after, size)
        return split_logits(work, step.logits_BV)


class FreeStates:
    """Memory of states that no sequence needs any more, so that a step touches no new pages."""

    def __init__(self, size: int) -> None:
        self._size, self._free = size, list[Tensor]()

    def take(self) -> Tensor:
        return self._free.pop() if self._free else torch.empty(self._size)

    def give(self, memory: Tensor, most: int) -> None:
        """Keep memory for later, unless there is enough for ``most`` rows."""
        if len(self._free) < most:
            self._free.append(memory)


class FlatStates(Mapping[StateKey, Tensor]):
    """The recurrent states of one sequence after one of its tokens, in one tensor."""

    def __init__(self, layout: StateLayout, memory: Tensor, free: FreeStates, rows: int) -> None:
        self._layout, self.memory, self._free, self._rows = layout, memory, free, rows

    def __getitem__(self, key: StateKey) -> Tensor:
        return self._layout.state(self.memory, key)

    def __iter__(self) -> Iterator[StateKey]:
        return iter(self._layout.offsets)

    def __len__(self) -> int:
        return len(self._layout.offsets)

    def __del__(self) -> None:
        self._free.give(self.memory, self._rows)


class RowStates:
    """The states that each row of a step reads and writes: those of the row before it in its
    sequence, or of the sequence."""

    def __init__(self, work: Sequence[Work], layout: StateLayout, free: FreeStates) -> None:
        sizes = [len(item.token_ids) for item in work]
        self._starts = np.array([0, *accumulate(sizes)], np.int64)
        rows = int(self._starts[-1])
        self._rows: list[FlatStates] = []
        self._before: list[FlatStates] = []
        if layout.size:
            for item, size in zip(work, sizes, strict=True):
                assert isinstance(item.cache, KVCache)
                own = _flat(item.cache.states, layout, free, rows)
                made = [FlatStates(layout, free.take(), free, rows) for _ in range(size)]
                self._before += [own, *made[:-1]]
                self._rows += made
        self._pointers = [
            np.array([states.memory.data_ptr() for states in each], np.int64)
            for each in (self._before, self._rows)
        ]

    def record(self, tokens: np.ndarray, memory: Tensor) -> StatesRecord:
        before, after = (array.ctypes.data for array in self._pointers)
        starts = self._starts
        addresses = before, after, tokens.ctypes.data, starts.ctypes.data
        return StatesRecord(*addresses, len(starts) - 1, memory.data_ptr())

    def after_each(self, sizes: Sequence[int]) -> Iterator[Mapping[int, States]]:
        """Yield each sequence's states by how many of its rows are read; none without recurrent
        layers."""
        for start, size in zip(self._starts, sizes, strict=False):
            yield dict(enumerate(self._rows[start : start + size], 1))


def _flat(states: States, layout: StateLayout, free: FreeStates, rows: int) -> FlatStates:
    if isinstance(states, FlatStates) and states._layout is layout:
        return states
    made = FlatStates(layout, free.take(), free, rows)
    for key in layout.offsets:
        made[key].copy_(states[key])
    return made
