"""From the times of single answers to the figures of a run. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.load_generator import Result

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Target:
    """What a user calls good: seconds to the first token, and between tokens."""

    ttft_s: float
    tbt_s: float


def ttft(result: Result) -> float:
    """Seconds from sending a request to the first token."""
    return result.token_times[0] - result.sent


def gaps(result: Result) -> list[float]:
    """Seconds between tokens that follow each other."""
    return np.diff(result.token_times).tolist()


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """``p50``, ``p90`` and ``p99``, interpolated between neighbours; None of nothing."""
    if not values:
        return {f"p{percent}": None for percent in PERCENTILES}
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def is_good(result: Result, target: Target) -> bool:
    """Return whether the answer is complete, began in time, and 99 % of its tokens came in time."""
    if result.error is not None or not result.token_times:
        return False
    between = gaps(result)
    steady = not between or float(np.percentile(between, 99)) <= target.tbt_s
    return ttft(result) <= target.ttft_s and steady


def summary(results: Sequence[Result], target: Target) -> dict[str, Any]:
    """The figures of one run. It lasts from the first request to the last answer; failed requests
    count as failures and nowhere else."""
    done = [result for result in results if result.error is None]
    seconds = max(r.ended for r in results) - min(r.sent for r in results)
    answered = [result for result in done if result.token_times]
    return {
        "requests": len(results),
        "failed": len(results) - len(done),
        "seconds": seconds,
        "prompt_tokens": sum(result.prompt_tokens for result in done),
        "new_tokens": sum(result.new_tokens for result in done),
        "requests_per_s": len(done) / seconds,
        "new_tokens_per_s": sum(result.new_tokens for result in done) / seconds,
        "all_tokens_per_s": sum(r.prompt_tokens + r.new_tokens for r in done) / seconds,
        "goodput_per_s": sum(is_good(result, target) for result in results) / seconds,
        "ttft_s": percentiles([ttft(result) for result in answered]),
        "tbt_s": percentiles([gap for result in answered for gap in gaps(result)]),
        "e2e_s": percentiles([result.ended - result.sent for result in done]),
    }
