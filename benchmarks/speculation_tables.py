"""Tables and findings of `benchmarks.speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.common import print_table
from benchmarks.speculation_contenders import Contender, rate_of


def describe(contenders: Sequence[Contender], where: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of one run; the first contender does not draft."""
    plain = contenders[0]
    on_disk = where["residency"] < 1

    def read(each: Contender) -> float:
        if on_disk:
            return each.a_token("disk_bytes")
        return each.a_token("memory_bytes") + each.a_token("draft_bytes")

    fixed = [each for each in contenders if each.depth is not None]  # none is depth 0
    best = max(each.rate for each in fixed)
    points_ = []
    for each in contenders[1:]:
        acceptance, length = each.drafted()
        points_.append(
            {
                **where,
                "mode": each.name,
                "depth": each.depth,
                "acceptance": round(acceptance, 4),
                "accepted_length": round(length, 3),
                "bytes_per_token": round(read(each)),
                "plain_bytes_per_token": round(read(plain)),
                "tokens_per_second": round(each.rate, 2),
                "speedup": round(each.rate / plain.rate, 3),
                "noise": _noise(each, plain),
                "median_speedup": round(median(_by_round(each, plain)), 3),
                "early_speedup": _early(each, plain),
                "of_best": round(each.rate / best, 3),
                "of_best_apart": of_best_apart(each, fixed),
            }
        )
    return points_


def of_best_apart(each: Contender, fixed: Sequence[Contender]) -> float | None:
    """Speed over that of the best fixed choice, which is chosen on half of the rounds and compared
    with on the others, both ways: the largest of several noisy rates is luck in part, which the
    other half does not share. None of one round."""
    count = len(each.runs)
    if count < 2:
        return None
    half = [index % 2 for index in range(count)]

    def rate(own: Contender, which: int) -> float:
        return rate_of([run for run, at in zip(own.runs, half, strict=True) if at == which])

    ratios = []
    for chosen in (0, 1):
        best = max(fixed, key=partial(rate, which=chosen))
        ratios.append(rate(each, 1 - chosen) / rate(best, 1 - chosen))
    return round(fmean(ratios), 3)


def _by_round(each: Contender, plain: Contender) -> list[float]:
    """Speed-up in each round: on the same prompts, one behind the other."""
    pairs = zip(each.runs, plain.runs, strict=True)
    return [rate_of([one]) / rate_of([other]) for one, other in pairs]


def _noise(each: Contender, plain: Contender) -> float | None:
    """Standard error of the speed-up, from round to round; None of one round."""
    gains = _by_round(each, plain)
    return round(stdev(gains) / len(gains) ** 0.5, 3) if len(gains) > 1 else None


def _early(each: Contender, plain: Contender) -> float | None:
    """Speed-up while there was everything to learn; None where nothing learns."""
    return round(rate_of(each.early) / rate_of(plain.early), 3) if each.early else None


def show(title: str, points_: Sequence[dict[str, Any]]) -> None:
    names = ("batch", "residency", "temperature", "mode", "depth", "acceptance", "accepted_length")
    speeds = ("tokens_per_second", "speedup", "noise", "median_speedup", "early_speedup")
    numbers = (*speeds, "of_best", "of_best_apart")
    rows = [
        [
            *(str("auto" if point[n] is None else point[n]) for n in names),
            f"{point['bytes_per_token'] / 1e6:.2f}",
            f"{point['plain_bytes_per_token'] / 1e6:.2f}",
            *("" if point[n] is None else f"{point[n]:.2f}" for n in numbers),
        ]
        for point in points_
    ]
    columns = ("batch", "resident", "T", "mode", "depth", "accepted", "length", "MB", "plain MB")
    rates = ("tokens/s", "speed-up", "±", "median", "early", "of best", "apart")
    print_table(title, (*columns, *rates), rows)
