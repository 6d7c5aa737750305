"""Counts of what the routers chose, by layer: the numbers behind balance, caching and prediction.

`record` only keeps a step's expert ids; they are counted many steps at a time, or on a query.
Counting never waits for the GPU: totals stay on the device of the routing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from routing.routing import Routing, counted

Phase = Literal["prefill", "decode"]
"""The phase of a token: it is read as a prompt, or to write a running sequence."""

LoadedFor = Literal["prefill", "decode", "both"]
"""Which phases' tokens visited an expert in one step of a layer."""

_MAX_STEPS, _MAX_IDS = 1 << 13, 1 << 20
"""Steps of layers, and expert ids in them, that may wait to be counted: all of a prompt's."""

_Waiting = tuple[int, dict[Phase, Tensor]]
"""The first layer of some that follow each other, and ids ``(L, T, K)`` of their tokens."""

PHASES: tuple[Phase, ...] = get_args(Phase)
LOADED_FOR: tuple[LoadedFor, ...] = get_args(LoadedFor)


def _joined(waiting: Sequence[_Waiting]) -> Iterator[_Waiting]:
    """The same steps, where those of layers that follow each other, with tokens of the same shape,
    are one: a pass that records layer by layer is counted at once."""
    run: list[_Waiting] = []
    for entry in waiting:
        if run and not _follows(entry, run[-1]):
            yield _one_of(run)
            run = []
        run.append(entry)
    if run:
        yield _one_of(run)


def _follows(entry: _Waiting, before: _Waiting) -> bool:
    first, shapes = before[0], {phase: ids.shape for phase, ids in before[1].items()}
    end = first + next(iter(shapes.values()))[0]
    own = {phase: ids.shape[1:] for phase, ids in entry[1].items()}
    return entry[0] == end and own == {phase: shape[1:] for phase, shape in shapes.items()}


def _one_of(run: Sequence[_Waiting]) -> _Waiting:
    if len(run) == 1:
        return run[0]
    phases = run[0][1]
    return run[0][0], {phase: torch.cat([ids[phase] for _, ids in run]) for phase in phases}


