"""Telling glibc to keep what is freed for the next who asks.

By itself it gives every large block back to the system when it is freed. A pass over thousands of
tokens makes and drops blocks of tens of megabytes in every layer, and then takes a page fault for
each of their pages again: a tenth of the processor time of reading a long prompt
(docs/results/2026-11-21-prefill.md).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

KEPT = 2**30
"""Bytes at the end of the heap that may stay with the process while nobody uses them."""
_STEP = 2**28
"""Bytes by which the heap grows at least."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # names of mallopt(3), from malloc.h


def keep_freed_memory() -> bool:
    """Take large blocks from the heap of this process from now on; False without glibc.

    Concerns every allocation of the process. What was allocated before stays where it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function, or no such library
        return False
    return all(
        mallopt(option, value) == 1
        for option, value in ((_TRIM_THRESHOLD, KEPT), (_TOP_PAD, _STEP), (_MMAP_MAX, 0))
    )


def give_back_freed_memory() -> None:
    """Let the system have what is kept, also between blocks in use; nothing without glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
