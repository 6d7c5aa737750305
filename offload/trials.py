"""Figures that opening a store measures: how fast a disk and a processor are.

Who opens the store may know them from before, and passes a `SpeedTrial` that recalls them;
`try_now` measures each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol


class SpeedTrial(Protocol):
    """Returns what ``measure`` finds, now or lately; and when it did, empty for now.

    Args:
        name: of the trial.
        about: all that the figures depend on beside the machine, as data.
        place: a file on the device that is tried, if it is a disk.
    """

    def __call__(
        self,
        name: str,
        about: object,
        measure: Callable[[], Mapping[str, float]],
        place: Path | None = None,
    ) -> tuple[Mapping[str, float], str]: ...


def try_now(
    name: str,
    about: object,
    measure: Callable[[], Mapping[str, float]],
    place: Path | None = None,
) -> tuple[Mapping[str, float], str]:
    """A `SpeedTrial` that keeps nothing."""
    return measure(), ""
