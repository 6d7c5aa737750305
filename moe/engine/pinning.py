"""`engine.pin_threads`: while a step computes, each of its threads stays on a physical core.

Without it Linux places them. It wakes a thread now and then on the CPU of the one that waits for
it, above all behind a read from disk. With it, a thread whose core another process wants, waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from kernels.cpu import choose_kernel
from kernels.cpu.pinning import pin_threads
from moe.machine import physical_cores
from moe.settings import Profile


class PinnedThreads:
    """A context manager: this thread and those that compute with it stay on the given CPUs.

    The thread itself is free again behind it, as threads that it starts stay where it does.

    Args:
        cpus: one for each thread; none: nothing is pinned.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus, self._teams = cpus, threading.local()  # each calling thread has its own
        self._before: set[int] = set()

    def __enter__(self) -> None:
        if not self._cpus:
            return
        self._before = os.sched_getaffinity(0)
        if getattr(self._teams, "pinned", False):
            with suppress(OSError):  # the CPU is not this process's any more
                os.sched_setaffinity(0, self._cpus[:1])
        else:
            self._teams.pinned = pin_threads(self._cpus)

    def __exit__(self, *_: object) -> None:
        if self._before:
            with suppress(OSError):
                os.sched_setaffinity(0, self._before)


def pinned_cpus(profile: Profile, device: torch.device) -> tuple[Sequence[int], str]:
    """The CPU of each thread, and why there are none although the profile asks for it."""
    if not profile.engine.pin_threads:
        return (), ""
    if device.type != "cpu":
        return (), "the model runs on a GPU"
    if choose_kernel()[0] is None:
        return (), "there are no compiled kernels"
    cores, threads = physical_cores(), torch.get_num_threads()
    if not cores:
        return (), "this system does not let threads choose CPUs"
    if threads > len(cores):
        return (), (
            f"there are {threads} threads, and this process may use {len(cores)} physical cores; "
            f"set threads to {len(cores)} or less"
        )
    return [min(core) for core in cores[:threads]], ""
