"""The interpreter of a server's process, which the engine's thread shares with all others.

The engine's thread gives the interpreter up in every kernel and waits for it behind each. Whatever
holds it meanwhile, such as the check of a body of a thousand messages, delays the tokens of all.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0005
"""Seconds after which a thread that runs Python gives way to one that waits. With Python's own 5 ms
a step of 20 kernels takes 100 ms beside such a check."""


@contextmanager
def turns_of_threads() -> Iterator[None]:
    """Let threads change places soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


def rest_from_collecting() -> None:
    """Let the garbage collector look no more at what is there, until `turns_of_threads` ends: the
    model and all modules.

    It holds the interpreter for a fifth of a second while it looks, which some bodies of a thousand
    messages make it do again and again.
    """
    gc.collect()
    gc.freeze()
