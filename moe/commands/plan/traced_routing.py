"""Estimate distinct experts and cache hits from the trace of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe.calibration.files import CALIBRATION_FOLDER, MANIFEST_FILE, load_trace
from moe.calibration.trace import Trace
from moe.commands.plan.decode_speed import DecodeSizes, Locality, UniformRouting
from moe.commands.plan.ranks import LAYERS, STEPS
from moe.memory.planning import PlannedModel
from moe.network.seam import experts_modules
from offload.policies import POLICIES
from offload.replay import Calls, calls_of, hit_ratio

REQUESTS = 100_000
"""Experts requested in one replay, which takes a second or two."""


@dataclass(frozen=True, eq=False)
class TracedRouting:
    """Counts on a trace; a batch of B sequences is B parts of the text, read together.

    Args:
        policy: eviction policy of the cache; a name in `offload.policies.POLICIES`.
    """

    trace: Trace
    policy: str

    @property
    def how(self) -> str:
        return f"a replay of what `moe calibrate` recorded, with the policy {self.policy}"

    def distinct(self, batch: int) -> float:
        return float(np.mean([len(units) for units in self._calls(batch)]))

    def hit_ratio(self, batch: int, slots: int) -> float:
        """Hit ratio on the second half of the trace; the first half fills the cache."""
        calls = self._calls(batch)
        layers, width = len(self.trace.num_experts), max(self.trace.num_experts)

        def hits(part: Calls) -> float:
            policy = POLICIES[self.policy](layers, width)
            return hit_ratio(part, slots, policy, width) * sum(map(len, part)) if part else 0.0

        early = calls[: len(calls) // 2 // layers * layers]
        asked = sum(map(len, calls)) - sum(map(len, early))
        return (hits(calls) - hits(early)) / asked

    def steps(self, batch: int) -> NDArray[np.int64]:
        """``(steps, layers, B, K)`` expert ids of sampled steps and layers; -1 for unused slots."""
        tokens = len(self._experts) // batch
        parts = self._experts[: tokens * batch].reshape(batch, tokens, *self._experts.shape[1:])
        steps = np.unique(np.linspace(0, tokens - 1, STEPS).astype(np.int64))
        layers = np.unique(np.linspace(0, parts.shape[2] - 1, LAYERS).astype(np.int64))
        return parts[:, steps][:, :, layers].transpose(1, 2, 0, 3)

    def _calls(self, batch: int) -> Calls:
        steps = max(REQUESTS // (batch * self._experts.shape[1] * self._experts.shape[2]), 2)
        tokens = len(self._experts) // batch
        kept = [
            self._experts[start : start + min(steps, tokens)]
            for start in range(0, tokens * batch, max(tokens, 1))
        ]
        return calls_of(np.concatenate(kept), max(self.trace.num_experts), batch)

    @cached_property
    def _experts(self) -> NDArray[np.int64]:
        """``(tokens, layers, K)``, -1 where a layer has fewer slots."""
        layers = [ids.long().numpy() for ids in self.trace.expert_ids]
        width = max(ids.shape[1] for ids in layers)
        padded = [
            np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1) for ids in layers
        ]
        return np.stack(padded, axis=1)


def known_routing(path: Path, planned: PlannedModel, sizes: DecodeSizes, policy: str) -> Locality:
    """The routing in a model's calibration, or uniform routing without one.

    Raises:
        CalibrationError: the calibration is damaged or another model's.
    """
    if sizes.rows > 1:
        return UniformRouting(sizes, "every expert taken as equally likely")
    folder = path / CALIBRATION_FOLDER
    if not (folder / MANIFEST_FILE).exists():  # a folder alone may be left of a run that failed
        return UniformRouting(sizes)
    counts = [module.num_experts for _, module in experts_modules(planned.network)]
    return TracedRouting(load_trace(folder, planned.config, counts), policy)
