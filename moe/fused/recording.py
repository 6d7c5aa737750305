"""A step of so many rows, recorded in segments.

A walk is advanced while its work is captured: a segment ends where the host has to act, which is
where routed experts are needed, or with the step. Where the host has nothing to do there, experts
are run on the way and a step is a single segment. What changes from step to step lies in `Inputs`;
rows of padding fill a recording up to the number it was made for.
Legend: B rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moe.fused.base import Visitor
from moe.fused.inputs import Inputs
from moe.fused.walk import Halt, Walk
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
        inside: Visitor | None,
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

    def play(self, count: int, visit: Visitor | None) -> tuple[Tensor, list[Routing]]:
        """Logits ``(count, V)``, and of each layer what was visited inside."""
        for replay, end in self._segments:
            replay()
            if end.halt is not None:
                assert visit is not None
                own = end.halt.routing
                # Who counts them keeps them for longer than a step.
                routing = Routing(own.expert_ids[:count].clone(), own.weights[:count].clone())
                end.answer[:count] = visit(end.halt.layer, end.halt.rows[:count], routing)
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
