"""The ranks of a launch that have come together: what each has said about itself."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

from moe.parallel.identity import Identity
from moe.parallel.wire import Connection

CONTROL, WATCH = "control", "watch"
"""Kinds of connections: for orders and replies, and for signs of life."""


@dataclass(frozen=True)
class Member:
    """What a rank says about itself.

    Attributes:
        identity: what must be the same on all ranks.
        host: of its processes; the same text only on the same machine.
        pid: of its process there.
        born: when that was started, so that no other is taken for it.
        cores: that it may run on.
    """

    identity: Identity
    host: str
    pid: int
    born: str
    cores: tuple[int, ...]

    @classmethod
    def here(cls, identity: Identity) -> Member:
        cores = sorted(os.sched_getaffinity(0))
        return cls(identity, this_host(), os.getpid(), start_of(os.getpid()), tuple(cores))


@dataclass(frozen=True)
class Roll:
    """Ranks that have come together.

    Attributes:
        store: for process groups.
        members: what each rank has said.
        connections: by kind and rank; on rank 0 to everybody, elsewhere to rank 0.
    """

    store: Store
    members: list[Member]
    connections: dict[str, dict[int, Connection]]

    def threads(self, rank: int) -> int:
        """How many threads a rank may have: its cores, shared with the ranks that have them too."""
        own = self.members[rank]
        sharers = [m for m in self.members if m.host == own.host and set(m.cores) & set(own.cores)]
        return max(1, len(own.cores) // len(sharers))

    def neighbours(self, rank: int) -> int:
        """How many ranks are on a rank's machine, itself included."""
        return sum(member.host == self.members[rank].host for member in self.members)


def start_of(pid: int) -> str:
    """When a process of this machine was started; empty where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def this_host() -> str:
    """Machine and process namespace: processes with the same text can signal each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    space = Path("/proc/self/ns/pid")
    return f"{name} {os.readlink(space) if space.exists() else ''}"
