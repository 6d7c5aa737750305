"""Brings the ranks of a launch together: within bounded time, and only if they fit together.

Rank 0 listens at the launch's address and opens a store there. Every rank writes a `Member` into
it: its process, and its `identity` (settings, versions, code, model files). Ranks that differ would
wait for each other in different places or give different answers, so rank 0 compares them, and
tells all ranks whether to go on and where to connect. The store listens on one address (torch by
itself would take all of them) and serves torch's process groups later.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from moe.errors import LaunchError
from moe.machine import code_digest
from moe.parallel.launch import Launch, offer_secret, read_secret
from moe.parallel.transport import Connection, WireError, accept, connect, listen
from moe.settings import Profile
from moe.settings.profile import KEYS, value_of
from offload.hot_set import FILE_NAME

CONTROL, WATCH = "control", "watch"
"""Kinds of connections: for orders and replies, and for heartbeats."""
KINDS = (CONTROL, WATCH)
_HANDSHAKE_S = 10.0

PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
OWN_SETTINGS = ("threads",)
"""Settings that may differ from rank to rank."""

Identity = dict[str, str]


@dataclass(frozen=True)
class Member:
    """The facts that a rank states about itself.

    Attributes:
        identity: what must be the same on all ranks.
        host: machine and process namespace; see `this_host`.
        pid: of its process there.
        born: start time of the process, which tells it from a later one of the same pid.
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
class Membership:
    """The ranks of a launch, connected.

    Attributes:
        store: for process groups.
        members: what each rank says about itself.
        connections: by kind and rank; on rank 0 to all other ranks, elsewhere to rank 0.
    """

    store: Store
    members: list[Member]
    connections: dict[str, dict[int, Connection]]

    def sharers(self, rank: int) -> list[int]:
        """The ranks that may run on some of a rank's cores, itself among them."""
        own = self.members[rank]
        return [
            other
            for other, member in enumerate(self.members)
            if member.host == own.host and set(member.cores) & set(own.cores)
        ]

    def threads(self, rank: int) -> int:
        """Return how many threads a rank may have: its cores, divided by the ranks that share
        them."""
        return max(1, len(self.members[rank].cores) // len(self.sharers(rank)))

    def neighbours(self, rank: int) -> int:
        """Return how many ranks are on a rank's machine, itself included."""
        return sum(member.host == self.members[rank].host for member in self.members)


def rendezvous(launch: Launch, identity: Identity, timeout_s: float) -> Membership:
    """Meet the other ranks.

    Raises:
        LaunchError: ranks are missing or differ; raised on every rank that is there.
    """
    deadline = time.monotonic() + timeout_s
    if launch.rank == 0:
        return _collect(launch, Member.here(identity), deadline, timeout_s)
    return _attend(launch, Member.here(identity), deadline, timeout_s)


def _collect(launch: Launch, own: Member, deadline: float, timeout_s: float) -> Membership:
    store = _open_store(launch, timeout_s)
    _put(store, "member/0", own.__dict__)
    missing = _missing(store, launch, deadline)
    members = [_member(store, rank) for rank in range(launch.size) if rank not in missing]
    problem = ""
    if missing:
        problem = _absent(missing, timeout_s)
    elif lines := differences({rank: m.identity for rank, m in enumerate(members)}):
        problem = "the ranks do not fit together:\n  " + "\n  ".join(lines)
    with (
        offer_secret(on_one_machine=launch.on_one_machine) as (secret, where),
        listen(launch.address, 2 * launch.size) as listener,
    ):
        port = listener.getsockname()[1]
        _put(store, "verdict", {"problem": problem, "port": port, **where})
        if problem:
            _await_farewells(store, launch, missing)
            raise LaunchError(problem)
        connections = _accept_all(listener, launch.size, secret, deadline, timeout_s)
    return Membership(store, members, connections)


def _attend(launch: Launch, own: Member, deadline: float, timeout_s: float) -> Membership:
    store = _open_store(launch, timeout_s)
    _put(store, f"member/{launch.rank}", own.__dict__)
    verdict = _get(store, "verdict", deadline, "rank 0 has not said whether the ranks fit")
    if verdict["problem"]:
        _put(store, f"farewell/{launch.rank}", {})
        raise LaunchError(verdict["problem"])
    secret, port = read_secret(verdict), verdict["port"]
    connections: dict[str, dict[int, Connection]] = {}
    for kind in KINDS:
        who = {"rank": launch.rank, "kind": kind}
        try:
            connections[kind] = {0: connect(launch.address, port, secret, who, _HANDSHAKE_S)}
        except WireError as error:
            raise LaunchError(f"rank {launch.rank} cannot reach rank 0: {error}") from error
    members = [_member(store, rank) for rank in range(launch.size)]
    return Membership(store, members, connections)


def _open_store(launch: Launch, timeout_s: float) -> Store:
    leads, address, port = launch.rank == 0, launch.address, launch.port
    listening: int | None = None
    if leads:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listening = socket.create_server((address, port), family=family).detach()
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen on {address} port {port}: {error}; another launch may have "
                "it: give the launcher --master_port with a free one"
            ) from error
    try:
        store = TCPStore(
            address,
            port,
            is_master=leads,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank 0 did not come up at {address} port {port} within {timeout_s:.0f} s "
            "(parallel.start_timeout_s)"
        ) from error
    return PrefixStore("moe", store)


