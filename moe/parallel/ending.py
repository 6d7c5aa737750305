"""How processes end when a rank is lost."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from moe.parallel.roll import Roll, start_of, this_host

LOST = 1
"""Exit code of a rank that ends because another is lost."""


def end_stopped(roll: Roll, rank: int) -> None:
    """Kill a lost rank that is on this machine: it may be stopped, or hang for ever."""
    lost = roll.members[rank]
    same = lost.host == this_host() and lost.born == start_of(lost.pid) != ""
    if same and lost.pid != os.getpid():
        with suppress(OSError):
            os.kill(lost.pid, signal.SIGKILL)


def end_now(why: str) -> None:
    """End this process from any thread, without waiting for anything that may hang."""
    print(f"moe: {why}", file=sys.stderr, flush=True)
    os._exit(LOST)
