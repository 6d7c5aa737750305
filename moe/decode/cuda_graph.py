"""A decode step as CUDA graphs: the device's work is replayed, and Python stays out.

`GraphStep` makes a `Recording` for a number of rows when it is first needed. To record, it advances
the walk through the description (`moe.decode.reference.walk`) while torch captures its work: a
segment ends where the host has to act, which is where it runs experts, or with the step. Experts
that run inside the graph need no stop, so the step is a single segment. What changes from step to
step lies in `GraphInputs`, tensors that never move; rows of padding fill a recording up to its
size.
Legend: B rows of a recording, H hidden, V vocabulary, C caches (one a layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import linear_forward
from kernels.triton import attention
from moe.decode.reference import Halt, Walk, walk
from moe.decode.step import InsideExperts, RankGroup, RoutedExperts, finish_step
from moe.describe.description import (
    Attention,
    Description,
    LatentAttention,
    NotDescribed,
    Projection,
    RotaryTable,
    Rotation,
    View,
)
from moe.describe.parts import rotate
from moe.network.kv_cache import KVCache, Work
from routing import Routing
from routing.routing import UNUSED

_DOUBLING = 32
"""Rows up to which recordings are made for powers of two, and for multiples of it above."""
_TOKEN, _POSITION, _PLACES = 0, 1, 3  # columns of `GraphInputs`
_PADDING = -1


class Capture(Protocol):
    """Runs a function once while its work is recorded; see `CudaCapture`."""

    def __call__(self, function: Callable[[], _End]) -> tuple[Callable[[], object], _End]:
        """What replays the work, and what the function returned."""


@dataclass(frozen=True)
class _End:
    """Where a segment ends: at a halt that the host answers, or with the step."""

    halt: Halt | None
    answer: Tensor  # (B, H) that takes the rows of a halt; logits (B, V) of the step
    routings: Routing | None = None  # of all layers, concatenated, if experts are inside


class CudaCapture:
    """Records CUDA graphs that share a memory pool, and are always replayed in this order."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], _End]) -> tuple[Callable[[], object], _End]:
        graph = torch.cuda.CUDAGraph()
        # The outer one restores the caller's stream also where capturing fails.
        with torch.cuda.stream(self._stream):
            how = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, self._pool, **how):  # type: ignore[arg-type]
                end = function()
        return graph.replay, end


