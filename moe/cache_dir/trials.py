"""Keeps for a day how fast this machine was found to be.

A load tries the disk's readers, and a processor beside a GPU; ``moe plan`` and ``moe run`` try
memory and products, too. The figures hold for the same code, libraries, processor, threads and
device, and until the machine starts again, but no longer than `FRESH_S`: disks fill, and guests of
one host take from each other. A figure of a busy machine is not kept, as it says little of the next
hours. Figures choose ways and never change an answer.

    trials = Trials(profile.model.proof_cache)
    found = trials.recall("products", str(device), float, lambda: product_speed(device))
    found.value, found.since  # "" if it was measured now
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from moe.cache_dir import files
from moe.machine import boot, is_busy, mount_of

FRESH_S = 24 * 3600.0

T = TypeVar("T")


class Found(NamedTuple, Generic[T]):
    """A figure, and the minute in which it was measured; empty if that is now."""

    value: T
    since: str


class Trials:
    """Asks for figures, and keeps them.

    Args:
        keep: False measures each time, and keeps nothing.
    """

    def __init__(self, keep: bool = True) -> None:
        self._keep = keep

    def recall(
        self,
        name: str,
        about: object,
        kind: type[T],
        measure: Callable[[], T],
        place: Path | None = None,
    ) -> Found[T]:
        """Return the result of ``measure``, or one of the last `FRESH_S` seconds.

        Args:
            name: of the trial.
            about: all that it depends on beside this machine, as data.
            kind: of the figure; pydantic takes it to JSON and back.
            place: a file on the device that is tried, if it is one.
        """
        directory = files.private_directory() if self._keep else None
        if directory is None:
            return Found(measure(), "")
        where = [] if place is None else mount_of(place)
        key = files.digest_of([name, about, where, boot(), files.surroundings()])
        file, adapter = directory / f"trial-{key}.json", TypeAdapter(kind)
        if (found := files.read(file, key)) is not None and 0 <= time.time() - found.time < FRESH_S:
            with suppress(ValidationError, KeyError):
                value = adapter.validate_python(found.content["figure"])
                return Found(value, f"{datetime.fromtimestamp(found.time):%Y-%m-%d %H:%M}")
        value = measure()
        if is_busy():
            return Found(value, "")
        files.write(file, key, {"figure": adapter.dump_python(value, mode="json")})
        return Found(value, "")

    def figures(
        self,
        name: str,
        about: object,
        measure: Callable[[], Mapping[str, float]],
        place: Path | None = None,
    ) -> tuple[Mapping[str, float], str]:
        """See `offload.trials.SpeedTrial`."""
        return self.recall(name, about, dict[str, float], lambda: dict(measure()), place)