def _missing(store: Store, launch: Launch, deadline: float) -> list[int]:
    """Ranks that have not come by the deadline."""
    ranks = list(range(launch.size))
    while missing := [rank for rank in ranks if not store.check([f"member/{rank}"])]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return missing


def _await_farewells(store: Store, launch: Launch, missing: list[int]) -> None:
    """Let the others read the verdict before the store is gone."""
    there = [rank for rank in range(1, launch.size) if rank not in missing]
    until = time.monotonic() + _HANDSHAKE_S
    while there and time.monotonic() < until:
        there = [rank for rank in there if not store.check([f"farewell/{rank}"])]
        time.sleep(0.05)


def _accept_all(
    listener: socket.socket, size: int, secret: bytes, deadline: float, timeout_s: float
) -> dict[str, dict[int, Connection]]:
    connections: dict[str, dict[int, Connection]] = {kind: {} for kind in KINDS}
    while sum(map(len, connections.values())) < len(KINDS) * (size - 1):
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, who = accept(listener, secret, _HANDSHAKE_S)
        except TimeoutError:
            missing = [r for r in range(1, size) if any(r not in connections[k] for k in KINDS)]
            raise LaunchError(_absent(missing, timeout_s)) from None
        except WireError:
            continue  # not a rank of this launch: it does not know the secret
        connections[who["kind"]][who["rank"]] = connection
    return connections


def _absent(ranks: list[int], timeout_s: float) -> str:
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return f"{names} did not come up within {timeout_s:.0f} s (parallel.start_timeout_s)"


def _put(store: Store, key: str, value: dict[str, Any]) -> None:
    store.set(key, json.dumps(value))


def _get(store: Store, key: str, deadline: float, or_else: str) -> dict[str, Any]:
    left = max(0.01, deadline - time.monotonic()) + _HANDSHAKE_S
    try:
        store.wait([key], timedelta(seconds=left))
        value: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:
        raise LaunchError(f"{or_else}: {error}") from error
    return value


def _member(store: Store, rank: int) -> Member:
    said = json.loads(store.get(f"member/{rank}"))
    return Member(**said | {"cores": tuple(said["cores"])})


def identity(profile: Profile, model: Path) -> Identity:
    """Everything that must be equal, by the name that an error gives it."""
    same: Identity = {"moe": _version("moe-inference"), "python": platform.python_version()}
    same["code"] = code_digest()
    same |= {name: _version(name) for name in PACKAGES}
    for key in KEYS.leaves:
        if key not in OWN_SETTINGS:
            same[f"setting {key}"] = repr(value_of(profile, key))
    return same | {f"model file {name}": what for name, what in _files(model).items()}


def differences(identities: Mapping[int, Identity]) -> list[str]:
    """One line for each thing in which ranks differ from rank 0: which rank has what."""
    first = identities[0]
    lines = []
    for rank, other in sorted(identities.items()):
        for name in sorted(first.keys() | other.keys()):
            here, there = first.get(name, "absent"), other.get(name, "absent")
            if here != there:
                lines.append(f"{name}: {here} on rank 0, {there} on rank {rank}")
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _files(model: Path) -> dict[str, str]:
    """Digests of a model's small files, sizes of its large ones."""
    found = {}
    for file in sorted(model.iterdir()):
        if file.name == FILE_NAME:
            continue  # belongs to a run, not to the model
        if file.suffix == ".json" and file.stat().st_size < 2**24:
            found[file.name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        elif file.suffix in (".safetensors", ".bin", ".gguf"):
            found[file.name] = f"{file.stat().st_size} bytes"
    return found


def start_of(pid: int) -> str:
    """When a process of this machine was started; empty if unknown."""
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


def kill_member(member: Member) -> None:
    """Kill another rank if it is on this machine."""
    _signal(member, signal.SIGKILL)


def wake_member(member: Member) -> None:
    """Let another rank go on if it is on this machine and somebody has stopped it."""
    _signal(member, signal.SIGCONT)


def _signal(member: Member, number: signal.Signals) -> None:
    same = member.host == this_host() and member.born == start_of(member.pid) != ""
    if same and member.pid != os.getpid():
        with suppress(OSError):
            os.kill(member.pid, number)
