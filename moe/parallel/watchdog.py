"""The watchdog: a thread on every rank that sends its heartbeat and watches those of other ranks.

An exchange blocks until every rank takes part, so another thread must notice a missing rank. A
rank is lost if its connection breaks, if its heartbeat stays away, or if it computes without
progress; a rank that only waits for another is not lost. Rank 0 watches all ranks including
itself; the others watch rank 0.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

from moe.parallel.transport import Connection, Message, WireError, readable

BEATS = 8
"""Heartbeats within the timeout."""
SOONER = 0.75
"""Share of the timeout after which a rank is lost: sooner than exchanges time out, which name no
rank."""

COMPILE_S = 120.0
"""Least time without progress on a GPU after which a rank is lost, and for which others wait for
it: Triton compiles and measures kernels when shapes first occur. Ranks that end or are stopped are
noticed after ``parallel.timeout_s`` as ever."""

LOST = 1
"""Exit code of a rank that ends because another is lost."""

State = Literal["idle", "computing", "waiting"]


class Heartbeat:
    """Progress of this process; the computing thread updates it."""

    def __init__(self) -> None:
        self.state: State = "idle"
        self.ticks = 0

    def now(self, state: State) -> None:
        self.state = state
        self.ticks += 1

    def message(self) -> Message:
        return {"state": self.state, "ticks": self.ticks}


class _Peer:
    """The facts that the watchdog knows of a rank."""

    def __init__(self, now: float) -> None:
        self.heard = self.moved = now
        self.ticks = -1
        self.state: State = "idle"

    def take(self, message: Message, now: float) -> None:
        self.heard = now
        if message["ticks"] != self.ticks:
            self.ticks, self.moved = message["ticks"], now
        self.state = message["state"]

    def fault(self, now: float, limit: float, progress: float) -> str:
        """Why the rank counts as lost; empty if it does not."""
        if now - self.heard > limit:
            return f"has not been heard of for {now - self.heard:.1f} s"
        if self.state == "computing" and now - self.moved > progress:
            return f"has got nowhere in {now - self.moved:.1f} s (parallel.timeout_s is for that)"
        return ""


class Watchdog(threading.Thread):
    """Watches other ranks until it is closed.

    Args:
        rank: of this process.
        peers: connections for heartbeats only, by rank.
        heartbeat: of this process.
        timeout_s: see ``parallel.timeout_s``.
        on_loss: called in this thread, once for each lost rank, with the reason.
        on_message: called with each message of a peer that is no heartbeat.
        progress_s: after which a rank that computes without progress is lost; None: ``timeout_s``.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Connection],
        heartbeat: Heartbeat,
        timeout_s: float,
        on_loss: Callable[[int, str], None],
        on_message: Callable[[int, Message], None],
        progress_s: float | None = None,
    ) -> None:
        super().__init__(name="moe-watch", daemon=True)
        self._rank, self._connections, self._heartbeat = rank, dict(peers), heartbeat
        self._limit, self._interval = SOONER * timeout_s, timeout_s / BEATS
        self._progress = SOONER * (timeout_s if progress_s is None else progress_s)
        self._on_loss, self._on_message = on_loss, on_message
        self._closing, self._wake = threading.Event(), WakePipe()
        self._held_up = -math.inf, 0.0  # until when, and for how long
        now = time.monotonic()
        self._peers = {number: _Peer(now) for number in (rank, *peers)}
        for connection in peers.values():
            connection.socket.settimeout(self._interval)

    def run(self) -> None:
        while not self._closing.is_set():
            until = time.monotonic() + self._interval
            for rank in list(self._connections):
                self.say(rank, self._heartbeat.message())
            self._listen(until)
            self._judge()

    def say(self, rank: int, message: Message) -> None:
        """Send a message to a peer if it still listens; any thread may call this."""
        if connection := self._connections.get(rank):
            with suppress(WireError):  # `_hear` reports the loss, with the peer's last words if any
                connection.send(message)

    def close(self) -> None:
        self._closing.set()
        self._wake.wake()
        if threading.current_thread() is not self:
            self.join(2 * self._interval)

    def _listen(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0 and not self._closing.is_set():
            by_file = {c.fileno(): rank for rank, c in self._connections.items()}
            ready = readable([*by_file, self._wake.fileno()], left)
            until = self._excuse(until)
            for file in ready:
                if file in by_file:
                    self._hear(by_file[file])
        self._excuse(until)

    def _excuse(self, until: float) -> float:
        """Excuse the peers where this thread was held up; returns until when to listen."""
        late = time.monotonic() - until
        if late <= self._interval:
            return until
        self._held_up = until + late, late
        for peer in self._peers.values():
            peer.heard += late
            peer.moved += late
        return until + late

    def _hear(self, rank: int) -> None:
        try:
            message = self._connections[rank].receive()
        except WireError as error:
            if not self._closing.is_set():
                self._lose(rank, f"has ended or cannot be reached ({error})")
            return
        if "ticks" in message:
            self._peers[rank].take(message, time.monotonic())
        else:
            self._on_message(rank, message)

    def _judge(self) -> None:
        now = time.monotonic()
        if own := self._peers.get(self._rank):
            own.take(self._heartbeat.message(), now)
        for rank, peer in list(self._peers.items()):
            if fault := peer.fault(now, self._limit, self._progress):
                self._lose(rank, fault)

    def _lose(self, rank: int, why: str) -> None:
        if self._peers.pop(rank, None) is None or self._closing.is_set():
            return
        if connection := self._connections.pop(rank, None):
            connection.close()
        until, seconds = self._held_up
        if time.monotonic() - until < self._limit:
            why += f", while rank {self._rank} stood still for {seconds:.1f} s"
        self._on_loss(rank, why)


class WakePipe:
    """Wakes a thread that waits for what is `readable`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        os.write(self._write, b"!")

    def reset(self) -> None:
        while readable([self._read], 0):
            os.read(self._read, 1)


def exit_now(why: str) -> None:
    """End this process from any thread, without waiting for anything that may hang."""
    print(f"moe: {why}", file=sys.stderr, flush=True)
    os._exit(LOST)
