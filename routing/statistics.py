"""Counts of what the routers chose, by layer: the numbers behind balance, caching and prediction.

`record` only keeps a step's expert ids; they are counted many steps at a time, or on a query.
Counting never waits for the GPU: totals stay on the device of the routing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from routing.routing import Routing

Phase = Literal["prefill", "decode"]
"""Of a token: it belongs to a prompt, or it is the next token of a running sequence."""

LoadedFor = Literal["prefill", "decode", "both"]
"""Which phases' tokens visited an expert in one step of a layer."""

_MAX_STEPS, _MAX_SLOTS = 256, 1 << 14
"""Steps of a layer, and expert ids in them, that may wait to be counted."""

PHASES: tuple[Phase, ...] = get_args(Phase)
LOADED_FOR: tuple[LoadedFor, ...] = get_args(LoadedFor)


class RoutingStatistics:
    """Running totals of one model.

    A *step* of a layer is one run of its experts, for any number of sequences. The distinct experts
    of a step are what costs bytes (unique experts per forward).

    Attributes:
        steps: of each layer.
        tokens: of each layer, all phases together.
    """

    def __init__(self, experts_per_layer: list[int]) -> None:
        self.num_experts = experts_per_layer
        self._counting = Lock()  # queries may come from another thread than `record`
        self.reset()

    def reset(self) -> None:
        self.steps = [0] * len(self.num_experts)
        self.tokens = [0] * len(self.num_experts)
        self._tokens_by = [dict.fromkeys(PHASES, 0) for _ in self.num_experts]
        self._tokens_per_expert = [torch.zeros(e, dtype=torch.int64) for e in self.num_experts]
        zero = torch.zeros((), dtype=torch.int64)
        self._loads = [dict.fromkeys(LOADED_FOR, zero) for _ in self.num_experts]
        # `_count` takes steps out one by one, so a step recorded meanwhile stays in.
        self._waiting: list[deque[dict[Phase, Tensor]]] = [deque() for _ in self.num_experts]
        self._slots = [0] * len(self.num_experts)

    def record(self, layer: int, routings: Mapping[Phase, Routing]) -> None:
        """Count one step of a layer: the tokens of each phase that took part in it."""
        self.steps[layer] += 1
        for phase, routing in routings.items():
            tokens = routing.num_tokens
            self.tokens[layer] += tokens
            self._tokens_by[layer][phase] += tokens
            self._slots[layer] += tokens * routing.top_k
        self._waiting[layer].append({phase: r.expert_ids for phase, r in routings.items()})
        if len(self._waiting[layer]) >= _MAX_STEPS or self._slots[layer] >= _MAX_SLOTS:
            self._count(layer)

    def _count(self, layer: int) -> None:
        """Add the waiting steps to the totals."""
        with self._counting:
            waiting = self._waiting[layer]
            steps = [waiting.popleft() for _ in range(len(waiting))]
            self._slots[layer] = 0
            if not steps:
                return
            present = [phase for phase in PHASES if any(phase in step for step in steps)]
            counts = {phase: self._count_phase(layer, steps, phase) for phase in present}
            touched = {phase: count > 0 for phase, count in counts.items()}
            if len(present) > 1:
                shared = touched["prefill"] & touched["decode"]
                self._add_loads(layer, "both", shared)
                touched = {phase: own & ~shared for phase, own in touched.items()}
            for phase, own in touched.items():
                self._add_loads(layer, phase, own)
                total = self._tokens_per_expert[layer].to(own.device)
                self._tokens_per_expert[layer] = total + counts[phase].sum(0)

    def _count_phase(self, layer: int, steps: list[dict[Phase, Tensor]], phase: Phase) -> Tensor:
        """``(steps, E)`` int64: tokens of a phase that visited each expert in each step."""
        num_experts, device = self.num_experts[layer], next(iter(steps[0].values())).device
        ids = [step[phase].flatten() for step in steps if phase in step]
        sizes = torch.tensor([step[phase].numel() if phase in step else 0 for step in steps])
        places = torch.arange(len(steps)).repeat_interleave(sizes) * (num_experts + 1) + 1
        slots = torch.cat(ids) + places.to(device)
        counts = torch.bincount(slots, minlength=len(steps) * (num_experts + 1))
        return counts.view(len(steps), -1)[:, 1:]

    def _add_loads(self, layer: int, phases: LoadedFor, touched: Tensor) -> None:
        self._loads[layer][phases] = self._loads[layer][phases].to(touched.device) + touched.sum()

    def tokens_by(self, layer: int) -> dict[Phase, int]:
        """Tokens of the layer by phase; they add up to ``tokens``."""
        return dict(self._tokens_by[layer])

    def tokens_per_expert(self, layer: int) -> Tensor:
        """``(E,)`` int64 on the CPU: tokens that visited each expert of the layer so far."""
        self._count(layer)
        return self._tokens_per_expert[layer].cpu().clone()

    def expert_loads_by(self, layer: int) -> dict[LoadedFor, int]:
        """`expert_loads` by the phases that needed them; an expert counts once a step."""
        self._count(layer)
        return {phases: int(loads) for phases, loads in self._loads[layer].items()}

    def expert_loads(self, layer: int) -> int:
        """Distinct experts summed over the layer's steps: how often an expert had to be read."""
        return sum(self.expert_loads_by(layer).values())

    def max_violation(self, layer: int) -> float:
        """MaxVio of arXiv 2408.15664: heaviest expert's load over the mean load, minus 1."""
        counts = self.tokens_per_expert(layer).double()
        return float(counts.max() / counts.mean() - 1) if bool(counts.sum()) else 0.0

    def snapshot(self) -> list[dict[str, Any]]:
        """A dictionary for each layer, ready for JSON."""
        return [
            {
                "layer": layer,
                "num_experts": self.num_experts[layer],
                "steps": self.steps[layer],
                "tokens": self.tokens[layer],
                "tokens_by": self.tokens_by(layer),
                "tokens_per_expert": self.tokens_per_expert(layer).tolist(),
                "expert_loads": self.expert_loads(layer),
                "expert_loads_by": self.expert_loads_by(layer),
                "distinct_experts_per_step": self.expert_loads(layer) / max(self.steps[layer], 1),
                "max_violation": self.max_violation(layer),
            }
            for layer in range(len(self.num_experts))
        ]