class GraphStep:
    """Runs a described model on a device; see `moe.decode.step.DecodeStep`.

    Args:
        description: its tensors are on the device (`moe.decode.recorded`).
        dtype: of the backbone, and of keys and values.
        routed: runs experts without the host, inside a graph.
        capture: makes the recorder of a recording.

    Raises:
        NotDescribed: when called, if recording fails; the sequences are as they were.
    """

    keeps_hidden = False

    def __init__(
        self,
        description: Description,
        device: torch.device,
        dtype: torch.dtype,
        routed: RoutedExperts,
        capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._description, self._device, self._dtype = description, device, dtype
        self._routed, self._capture = routed, capture
        self._tables = rotary_tables(description)
        self._caches = 1 + max(layer.attention.layer for layer in description.layers)
        self._idle: dict[tuple[int, bool], list[Recording]] = {}

    def takes(self, work: Sequence[Work]) -> bool:
        return True

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Logits; ``routed`` runs the experts between segments."""
        return self._run(work, routed)[0]

    def inside(self, work: Sequence[Work], experts: InsideExperts) -> list[Tensor]:
        logits, routings = self._run(work, None)
        for layer, routing in enumerate(routings):
            experts.count(layer, routing)
        return logits

    def in_lockstep(
        self, work: Sequence[Work], routed: RoutedExperts, group: RankGroup
    ) -> list[Tensor]:
        """As a call per MoE layer: graphs do not exchange rows with other ranks."""
        return self(work, routed)

    @torch.inference_mode()
    def _run(
        self, work: Sequence[Work], routed: RoutedExperts | None
    ) -> tuple[list[Tensor], list[Routing]]:
        count = sum(len(item.token_ids) for item in work)
        rows = rows_for(count)
        # A step that sleeps at a layer keeps its recording; another one gets another.
        idle = self._idle.setdefault((rows, routed is None), [])
        recording = idle.pop() if idle else self._record(rows, inside=routed is None)
        try:
            recording.inputs.fill(work)
            logits, routings = recording.play(count, routed)
        finally:
            idle.append(recording)
        return finish_step(work, logits), routings

    def _record(self, rows: int, inside: bool) -> Recording:
        routed = self._routed if inside else None
        try:
            inputs = GraphInputs(rows, self._caches, self._tables, self._device)
            return Recording(self._start, inputs, self._dtype, routed, self._capture())
        except Exception as error:
            # Memory, a driver's limits, an operation that cannot be recorded: none can be foreseen.
            raise NotDescribed(
                f"recording {rows} rows raised {type(error).__name__}: {error}"
            ) from error

    def _start(self, inputs: GraphInputs) -> Walk:
        return walk(self._description, inputs.tokens, DeviceOperations(inputs, self._dtype))


def rows_for(count: int) -> int:
    """Rows of the recording that takes ``count`` of them."""
    if count <= _DOUBLING:
        return 1 << (count - 1).bit_length()
    return -(-count // _DOUBLING) * _DOUBLING


class Recording:
    """A step of this many rows, recorded once and replayed with other inputs.

    Args:
        start: begins the walk.
        inputs: what the walk reads.
        dtype: of the rows that experts read.
        routed: runs experts inside the recording; None leaves them to the host.
        capture: records segments.
    """

    def __init__(
        self,
        start: Callable[[GraphInputs], Walk],
        inputs: GraphInputs,
        dtype: torch.dtype,
        routed: RoutedExperts | None,
        capture: Capture,
    ) -> None:
        self.inputs = inputs
        self._dtype, self._routed = dtype, routed
        self._record(start, lambda function: (function, function()))  # compiles, measures
        self._record(start, capture)

    def _record(self, start: Callable[[GraphInputs], Walk], capture: Capture) -> None:
        advance = partial(self._advance, start(self.inputs), list[Routing]())
        self._segments = [capture(partial(advance, None))]
        while (end := self._segments[-1][1]).halt is not None:
            self._segments.append(capture(partial(advance, end.answer)))

    def _advance(self, steps: Walk, routings: list[Routing], answer: Tensor | None) -> _End:
        """Walk to the next halt that is left to the host, or to the end."""
        try:
            while True:
                halt = steps.send(answer)  # type: ignore[arg-type]  # None begins
                halt = replace(halt, rows=halt.rows.to(self._dtype))
                if self._routed is None:
                    return _End(halt, torch.zeros_like(halt.rows))
                routing = _without(halt.routing, self.inputs.padding)
                routings.append(routing)
                answer = self._routed(halt.layer, halt.rows, routing)
        except StopIteration as end:
            return _End(None, end.value, Routing.concat(routings) if routings else None)

    def play(self, count: int, routed: RoutedExperts | None) -> tuple[Tensor, list[Routing]]:
        """Logits ``(count, V)``, and the routing of each layer whose experts ran inside."""
        for replay, end in self._segments:
            replay()
            if end.halt is not None:
                assert routed is not None
                own = end.halt.routing
                # A copy: statistics keep it longer than the step.
                routing = Routing(own.expert_ids[:count].clone(), own.weights[:count].clone())
                end.answer[:count] = routed(end.halt.layer, end.halt.rows[:count], routing)
        logits = end.answer[:count].clone()
        if end.routings is None:
            return logits, []
        ids, weights = end.routings.expert_ids.clone(), end.routings.weights.clone()
        layers = zip(ids.split(self._rows), weights.split(self._rows), strict=True)
        return logits, [Routing(i[:count], w[:count]) for i, w in layers]

    @property
    def _rows(self) -> int:
        return self.inputs.tokens.shape[0]


def _without(routing: Routing, rows: Tensor) -> Routing:
    """The routing with no experts for these rows, ``(B,)`` bool."""
    ids = routing.expert_ids.masked_fill(rows[:, None], UNUSED)
    return Routing(ids, routing.weights.masked_fill(rows[:, None], 0.0))


class GraphInputs:
    """Tokens, places and angles of at most ``rows`` rows; the others are padding.

    Attributes:
        tokens: ``(B,)`` int64, 0 in padding.
        places: ``(B, 2 + 2 C)`` int64, as `kernels.triton.attention` reads it; padding has the
            position -1.
        angles: of each rotary table ``(B, size / 2)`` cosines and sines.
    """

    def __init__(
        self, rows: int, caches: int, tables: Sequence[RotaryTable], device: torch.device
    ) -> None:
        self._caches, self._tables = caches, list(tables)
        sizes = [table.cos.shape[1] for table in tables for _ in range(2)]
        self._numbers = torch.zeros(rows, _PLACES + 2 * caches, dtype=torch.int64, device=device)
        self._floats = torch.zeros(rows, sum(sizes), device=device)
        self.tokens = self._numbers[:, _TOKEN]
        self.places = self._numbers[:, _POSITION:]
        parts = iter(self._floats.split(sizes, 1))
        self.angles = dict(zip(self._tables, zip(parts, parts, strict=True), strict=True))
        self.fill([])

    @property
    def padding(self) -> Tensor:
        """``(B,)`` bool."""
        return self.places[:, 0] < 0

    def fill(self, work: Sequence[Work]) -> None:
        """Put new tokens and where their sequences are in place, without waiting for the device."""
        numbers = np.zeros(tuple(self._numbers.shape), np.int64)
        numbers[:, _POSITION] = _PADDING
        begin = 0
        for item in work:
            cache, count = item.cache, len(item.token_ids)
            assert isinstance(cache, KVCache)
            cache.reserve(cache.length + count)
            own = numbers[begin : begin + count]
            own[:, _TOKEN] = item.token_ids
            own[:, _POSITION] = np.arange(cache.length, cache.length + count)
            own[:, _POSITION + 1] = cache.room
            own[:, _PLACES:] = cache.addresses(range(self._caches)).reshape(-1)
            begin += count
        _send(self._numbers, torch.from_numpy(numbers))
        self._turn(torch.from_numpy(numbers[:begin, _POSITION]))

    def _turn(self, positions: Tensor) -> None:
        if not len(positions) or not self._tables:
            return
        floats = torch.zeros(tuple(self._floats.shape))
        begin = 0
        for table in self._tables:
            table.reserve(int(positions.max()) + 1)
            for values in (table.cos, table.sin):
                end = begin + values.shape[1]
                floats[: len(positions), begin:end] = values[positions]
                begin = end
        _send(self._floats, floats)


def _send(to: Tensor, values: Tensor) -> None:
    # torch keeps a pinned block from being used again until the device has read it.
    to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)


@dataclass(frozen=True)
class DeviceOperations:
    """Torch's operations and attention in Triton; see `moe.decode.reference.Means`.

    Nothing here reads from the device or depends on values, so that all of it can be recorded.
    Rows are float32; they are rounded to the dtype of what they meet: a weight, or a cache.

    Attributes:
        inputs: of the rows at hand.
        dtype: of the backbone, and of keys and values.
    """

    inputs: GraphInputs
    dtype: torch.dtype

    def project(self, projection: Projection, rows: Tensor) -> Tensor:
        weight = projection.weight
        if isinstance(weight, Tensor):
            output = linear(rows.to(weight.dtype), weight)
        else:
            output = linear_forward(rows.to(self.dtype), weight)
        output = output.float()
        return output if projection.bias is None else output + projection.bias

    def turn(self, rotation: Rotation, heads: Tensor) -> Tensor:
        return rotate(rotation, heads, *self.inputs.angles[rotation.table])

    def attend(self, a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._store(a.layer, k, v)
        return attention.attend(
            self._given(q), self.inputs.places, a.layer, **_how(a.view),
            kv_heads=a.kv_heads, value_size=a.value_dim,
        )  # fmt: skip

    def attend_latent(
        self, a: LatentAttention, inward: Tensor, turned: Tensor, latent: Tensor, key: Tensor
    ) -> Tensor:
        self._store(a.layer, latent[:, None], key[:, None])
        second = self._given(turned)
        return attention.attend(
            self._given(inward), self.inputs.places, a.layer, **_how(a.view), second=second
        )

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        attention.store(self._given(keys), self._given(values), self.inputs.places, layer)

    def _given(self, states: Tensor) -> Tensor:
        return states.to(self.dtype).contiguous()


def rotary_tables(description: Description) -> list[RotaryTable]:
    """Each table that a layer turns by, once."""
    turns = [layer.attention.rotation for layer in description.layers]
    return list(dict.fromkeys(turn.table for turn in turns if turn is not None))


def _how(view: View) -> dict[str, Any]:
    if view.chunk is not None:
        raise NotDescribed("attention within chunks has no kernel on a GPU")
    return {name: getattr(view, name) for name in ("scale", "window", "softcap", "sinks")}
