"""A step of so many rows, recorded in segments.

A walk is advanced while its work is captured: a segment ends where the host has to act, which is
where routed experts are needed, or with the step. Where the host has nothing to do there, experts
are run on the way and a step is a single segment. What changes from step to step lies in `Inputs`;
rows of padding fill a recording up to the number it was made for.
Legend: B rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import linear_forward
from kernels.triton import attention
from moe.decode.base import RoutedExperts, read_by
from moe.decode.compiled import Inputs
from moe.decode.reference import Halt, Walk, walk
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
from moe.network.kv_cache import Work
from routing import Routing
from routing.routing import UNUSED


class Capture(Protocol):
    """Runs a function once while its work is recorded; see `CudaCapture`."""

    def __call__(self, function: Callable[[], _End]) -> tuple[Callable[[], object], _End]:
        """What replays the work, and what the function returned."""


@dataclass(frozen=True)
class _End:
    """Where a segment ends: at a halt that the host answers, or with the step."""

    halt: Halt | None
    answer: Tensor  # (B, H) that takes the rows of a halt; logits (B, V) of the step
    visited: Routing | None = None  # of all layers one after the other, where experts are inside


class CudaCapture:
    """Records CUDA graphs, always replayed in this order, in memory of their own."""

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


class Recording:
    """A step of so many rows, recorded once and replayed with other inputs.

    Args:
        start: begins the walk.
        inputs: what the walk reads.
        dtype: of the rows that experts get.
        inside: runs experts within the recording; None leaves them to the host.
        capture: records segments.
    """

    def __init__(
        self,
        start: Callable[[Inputs], Walk],
        inputs: Inputs,
        dtype: torch.dtype,
        inside: RoutedExperts | None,
        capture: Capture,
    ) -> None:
        self.inputs = inputs
        self._dtype, self._inside = dtype, inside
        self._record(start, lambda function: (function, function()))  # compiles, measures
        self._record(start, capture)

    def _record(self, start: Callable[[Inputs], Walk], capture: Capture) -> None:
        advance = partial(self._advance, start(self.inputs), list[Routing]())
        self._segments = [capture(partial(advance, None))]
        while (end := self._segments[-1][1]).halt is not None:
            self._segments.append(capture(partial(advance, end.answer)))

    def _advance(self, steps: Walk, visited: list[Routing], answer: Tensor | None) -> _End:
        """Walk to the next halt that is left to the host, or to the end."""
        try:
            while True:
                halt = steps.send(answer)  # type: ignore[arg-type]  # None begins
                halt = replace(halt, rows=halt.rows.to(self._dtype))
                if self._inside is None:
                    return _End(halt, torch.zeros_like(halt.rows))
                routing = _without(halt.routing, self.inputs.padding)
                visited.append(routing)
                answer = self._inside(halt.layer, halt.rows, routing)
        except StopIteration as end:
            return _End(None, end.value, Routing.concat(visited) if visited else None)

    def play(self, count: int, routed: RoutedExperts | None) -> tuple[Tensor, list[Routing]]:
        """Logits ``(count, V)``, and of each layer what was visited inside."""
        for replay, end in self._segments:
            replay()
            if end.halt is not None:
                assert routed is not None
                own = end.halt.routing
                # Who counts them keeps them for longer than a step.
                routing = Routing(own.expert_ids[:count].clone(), own.weights[:count].clone())
                end.answer[:count] = routed(end.halt.layer, end.halt.rows[:count], routing)
        logits = end.answer[:count].clone()
        if end.visited is None:
            return logits, []
        ids, weights = end.visited.expert_ids.clone(), end.visited.weights.clone()
        layers = zip(ids.split(self._rows), weights.split(self._rows), strict=True)
        return logits, [Routing(i[:count], w[:count]) for i, w in layers]

    @property
    def _rows(self) -> int:
        return self.inputs.tokens.shape[0]


def _without(routing: Routing, rows: Tensor) -> Routing:
    """The same decision for all rows but these ``(B,)``, which visit nobody."""
    ids = routing.expert_ids.masked_fill(rows[:, None], UNUSED)
    return Routing(ids, routing.weights.masked_fill(rows[:, None], 0.0))


# ---- What a walk computes with on a device: torch's own operations, and attention in Triton.
#
# Nothing here reads from the device or depends on values, so that all of it can be recorded. Rows
# are float32; they are rounded to the dtype of what they meet: a weight, or a cache.


@dataclass(frozen=True)
class DeviceMeans:
    """See `moe.decode.reference.Means`.

    Attributes:
        inputs: of the rows at hand.
        dtype: of the trunk, and of keys and values.
    """

    inputs: Inputs
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
    return {name: getattr(view, name) for name in ("scale", "window", "softcap", "sinks")}


# ---- A decode step by description, recorded: what the device does is replayed and Python stays
# out.
#
# Recordings are made for certain numbers of rows, when they are first needed.

_DOUBLING = 32
"""Rows up to which recordings are made for powers of two, and for multiples of it above."""


class GraphStep:
    """Runs a described model on a device.

    Args:
        description: whose tensors are on the device (`moe.decode.recorded`).
        dtype: of the trunk, and of keys and values.
        inside: runs experts without the host: ``(layer, rows, routing) -> rows``.
        capture: makes the recorder of a recording.

    Raises:
        NotDescribed: when called, where recording fails; the sequences are as they were.
    """

    def __init__(
        self,
        description: Description,
        device: torch.device,
        dtype: torch.dtype,
        inside: RoutedExperts,
        capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._description, self._device, self._dtype = description, device, dtype
        self._inside, self._capture = inside, capture
        self._tables = rotary_tables(description)
        self._caches = 1 + max(layer.attention.layer for layer in description.layers)
        self._idle: dict[tuple[int, bool], list[Recording]] = {}

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Logits as of `Backbone.lanes`; ``routed`` runs the experts between segments."""
        return self._run(work, routed)[0]

    def alone(self, work: Sequence[Work]) -> tuple[list[Tensor], list[Routing]]:
        """Logits, and of each MoE layer what was visited: nobody is asked to run experts."""
        return self._run(work, None)

    @torch.inference_mode()
    def _run(
        self, work: Sequence[Work], routed: RoutedExperts | None
    ) -> tuple[list[Tensor], list[Routing]]:
        count = sum(len(item.token_ids) for item in work)
        rows = rows_for(count)
        # A step that sleeps at a layer keeps its recording; another one gets another.
        idle = self._idle.setdefault((rows, routed is None), [])
        recording = idle.pop() if idle else self._record(rows, alone=routed is None)
        try:
            recording.inputs.fill(work)
            logits, visited = recording.play(count, routed)
        finally:
            idle.append(recording)
        return read_by(work, logits), visited

    def _record(self, rows: int, alone: bool) -> Recording:
        inside = self._inside if alone else None
        try:
            inputs = Inputs(rows, self._caches, self._tables, self._device)
            return Recording(self._start, inputs, self._dtype, inside, self._capture())
        except Exception as error:
            # Memory, a driver's limits, an operation that cannot be recorded: none can be foreseen.
            raise NotDescribed(
                f"recording {rows} rows raised {type(error).__name__}: {error}"
            ) from error

    def _start(self, inputs: Inputs) -> Walk:
        return walk(self._description, inputs.tokens, DeviceMeans(inputs, self._dtype))


def rows_for(count: int) -> int:
    """Rows of the recording that takes ``count`` of them."""
    if count <= _DOUBLING:
        return 1 << (count - 1).bit_length()
    return -(-count // _DOUBLING) * _DOUBLING
