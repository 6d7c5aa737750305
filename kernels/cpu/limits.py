"""Measures the most that this machine can do, by compiled loops that do nothing else.

    limits = measure_limits()
    limits.bytes, limits.products  # a second

The yardstick of benchmarks and of ``moe plan``. `torch.sum` is none: on some machines it reads half
as fast as several streams a thread do, and flatters whatever is compared with it.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import addressof
from dataclasses import dataclass

import torch

from kernels.cpu.build import load_library
from kernels.cpu.interface import NUMBER, POINTER, SIZE, check_done, declare

SAMPLE_BYTES = 256 << 20
"""Larger than caches."""
_PRODUCT_ROUNDS = 5


@dataclass(frozen=True)
class Limits:
    """Bytes read from memory, and 8-bit products, a second, by all threads together."""

    bytes: float
    products: float


def measure_limits() -> Limits:
    """Both; about a second. Raises `BuildError` without compiled kernels."""
    return Limits(read_speed(), product_speed())


def read_speed() -> float:
    """Bytes a second of the best way to read: 1 to 8 streams a thread, fetched ahead or not.

    Raises:
        BuildError: no compiled kernels.
        MemoryError: no room for `SAMPLE_BYTES`.
    """
    library, sink = load_library(), ctypes.c_int32()
    declare(library, {"moe_read_speed": (ctypes.c_double, (SIZE, NUMBER, POINTER))})
    speed: float = library.moe_read_speed(SAMPLE_BYTES, torch.get_num_threads(), addressof(sink))
    check_done(speed > 0)
    return speed


def product_speed() -> float:
    """8-bit products a second on registers alone, the best of several tries.

    Raises:
        BuildError: no compiled kernels.
    """
    library, sink, best = load_library(), ctypes.c_int32(), 0.0
    declare(library, {"moe_dot_products": (SIZE, (SIZE, NUMBER, POINTER))})
    for _ in range(_PRODUCT_ROUNDS):
        start = time.perf_counter()
        products = library.moe_dot_products(2_000_000, torch.get_num_threads(), addressof(sink))
        best = max(best, products / (time.perf_counter() - start))
    return best
