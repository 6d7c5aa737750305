"""How processes end when a rank is lost."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from moe.parallel.launch import Launch, end_with_parent
from moe.parallel.membership import Membership, start_of, this_host

LOST = 1
"""Exit code of a rank that ends because another is lost."""


def kill_lost_rank(roll: Membership, rank: int) -> None:
    """Kill a lost rank that is on this machine: it may be stopped, or hang for ever."""
    lost = roll.members[rank]
    same = lost.host == this_host() and lost.born == start_of(lost.pid) != ""
    if same and lost.pid != os.getpid():
        with suppress(OSError):
            os.kill(lost.pid, signal.SIGKILL)


def exit_now(why: str) -> None:
    """End this process from any thread, without waiting for anything that may hang."""
    print(f"moe: {why}", file=sys.stderr, flush=True)
    os._exit(LOST)


# ---- Keeps a launcher from ending all ranks when one is lost that the others go on without.
#
# DeepSpeed's launcher (and others) ends everybody when a process of theirs fails. A rank that may
# be lost is therefore the child of a process that has nothing to do but to outlive it.


def shield_from_launcher(launch: Launch) -> None:
    """Go on in a child; this process stays until that has ended, or else until rank 0 has.

    To be called before anything has started a thread.
    """
    child = os.fork()
    if child == 0:
        end_with_parent()
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # launchers send them to the child, too
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0 and _outlived(launch):
        code = 0
    os._exit(code if code >= 0 else 128 - code)


def _outlived(launch: Launch) -> bool:
    """Whether rank 0 was there when the child had ended; returns when it is gone."""
    try:
        with socket.create_connection((launch.address, launch.port)) as rank_0:
            while rank_0.recv(1):
                pass
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True
