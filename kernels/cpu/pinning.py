"""Threads of compiled calls, and of torch's operations, each on a CPU of its own."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof

from kernels.cpu.build import load_library
from kernels.cpu.interface import NUMBER, POINTER, declare, integers


def pin_threads(cpus: Sequence[int]) -> bool:
    """Keep the calling thread on the first of these, and the threads that compute with it on the
    others.

    Returns:
        False: the system refuses, for some thread at least.

    Raises:
        BuildError: no compiled kernels.
    """
    library = load_library()
    declare(library, {"moe_pin_threads": (NUMBER, (POINTER, NUMBER))})
    return bool(library.moe_pin_threads(addressof(integers(cpus)), len(cpus)))
