"""Tables and findings of `lab.speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import print_table

DIRECTIONS = ("centred beats truncated", "frequent beats random", "residents help", "bits help")


def directions(cells: Sequence[dict[str, Any]]) -> dict[str, bool | None]:
    """Return whether the papers' directions hold, of the mean acceptance over all cells they
    concern."""

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
    """Return how much more of its drafts a prompt accepts than with random residents, mean of all
    cells that have such a twin; and its standard error, as prompts scatter."""
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
