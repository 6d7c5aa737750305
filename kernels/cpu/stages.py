"""Measures the time of compiled calls, stage by stage.

    with measured_stages() as stages:
        ...  # decode steps, prompts
    stages()[Stage.ATTENTION].seconds

A stage is measured in each thread: while it works on the stage's tasks, and while it waits for
those of others. Calls of all models in the process count. What is in no stage is Python, and
threads on their way into a parallel region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import memset, sizeof
from dataclasses import dataclass
from enum import IntEnum, auto
from threading import Lock

import torch

from kernels.cpu.build import load_library
from kernels.cpu.interface import POINTER, Record, declare, sizes


class Stage(IntEnum):
    """The work of a stage; kernels/cpu/turns.h has the same order."""

    NORMS = 0
    PROJECTIONS = auto()
    POSITIONS = auto()
    ATTENTION = auto()
    OUTPUT = auto()
    ROUTER = auto()
    CHOICE = auto()
    SHARED = auto()
    EXPERT_INPUT = auto()
    EXPERT_FIRST = auto()
    EXPERT_SECOND = auto()
    EXPERT_SUM = auto()
    RECURRENCE = auto()
    INDEXER = auto()
    ROWS = auto()
    LINEAR = auto()
    HEAD = auto()


@dataclass(frozen=True)
class StageTime:
    """Sums over the runs of a stage.

    Attributes:
        runs: how often it ran.
        busy, waiting: seconds that threads worked on its tasks, and waited for those of others;
            means over the threads.
        bytes: of weights that it read.
    """

    runs: int
    busy: float
    waiting: float
    bytes: int

    @property
    def seconds(self) -> float:
        return self.busy + self.waiting


class StageTimesRecord(Record, struct="stages::Times"):
    _fields_ = sizes("runs", "busy_ns", "waiting_ns", "bytes")


StageTimes = Mapping[Stage, StageTime]
_measuring = Lock()
_times = (StageTimesRecord * len(Stage))()  # kept: a call may still write when a measurement ends


@contextmanager
def measured_stages() -> Iterator[Callable[[], StageTimes]]:
    """Measure all compiled calls of the process; the value tells the times so far, of stages that
    have run. A second measurement at the same time waits for the first.

    Raises:
        BuildError: no compiled kernels.
    """
    library = load_library()
    declare(library, {"moe_measure_stages": (None, (POINTER,))})
    with _measuring:
        memset(_times, 0, sizeof(_times))
        library.moe_measure_stages(_times)
        try:
            yield lambda: {stage: _of(_times[stage]) for stage in Stage if _times[stage].runs}
        finally:
            library.moe_measure_stages(None)


def _of(record: StageTimesRecord) -> StageTime:
    nanoseconds = 1e9 * torch.get_num_threads()
    busy, waiting = record.busy_ns / nanoseconds, record.waiting_ns / nanoseconds
    return StageTime(record.runs, busy, waiting, record.bytes)
