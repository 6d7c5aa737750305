"""Ways of running that `benchmarks.expert_parallel` compares, launched in turns within a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.offload_models import Target
from benchmarks.rank_launch import LaunchError, measure
from moe.machine import usable_cpus

LIMIT = 0.25
"""Share of all experts in a rank's memory where that is limited."""
LIMITED_STEPS = 6
"""Decode steps where experts come from disk."""


@dataclass
class Point:
    """One way of running, and what its launches found.

    Attributes:
        settings: of the profile, beside the number of ranks.
        job: of `rank_launch`.
        launches: at most.
    """

    name: str
    ranks: int
    settings: dict[str, Any]
    job: dict[str, Any]
    launches: int = 1
    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def launch(self, target: Target) -> None:
        try:
            self.runs.append(measure(target.store, self.ranks, self.settings, self.job))
        except LaunchError as error:
            self.error = str(error)
            print(f"{self.name}: {error}")

    def figures(self, layers: int, alone: Sequence[Any]) -> dict[str, Any]:
        """Median speed, what was sent for a token, and how far answers are from those of one rank.

        Args:
            alone: first token and its log probability of each prompt, from one rank.
        """
        if not self.runs:
            return {"name": self.name, "ranks": self.ranks, "error": self.error}
        rates = [run["tokens_per_s"] for run in self.runs]
        found = {"name": self.name, "ranks": self.ranks, "tokens_per_s": median(rates)}
        found["runs_tokens_per_s"] = rates
        pairs = list(zip(self.runs[-1]["answers"], alone, strict=False))
        if pairs:
            found["tokens_alike"] = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
            found["logprob_error"] = max(abs(a[1] - b[1]) for a, b in pairs)
        return found | self._sent(layers)

    def _sent(self, layers: int) -> dict[str, float]:
        ranks = self.runs[-1]["ranks"]
        if not ranks:
            return {}
        tokens = sum(rank["tokens"] for rank in ranks) / layers
        keys = ("bytes_out", "bytes_back", "lower_bound_bytes", "meta_bytes")
        found = {f"{key}_a_token": sum(rank[key] for rank in ranks) / tokens for key in keys}
        served = [rank["served"] for rank in ranks]
        found["imbalance"] = max(served) * len(served) / sum(served)
        found["exchange_seconds"] = max(rank["seconds"] for rank in ranks)
        return found


def points(
    target: Target,
    counts: Sequence[int],
    job: dict[str, Any],
    settings: dict[str, Any],
    *,
    quick: bool,
) -> list[Point]:
    """All ways of running, those first that matter most.

    Args:
        settings: of one more way of several ranks; empty: there is none.
    """
    longest = job["prompt"] * job["batch"]
    free, limited = target.settings(1, longest), target.settings(LIMIT, longest)
    few = job | {"steps": min(job["steps"], LIMITED_STEPS), "rounds": 1}
    first, more, last = [], [], []
    for ranks in counts:
        threads = {"threads": usable_cpus() if ranks == 1 else 1}
        name, both = (f"{ranks} ranks" if ranks > 1 else "1 rank"), threads | free
        launches = 1 if quick else 2
        first.append(Point(name, ranks, both, job, launches))
        if ranks > 1 and settings:
            first.append(Point(f"{name}, as set", ranks, both | settings, job, launches))
        if ranks > 1:
            summed = both | {"parallel.combine": "summed"}
            more.append(Point(f"{name}, summed", ranks, summed, job))
            int8 = both | {"parallel.payload": "int8", "lossless": False}
            more.append(Point(f"{name}, int8", ranks, int8, job))
        last.append(Point(f"{name}, 25 % of experts each", ranks, threads | limited, few))
    return first if quick else first + more + last


def run(found: Sequence[Point], target: Target, seconds: float) -> None:
    """Launch every point once, then those that may be launched again, as far as the time goes."""
    began, longest = time.monotonic(), 0.0
    again = [point for point in reversed(found) if point.launches > 1]
    for point in (*found, *again):
        start = time.monotonic()
        if point.error or start - began + longest > seconds:
            if not point.runs:
                point.error = point.error or "no time was left"
            continue
        point.launch(target)
        longest = max(longest, time.monotonic() - start)
