"""A decode step as CUDA graphs: the device's work is replayed, and Python stays out.

`GraphStep` makes a `Recording` for a number of rows when it is first needed, in a `_Pool` of memory
that recordings share. To record, it advances the walk through the description
(`moe.decode.reference.walk`) while torch captures its work: a segment ends where the host has to
act, which is where it runs experts, or with the step. Meanwhile the shared expert of the layer, a
recording of its own, runs on another stream. Experts that run inside the graph need no stop, so the
step is a single segment. What changes from step to step lies in `GraphInputs`, tensors that never
move; rows of padding fill a recording up to its size.
Legend: B rows of a recording, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kernels.triton.attention import decode_splits
from moe.decode.device_operations import DeviceOperations, GraphInputs, SharedRows
from moe.decode.reference import Halt, Normed, Walk, walk
from moe.decode.step import InsideExperts, RankGroup, RoutedExperts, finish_step
from moe.describe.description import Description, NotDescribed
from moe.kv.device_blocks import DeviceBlocks
from moe.kv.layout import Shape
from moe.network.packed_pass import Work
from routing import Routing

_DOUBLING = 32
"""Rows up to which recordings are made for powers of two, and for multiples of it above."""


Made = TypeVar("Made")
Beside = Callable[[], Callable[[], object]]
"""Starts work beside what follows; what it returns ends it."""


class Capture(Protocol):
    """Runs a function once while its work is recorded; see `CudaCapture`."""

    def __call__(self, function: Callable[[], Made]) -> tuple[Callable[[], object], Made]:
        """Record the work; return a function that replays it, and the function's result."""

    def beside(self, function: Callable[[], object]) -> Beside:
        """Record the work on another stream; return what replays it."""


@dataclass(frozen=True)
class _End:
    """The end of a segment: at a halt that the host answers, or with the step."""

    halt: Halt | None
    answer: Tensor  # (B, H) that takes the rows of a halt; logits (B, V) of the step
    routings: Routing | None = None  # of all layers, concatenated, if experts are inside


class _Segment(NamedTuple):
    """A part of a step, up to its end; and what runs beside the host's answer to it."""

    replay: Callable[[], object]
    end: _End
    beside: Beside | None


class CudaCapture:
    """Records CUDA graphs that share a memory pool: what is replayed beside others ends before the
    next graph, so each may use what another one has left there."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream, self._side = _streams(torch.cuda.current_device())

    def __call__(self, function: Callable[[], Made]) -> tuple[Callable[[], object], Made]:
        graph = torch.cuda.CUDAGraph()
        # The outer one restores the caller's stream also where capturing fails.
        with torch.cuda.stream(self._stream):
            how = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, self._pool, **how):  # type: ignore[arg-type]
                end = function()
        return graph.replay, end

    def beside(self, function: Callable[[], object]) -> Beside:
        replay, _ = self(function)

        def start() -> Callable[[], object]:
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                replay()
            return lambda: current.wait_stream(self._side)

        return start


@cache
def _streams(_device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return streams of the current device, the same for all pools: cuBLAS keeps memory for each
    stream."""
    return torch.cuda.Stream(), torch.cuda.Stream()


class _Rehearsal:
    """Runs the work of a recording without one: kernels compile and are measured."""

    def __call__(self, function: Callable[[], Made]) -> tuple[Callable[[], object], Made]:
        return function, function()

    def beside(self, function: Callable[[], object]) -> Beside:
        function()
        return lambda: function