class RoutingStatistics:
    """Running totals of one model.

    A *step* of a layer is one run of its experts, for any number of sequences. The distinct experts
    of a step are what costs bytes (unique experts per forward). Legend: L layers that follow each
    other, S steps of each, T tokens, K slots of a token, E experts of the largest layer.
    """

    def __init__(self, experts_per_layer: list[int]) -> None:
        self.num_experts = experts_per_layer
        self._counting = Lock()  # queries may come from another thread than `record`
        self.reset()

    def reset(self) -> None:
        layers, experts = len(self.num_experts), max(self.num_experts, default=0)
        self._steps = np.zeros(layers, np.int64)
        self._tokens_by = {phase: np.zeros(layers, np.int64) for phase in PHASES}
        self._tokens_per_expert = torch.zeros(layers, experts, dtype=torch.int64)
        zeros = torch.zeros(layers, dtype=torch.int64)
        self._loads: dict[LoadedFor, Tensor] = dict.fromkeys(LOADED_FOR, zeros)
        # First layer and ids (L, T, K). `_count` takes them out one by one, so one that is recorded
        # meanwhile stays in.
        self._waiting: deque[_Waiting] = deque()
        self._waiting_steps = self._waiting_ids = 0

    def record(self, layer: int, routings: Mapping[Phase, Routing]) -> None:
        """Count one step of a layer: the tokens of each phase that took part in it."""
        self._keep(layer, {phase: each.expert_ids[None] for phase, each in routings.items()})

    def record_layers(self, first: int, phase: Phase, ids_LTK: Tensor) -> None:
        """Count one step of each of L layers, with tokens of one phase: int64 expert ids, -1 in
        unused slots."""
        self._keep(first, {phase: ids_LTK})

    def _keep(self, first: int, ids: dict[Phase, Tensor]) -> None:
        layers = 0
        for phase, ids_LTK in ids.items():
            layers, tokens, _ = ids_LTK.shape
            self._tokens_by[phase][first : first + layers] += tokens
            self._waiting_ids += ids_LTK.numel()
        self._steps[first : first + layers] += 1
        self._waiting_steps += layers
        self._waiting.append((first, ids))
        if self._waiting_steps >= _MAX_STEPS or self._waiting_ids >= _MAX_IDS:
            self._count()

    def _count(self) -> None:
        """Add the waiting steps to the totals."""
        with self._counting:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._waiting_steps = self._waiting_ids = 0
            alike: dict[tuple[int, int], list[dict[Phase, Tensor]]] = {}
            for first, ids in _joined(waiting):
                end = first + len(next(iter(ids.values())))
                alike.setdefault((first, end), []).append(ids)
            for (first, end), steps in alike.items():
                self._add(slice(first, end), steps)

    def _add(self, layers: slice, steps: list[dict[Phase, Tensor]]) -> None:
        """Add steps of the same layers to the totals."""
        present = [phase for phase in PHASES if any(phase in step for step in steps)]
        counts = {phase: self._count_phase(steps, phase) for phase in present}
        touched = {phase: count > 0 for phase, count in counts.items()}
        if len(present) > 1:
            shared = torch.stack(list(touched.values())).sum(0) > 1
            self._add_loads(layers, "both", shared)
            touched = {phase: own & ~shared for phase, own in touched.items()}
        for phase, own in touched.items():
            self._add_loads(layers, phase, own)
            # Copies: a tensor made in inference mode may not change outside of it.
            total = self._tokens_per_expert.to(own.device, copy=True)
            total[layers] += counts[phase].sum(1)
            self._tokens_per_expert = total

    def _count_phase(self, steps: list[dict[Phase, Tensor]], phase: Phase) -> Tensor:
        """``(L, S, E)`` int64: tokens of a phase that visited each expert in each step."""
        places = self._tokens_per_expert.shape[1] + 1  # of a step; the first: unused slots
        ids = torch.cat([step[phase].flatten(1) for step in steps if phase in step], 1)
        sizes = torch.tensor([step[phase][0].numel() if phase in step else 0 for step in steps])
        begin = torch.arange(len(steps)).repeat_interleave(sizes) * places + 1
        if ids.is_cuda:  # the host does not wait for a copy of pinned memory
            begin = begin.pin_memory()
        layer = torch.arange(len(ids), device=ids.device)[:, None] * (len(steps) * places)
        slots = ids + begin.to(ids.device, non_blocking=True) + layer
        counts = counted(slots.flatten(), len(ids) * len(steps) * places)
        return counts.view(len(ids), len(steps), places)[..., 1:]

    def _add_loads(self, layers: slice, phases: LoadedFor, touched_LSE: Tensor) -> None:
        total = self._loads[phases].to(touched_LSE.device, copy=True)
        total[layers] += touched_LSE.sum((1, 2))
        self._loads[phases] = total

    @property
    def steps(self) -> list[int]:
        """Steps of each layer."""
        return self._steps.tolist()

    @property
    def tokens(self) -> list[int]:
        """Tokens of each layer, all phases together."""
        return np.sum(list(self._tokens_by.values()), axis=0).tolist()

    def tokens_by(self, layer: int) -> dict[Phase, int]:
        """Tokens of the layer by phase; they add up to ``tokens``."""
        return {phase: int(tokens[layer]) for phase, tokens in self._tokens_by.items()}

    def tokens_per_expert(self, layer: int) -> Tensor:
        """``(E,)`` int64 on the CPU: tokens that visited each expert of the layer so far."""
        self._count()
        return self._tokens_per_expert[layer, : self.num_experts[layer]].cpu().clone()

    def tokens_of_all(self) -> Tensor:
        """``(L, E)`` int64 on the CPU: `tokens_per_expert` of all layers, 0 behind a smaller E."""
        self._count()
        return self._tokens_per_expert.cpu()

    def expert_loads_by(self, layer: int) -> dict[LoadedFor, int]:
        """`expert_loads` by the phases that needed them; an expert counts once a step."""
        self._count()
        return {phases: int(loads[layer]) for phases, loads in self._loads.items()}

    def expert_loads(self, layer: int) -> int:
        """Distinct experts summed over the layer's steps: how often an expert had to be read."""
        return sum(self.expert_loads_by(layer).values())

    def max_violation(self, layer: int) -> float:
        """MaxVio of arXiv 2408.15664: heaviest expert's load over the mean load, minus 1."""
        counts = self.tokens_per_expert(layer).double()
        return float(counts.max() / counts.mean() - 1) if bool(counts.sum()) else 0.0

    def snapshot(self) -> list[dict[str, Any]]:
        """A dictionary for each layer, ready for JSON."""
        steps, tokens = self.steps, self.tokens
        return [
            {
                "layer": layer,
                "num_experts": self.num_experts[layer],
                "steps": steps[layer],
                "tokens": tokens[layer],
                "tokens_by": self.tokens_by(layer),
                "tokens_per_expert": self.tokens_per_expert(layer).tolist(),
                "expert_loads": self.expert_loads(layer),
                "expert_loads_by": self.expert_loads_by(layer),
                "distinct_experts_per_step": self.expert_loads(layer) / max(steps[layer], 1),
                "max_violation": self.max_violation(layer),
            }
            for layer in range(len(self.num_experts))
        ]
