"""How ranks find each other: within bounded time, and only if they fit together.

Rank 0 listens at the launch's address. Everybody leaves a word about itself in a store there; rank
0 compares, and tells all whether to go on and where its control connections are. The store listens
on one address (torch would take all of them), and serves torch's process groups later on.
"""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from moe.errors import LaunchError
from moe.parallel.identity import Identity, differences
from moe.parallel.launch import Launch
from moe.parallel.roll import CONTROL, WATCH, Member, Roll
from moe.parallel.secret import heard_secret, new_secret
from moe.parallel.wire import Connection, WireError, accept, connect, listen

KINDS = (CONTROL, WATCH)
_HANDSHAKE_S = 10.0


def come_together(launch: Launch, identity: Identity, timeout_s: float) -> Roll:
    """Meet the other ranks.

    Raises:
        LaunchError: who has not come, or in what the ranks differ; on every rank that is there.
    """
    deadline = time.monotonic() + timeout_s
    if launch.rank == 0:
        return _lead(launch, Member.here(identity), deadline, timeout_s)
    return _join(launch, Member.here(identity), deadline, timeout_s)


def _lead(launch: Launch, own: Member, deadline: float, timeout_s: float) -> Roll:
    store = _open_store(launch, timeout_s)
    _say(store, "member/0", own.__dict__)
    missing = _missing(store, launch, deadline)
    members = [_member(store, rank) for rank in range(launch.size) if rank not in missing]
    problem = ""
    if missing:
        problem = _absent(missing, timeout_s)
    elif lines := differences({rank: m.identity for rank, m in enumerate(members)}):
        problem = "the ranks do not fit together:\n  " + "\n  ".join(lines)
    with (
        new_secret(on_one_machine=launch.on_one_machine) as (secret, where),
        listen(launch.address, 2 * launch.size) as listener,
    ):
        port = listener.getsockname()[1]
        _say(store, "verdict", {"problem": problem, "port": port, **where})
        if problem:
            _await_farewells(store, launch, missing)
            raise LaunchError(problem)
        connections = _accept_all(listener, launch.size, secret, deadline, timeout_s)
    return Roll(store, members, connections)


def _join(launch: Launch, own: Member, deadline: float, timeout_s: float) -> Roll:
    store = _open_store(launch, timeout_s)
    _say(store, f"member/{launch.rank}", own.__dict__)
    verdict = _hear(store, "verdict", deadline, "rank 0 has not said whether the ranks fit")
    if verdict["problem"]:
        _say(store, f"farewell/{launch.rank}", {})
        raise LaunchError(verdict["problem"])
    secret, port = heard_secret(verdict), verdict["port"]
    connections: dict[str, dict[int, Connection]] = {}
    for kind in KINDS:
        who = {"rank": launch.rank, "kind": kind}
        try:
            connections[kind] = {0: connect(launch.address, port, secret, who, _HANDSHAKE_S)}
        except WireError as error:
            raise LaunchError(f"rank {launch.rank} cannot reach rank 0: {error}") from error
    members = [_member(store, rank) for rank in range(launch.size)]
    return Roll(store, members, connections)


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
    """Ranks that have not come when the time is over."""
    ranks = list(range(launch.size))
    while missing := [rank for rank in ranks if not store.check([f"member/{rank}"])]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return missing


def _await_farewells(store: Store, launch: Launch, missing: list[int]) -> None:
    """Let the others hear the verdict before the store is gone."""
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
            continue  # a stranger; ours prove that they know the secret
        connections[who["kind"]][who["rank"]] = connection
    return connections


def _absent(ranks: list[int], timeout_s: float) -> str:
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return f"{names} did not come up within {timeout_s:.0f} s (parallel.start_timeout_s)"


def _say(store: Store, key: str, value: dict[str, Any]) -> None:
    store.set(key, json.dumps(value))


def _hear(store: Store, key: str, deadline: float, or_else: str) -> dict[str, Any]:
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