class GraphStep:
    """Runs a described model on a device; see `moe.decode.step.DecodeStep`.

    Args:
        description: its tensors are on the device (`moe.decode.recorded`).
        memory: of the blocks of all sequences; its dtype is that of the backbone.
        routed: runs experts without the host, inside a graph.
        capture: makes the recorder of a recording.

    Raises:
        NotDescribed: when called, if recording fails; the sequences are as they were.
    """

    keeps_hidden = False

    def __init__(
        self,
        description: Description,
        memory: DeviceBlocks,
        routed: RoutedExperts,
        capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._description, self._memory = description, memory
        self._routed, self._capture = routed, capture
        self._idle: list[_Pool] = []

    def takes(self, work: Sequence[Work]) -> bool:
        return True

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Logits; ``routed`` runs the experts between segments."""
        return self._run(work, "", None, routed)[0]

    def inside(self, work: Sequence[Work], experts: InsideExperts) -> list[Tensor]:
        logits, routing = self._run(work, "experts", self._routed)
        if routing is not None:
            experts.count(routing.expert_ids.clone())  # statistics keep it longer than the step
        return logits

    def inside_by(
        self, work: Sequence[Work], name: str, routed: RoutedExperts
    ) -> tuple[list[Tensor], list[Routing]]:
        logits, routing = self._run(work, name, routed)
        if routing is None:
            return logits, []
        layers = zip(routing.expert_ids.clone(), routing.weights.clone(), strict=True)
        return logits, [Routing(*layer) for layer in layers]

    def in_lockstep(
        self, work: Sequence[Work], routed: RoutedExperts, group: RankGroup
    ) -> list[Tensor]:
        """As a call per MoE layer: graphs do not exchange rows with other ranks."""
        return self(work, routed)

    @torch.inference_mode()
    def _run(
        self,
        work: Sequence[Work],
        name: str,
        inside: RoutedExperts | None,
        routed: RoutedExperts | None = None,
    ) -> tuple[list[Tensor], Routing | None]:
        """By the recording of a name, with experts inside or, if None, by the host's ``routed``;
        see `Recording.play`."""
        count = sum(len(item.token_ids) for item in work)
        rows = rows_for(count, halts=inside is None)
        pool = self._pool_with(rows, name, inside)
        recording = pool.recordings[rows, name]
        try:
            recording.inputs.fill(work)
            logits, routing = recording.play(count, routed)
        finally:
            self._idle.append(pool)
        if not all(item.lent for item in work):
            logits = logits.clone()
        return finish_step(work, logits), routing

    def _pool_with(self, rows: int, name: str, inside: RoutedExperts | None) -> _Pool:
        """A pool with this recording; it is idle no longer. A step that sleeps at a layer keeps its
        pool, and another one gets another. Where recording fails, the pool's memory is free again.
        """
        pool = self._idle.pop() if self._idle else None
        try:
            if pool is None or pool.most < rows:
                pool = None  # its memory is free before a larger one takes some
                pool = _Pool(rows, self._description, self._memory, self._capture)
            if (rows, name) not in pool.recordings:
                inputs = GraphInputs(rows, self._description, pool.shared)
                recording = Recording(self._start, inputs, inside, pool.capture)
                pool.recordings[rows, name] = recording
            return pool
        except Exception as error:
            # Memory, a driver's limits, an operation that cannot be recorded: none can be foreseen.
            raise NotDescribed(
                f"recording {rows} rows raised {type(error).__name__}: {error}"
            ) from error

    def _start(self, inputs: GraphInputs) -> Walk:
        return walk(self._description, inputs.tokens, DeviceOperations(inputs, self._memory))


class _Pool:
    """Recordings that never run at the same time, so that they share memory: the first one has the
    most rows, and what the others need fits where its work lies. A step of more rows begins a new
    pool in the place of this one.

    Attributes:
        most: rows of the first one.
        recordings: by rows and name.
    """

    def __init__(
        self,
        most: int,
        description: Description,
        memory: DeviceBlocks,
        capture: Callable[[], Capture],
    ) -> None:
        self.most, self.capture = most, capture()
        self.shared = SharedRows(most, description, memory)
        self.recordings: dict[tuple[int, str], Recording] = {}


def rows_for(count: int, *, halts: bool = False) -> int:
    """Rows of the recording that takes ``count`` of them.

    Args:
        halts: at layers; such recordings keep rows for each layer, so there are fewer of them.
    """
    if count <= _DOUBLING or halts:
        return 1 << (count - 1).bit_length()
    return -(-count // _DOUBLING) * _DOUBLING


def recordings_bytes(
    count: int,
    *,
    vocabulary: int,
    hidden: int,
    heads: int,
    shapes: Iterable[Shape],
    moe_layers: int,
    row_bytes: int,
    dtype: torch.dtype,
) -> int:
    """Bytes of a device that recordings take, beside a few of each block of keys and values.

    Args:
        count: most rows of a step.
        heads: of queries.
        shapes: of the layers' keys and values.
        row_bytes: what a row takes in a layer, with its experts.
        dtype: of the backbone.
    """
    logits = vocabulary * (4 + dtype.itemsize)  # those that are kept, and the head's product
    kept = 2 * moe_layers * hidden * dtype.itemsize  # of all recordings that halt at layers
    sums = 0  # of attention to split keys
    for own in set(shapes):
        width = max(own.key_size, own.value_size)
        splits = decode_splits(heads // own.heads, own.heads, width, dtype)
        sums = max(sums, 4 * heads * splits * (width + 2))
    return rows_for(count, halts=True) * (logits + kept + sums + row_bytes)


class Recording:
    """A step of this many rows, recorded once and replayed with other inputs.

    Args:
        start: begins the walk.
        inputs: what the walk reads.
        routed: runs experts inside the recording; None leaves them to the host.
        capture: records segments.
    """

    def __init__(
        self,
        start: Callable[[GraphInputs], Walk],
        inputs: GraphInputs,
        routed: RoutedExperts | None,
        capture: Capture,
    ) -> None:
        self.inputs = inputs
        self._routed = routed
        self._record(start, _Rehearsal())
        self._record(start, capture)

    def _record(self, start: Callable[[GraphInputs], Walk], capture: Capture) -> None:
        advance = partial(self._advance, start(self.inputs), list[Routing]())
        self._segments, answer = list[_Segment](), None
        while True:
            replay, end = capture(partial(advance, answer))
            halt, answer = end.halt, end.answer
            if halt is None:
                self._segments.append(_Segment(replay, end, None))
                return
            beside = None if halt.beside is None else capture.beside(halt.beside)
            # What the host does not read is kept no longer than the walk needs it.
            read = replace(halt, rows=Normed(*[halt.rows.rounded] * 2), beside=None)
            self._segments.append(_Segment(replay, replace(end, halt=read), beside))

    def _advance(self, steps: Walk, routings: list[Routing], answer: Tensor | None) -> _End:
        """Walk to the next halt that is left to the host, or to the end."""
        try:
            while True:
                halt = steps.send(answer)  # type: ignore[arg-type]  # None begins
                if self._routed is None:
                    return _End(halt, self.inputs.answers.zero_())
                routings.append(halt.routing)
                answer = self._routed(halt.layer, halt.rows.rounded, halt.routing)
        except StopIteration as end:
            return _End(None, end.value, Routing.concat(routings) if routings else None)

    def play(self, count: int, routed: RoutedExperts | None) -> tuple[Tensor, Routing | None]:
        """Logits ``(count, V)``, and the ``(layers, count, K)`` routing of the layers whose experts
        ran inside; None: none did. Both hold until the next play."""
        for replay, end, beside in self._segments:
            replay()
            if end.halt is not None:
                assert routed is not None
                own = end.halt.routing
                # A copy: statistics keep it longer than the step.
                routing = Routing(own.expert_ids[:count].clone(), own.weights[:count].clone())
                join = None if beside is None else beside()
                try:
                    rows = routed(end.halt.layer, end.halt.rows.rounded[:count], routing)
                finally:
                    if join is not None:
                        join()
                end.answer[:count] = rows
        logits = end.answer[:count]
        if end.routings is None:
            return logits, None
        rows = self.inputs.tokens.shape[0]
        ids, weights = (
            part.unflatten(0, (-1, rows))[:, :count]
            for part in (end.routings.expert_ids, end.routings.weights)
        )
        return logits, Routing(ids, weights)
