"""Reports the progress of loading: one callback for bars, servers and tests.

The bar in a terminal is one of them, the server's ``/ready`` another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True)
class LoadProgress:
    """A moment of loading.

    Attributes:
        phase: what is being done.
        done_bytes: bytes of the checkpoint read so far.
        total_bytes: bytes that will be read; 0 while that is not known.
    """

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0

    @property
    def fraction(self) -> float:
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"fraction": round(self.fraction, 4)}


Report = Callable[[LoadProgress], object]
"""Hears of every slice that is read, in the thread that loads."""


@contextmanager
def reporting(progress: bool | Report) -> Iterator[Report]:
    """The callback itself; a bar on stderr for True, nothing for False."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda _: None
    else:
        with _bar() as bar:
            task = bar.add_task("", total=None)
            yield lambda now: bar.update(
                task,
                description=now.phase,
                completed=now.done_bytes,
                total=now.total_bytes or None,
            )


def _bar() -> Progress:
    # Seventy milliseconds of imports, which a server and a pipe do without.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def size_text(number: int) -> str:
    """Bytes in MiB or GiB, eight columns of them."""
    unit, name = (2**30, "GiB") if number >= 2**30 else (2**20, "MiB")
    return f"{number / unit:8.2f} {name}"
