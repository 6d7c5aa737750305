"""The decode step of a traced model: a program that C++ runs from one layer of experts to the next.

It serves models that no description covers: hybrids, recurrent layers, gates between the heads and
the output, parallel blocks. See `moe.decode.trace` for how the program is made. The same program
reads prompts: all their tokens are rows, and those of a sequence attend together.
Legend: B rows, each one new token; a sequence may have several, at successive positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import Array, addressof
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kernels.cpu import decode as native
from kernels.cpu.program import StatesRecord
from moe.decode.compiled import (
    PATIENCE,
    CachePlaces,
    CompiledStep,
    PromptSpans,
    RotaryRecords,
    TokenEmbedding,
)
from moe.decode.program import Program, StateLayout
from moe.decode.records import CompiledPass
from moe.decode.step import CompiledExperts, RoutedExperts, split_logits
from moe.kv.blocks import BlockKVCache
from moe.kv.cache import KVCache
from moe.kv.layout import StateKey, States
from moe.network.packed_pass import Work, keep_hidden_rows

CHUNK_BYTES = 32 << 20
"""Most bytes of a prompt's rows on their way from one layer of experts to the next."""
_CHUNK_ROWS = (16, 512)  # at least, so that weights are not read for a few rows, and at most


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
        self.keeps_hidden = program.final_width > 0
        super().__init__(kernel, [unit.layer for unit in program.experts], program.top_k, inside)

    def prompts(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Logits of each piece of work, which are prompts or parts of them; a token's bits do not
        depend on how its prompt is cut. Calls ``routed`` at every MoE layer."""
        for item in work:
            assert isinstance(item.cache, BlockKVCache)
            for layer, (shape, rate) in self._program.shapes.items():
                item.cache.expect(layer, shape, rate)
        step = self._begin(work, PromptSpans(work, every=not self._program.logits_last))
        return self._finish(work, step, routed, step.go(self._stopping))

    def takes(self, work: Sequence[Work]) -> bool:
        """Whether all sequences have all states: a state may begin with its first entry only."""
        return all(self._has_states(item.cache.kv) for item in work)

    def _has_states(self, cache: KVCache) -> bool:
        states = cache.states
        if isinstance(states, FlatStates):
            return True
        return all(key in states for key in self._program.states.offsets)

    def _model(self, experts: Array[native.ExpertsRecord]) -> native.ModelRecord:
        return native.ModelRecord(
            None, addressof(self._program.record), addressof(experts), None, None,
            self._embedding.address, len(experts), self._top_k, PATIENCE,
        )  # fmt: skip

    def _begin(self, work: Sequence[Work], prompts: PromptSpans | None = None) -> CompiledPass:
        program, caches = self._program, self._program.layers
        places = CachePlaces(work, caches, prompts=prompts is not None)
        self._tables.reserve(places.end)
        rows, width = places.rows, self._embedding.width
        x_BH, (h_BH, routed_BH) = torch.empty(rows, width), torch.empty(2, rows, program.hidden)
        final_BH = torch.empty(rows, program.final_width)  # alone, as sequences may keep it
        self._embedding.fill(places, x_BH)
        states = RowStates(work, program.states, self._free, all_kept=prompts is None)
        chunk = rows if prompts is None else min(rows, self._chunk_rows(places.end))
        memory = torch.empty(chunk * program.record.row_bytes, dtype=torch.uint8)
        lasting = torch.empty(rows * program.record.kept_bytes, dtype=torch.uint8)
        own = states.record(places.tokens, memory, lasting, chunk)
        record = native.StepRecord(
            rows, width, len(caches), x_BH.data_ptr(), h_BH.data_ptr(), final_BH.data_ptr(),
            *places.pointers, addressof(own), *places.seen, *places.formats,
            torch.get_num_threads(), places.bounds, None,
            None if prompts is None else addressof(prompts.record),
        )  # fmt: skip
        kept = x_BH, places, memory, lasting, own, prompts
        logits = rows if prompts is None else len(prompts.wanted)
        sizes = (logits, program.vocabulary), self._moe_layers[-1], self._top_k
        made = _Made(states, final_BH)
        return CompiledPass(self._kernel, record, h_BH, routed_BH, *sizes, kept, made)

    def _chunk_rows(self, end: int) -> int:
        """Rows of a prompt of ``end`` tokens that go through a segment together."""
        least, most = _CHUNK_ROWS
        a_row = self._program.record.row_bytes + self._program.scratch_bytes(end)
        return max(least, min(most, CHUNK_BYTES // a_row))

    def _end(self, work: Sequence[Work], step: CompiledPass) -> list[Tensor]:
        sizes = [len(item.token_ids) for item in work]
        made = step.made
        assert isinstance(made, _Made)
        for item, size, after in zip(work, sizes, made.states.after_each, strict=True):
            item.cache.kv.advance(after, size, item.snapshots)
        if self.keeps_hidden:
            keep_hidden_rows(work, made.final_BH)
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


class _Made(NamedTuple):
    """The results of a step beside its logits."""

    states: RowStates
    final_BH: Tensor


class RowStates:
    """The states that each row of a step reads and writes: those of the row before it in its
    sequence, or of the sequence.

    Args:
        all_kept: the sequences keep the states after each row; else those of `Work.snapshots` and
            of the last row, and the rows between share memory by turns.

    Attributes:
        after_each: of each sequence, the states that it keeps by how many of its rows are read;
            none without recurrent layers.
    """

    def __init__(
        self, work: Sequence[Work], layout: StateLayout, free: FreeStates, *, all_kept: bool
    ) -> None:
        sizes = [len(item.token_ids) for item in work]
        self._starts = np.array([0, *accumulate(sizes)], np.int64)
        rows = int(self._starts[-1])
        self._before, self._after, self._to_kept = np.ones((3, rows), np.int64)
        self.after_each: list[dict[int, FlatStates]] = []
        self._alive: list[FlatStates] = []

        spare = rows if all_kept else len(work)  # of a prompt few rows have states of their own

        def made() -> FlatStates:
            return FlatStates(layout, free.take(), free, spare)

        for item, start, size in zip(work, self._starts, sizes, strict=False):
            ends = {*range(1, size + 1)} if all_kept else {*item.snapshots, size}
            kept = {end: made() for end in sorted(ends) if 0 < end <= size} if layout.size else {}
            self.after_each.append(kept)
            if not layout.size:
                continue
            own, end = _flat(item.cache.kv.states, layout, free, spare), start + size
            between = [made() for _ in range(2 if len(kept) < size else 0)]
            self._alive += [own, *between]
            places = [each.memory.data_ptr() for each in between]
            for turn, place in enumerate(places):
                self._after[start + turn : end : 2] = place
            ends_of = np.array([*kept], np.int64)
            self._after[start + ends_of - 1] = [each.memory.data_ptr() for each in kept.values()]
            self._before[start] = own.memory.data_ptr()
            self._before[start + 1 : end] = self._after[start : end - 1]
            at = np.arange(size)
            self._to_kept[start:end] = ends_of[np.searchsorted(ends_of, at, side="right")] - at

    def record(
        self, tokens: np.ndarray, memory: Tensor, kept_memory: Tensor, chunk: int
    ) -> StatesRecord:
        arrays = self._before, self._after, self._to_kept, tokens, self._starts
        addresses = [array.ctypes.data for array in arrays]
        places = memory.data_ptr(), kept_memory.data_ptr()
        return StatesRecord(*addresses, len(self._starts) - 1, *places, chunk)


def _flat(states: States, layout: StateLayout, free: FreeStates, rows: int) -> FlatStates:
    """A sequence's states; before its first token as they begin."""
    if isinstance(states, FlatStates) and states._layout is layout:
        return states
    made = FlatStates(layout, free.take(), free, rows)
    layout.begin(made.memory)
    for key in layout.offsets.keys() & states.keys():
        made[key].copy_(states[key])
    return made
