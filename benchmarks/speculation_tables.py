"""Tables and findings of `benchmarks.speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import isnan
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.common import print_table
from benchmarks.speculation_contenders import Contender, rate_of

DIRECTIONS = ("centred beats truncated", "frequent beats random", "residents help", "bits help")


def directions(cells: Sequence[dict[str, Any]]) -> dict[str, bool | None]:
    """Whether the papers' directions hold, of the mean acceptance over all cells they concern."""

    def mean(**wanted: Any) -> float:
        own = [
            c["acceptance"]
            for c in cells
            if all(c[name] == value for name, value in wanted.items())
        ]
        return sum(own) / len(own) if own else float("nan")

    def rises(*values: float) -> bool:
        return all(a < b for a, b in pairwise(values))

    shares = sorted({c["resident"] for c in cells})
    bits = sorted({c["bits"] for c in cells if c["way"] == "planes"})
    gain, error = against_random(cells, "frequency")
    found = (
        rises(mean(way="truncated"), mean(way="centred")),
        rises(2 * error, gain),
        rises(*(mean(selection="frequency", way="planes", resident=share) for share in shares)),
        rises(*(mean(selection="frequency", way="planes", bits=each) for each in bits)),
    )
    return dict(zip(DIRECTIONS, found, strict=True))


def choices(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each choice of residents against random ones, cell by cell and over all of them."""
    names = ("resident", "bits", "temperature")
    randoms = [c for c in cells if c["selection"] == "random"]
    others = [c for c in cells if c["selection"] != "random"]
    whole = {c["selection"]: dict.fromkeys(names, "all") for c in others}
    found = [(c["selection"], {n: c[n] for n in names}, [c, *randoms]) for c in others]
    found += [(selection, where, list(cells)) for selection, where in whole.items()]
    compared = [(s, where, *against_random(own, s)) for s, where, own in found]
    return [
        {"selection": s, **where, "gain": round(gain, 4), "error": round(error, 4)}
        for s, where, gain, error in compared
        if not isnan(gain)
    ]


def against_random(cells: Sequence[dict[str, Any]], selection: str) -> tuple[float, float]:
    """How much more of its drafts a prompt accepts than with random residents, mean of all cells
    that have such a twin; and its standard error, as prompts scatter."""
    random = {_place(c): c["by_prompt"] for c in cells if c["selection"] == "random"}
    own = [c for c in cells if c["selection"] == selection and _place(c) in random]
    gains = [
        fmean(a - b for a, b in pairs)
        for pairs in zip(
            *(zip(c["by_prompt"], random[_place(c)], strict=True) for c in own), strict=True
        )
    ]
    if len(gains) < 2:
        return float("nan"), float("nan")
    return fmean(gains), stdev(gains) / len(gains) ** 0.5


def _place(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("resident", "bits", "way", "temperature"))


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


def show_grid(cells: Sequence[dict[str, Any]]) -> None:
    names = ("selection", "resident", "bits", "way", "temperature", "acceptance", "accepted_length")
    rows = [
        [
            *(str(cell[name]) for name in names),
            f"{cell['draft_bytes_per_token'] / 1e6:.2f}",
            f"{cell['target_bytes_per_token'] / 1e6:.2f}",
            " ".join(f"{rate:.2f}" for rate in cell["by_position"]),
        ]
        for cell in cells
    ]
    columns = ("choice", "resident", "bits", "way", "T", "accepted", "length", "draft MB")
    print_table(
        "What the shipped model accepts of 4 drafted tokens",
        (*columns, "target MB", "by position"),
        rows,
    )


def show_choices(cells: Sequence[dict[str, Any]]) -> None:
    rows = [
        [*(str(c[n]) for n in ("selection", "resident", "bits", "temperature"))]
        + [f"{c['gain']:+.3f}", f"{c['error']:.3f}"]
        for c in choices(cells)
    ]
    columns = ("choice", "resident", "bits", "T", "accepted more", "standard error")
    print_table("Choices of residents against random ones, on the same prompts", columns, rows)
