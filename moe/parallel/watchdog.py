"""The watchdog: a thread on every rank that says that the rank lives, and how far it is.

Exchanges between ranks wait for whoever is missing, so somebody who is not in them has to look. A
rank is lost when its connection breaks, when it is not heard of, or when it computes without
getting anywhere; who only waits for another is not to blame. Rank 0 watches everybody, itself
included, and everybody watches rank 0.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

from moe.parallel.transport import Connection, Message, WireError

BEATS = 8
"""Signs of life within the timeout."""
SOONER = 0.75
"""Of the timeout, after which a rank is lost: before exchanges time out, which cannot name it."""

State = Literal["idle", "computing", "waiting"]


class Heartbeat:
    """How far this process is; set by the thread that computes."""

    def __init__(self) -> None:
        self.state: State = "idle"
        self.ticks = 0

    def now(self, state: State) -> None:
        self.state = state
        self.ticks += 1

    def message(self) -> Message:
        return {"state": self.state, "ticks": self.ticks}


class _Peer:
    """What is known of another rank."""

    def __init__(self, now: float) -> None:
        self.heard = self.moved = now
        self.ticks = -1
        self.state: State = "idle"

    def take(self, message: Message, now: float) -> None:
        self.heard = now
        if message["ticks"] != self.ticks:
            self.ticks, self.moved = message["ticks"], now
        self.state = message["state"]

    def fault(self, now: float, limit: float) -> str:
        """Why it counts as lost; empty as long as it does not."""
        if now - self.heard > limit:
            return f"has not been heard of for {now - self.heard:.1f} s"
        if self.state == "computing" and now - self.moved > limit:
            return f"has got nowhere in {now - self.moved:.1f} s (parallel.timeout_s is for that)"
        return ""


class Watchdog(threading.Thread):
    """Looks after other ranks until it is closed.

    Args:
        rank: of this process.
        peers: connections for nothing but signs of life, by rank.
        pulse: of this process.
        timeout_s: see ``parallel.timeout_s``.
        on_loss: called in this thread with a rank and what became of it, once for each.
        on_message: called with what a peer says besides its pulse.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Connection],
        pulse: Heartbeat,
        timeout_s: float,
        on_loss: Callable[[int, str], None],
        on_message: Callable[[int, Message], None],
    ) -> None:
        super().__init__(name="moe-watch", daemon=True)
        self._rank, self._connections, self._pulse = rank, dict(peers), pulse
        self._limit, self._interval = SOONER * timeout_s, timeout_s / BEATS
        self._on_loss, self._on_message = on_loss, on_message
        self._closing = threading.Event()
        now = time.monotonic()
        self._peers = {number: _Peer(now) for number in (rank, *peers)}
        for connection in peers.values():
            connection.socket.settimeout(self._interval)

    def run(self) -> None:
        beat = time.monotonic()
        while not self._closing.is_set():
            late = time.monotonic() - beat - self._interval
            if late > self._interval:  # this thread was held up: nobody else is to blame for it
                for peer in self._peers.values():
                    peer.heard += late
                    peer.moved += late
            beat = time.monotonic()
            for rank in list(self._connections):
                self.say(rank, self._pulse.message())
            self._listen(beat + self._interval)
            self._judge()

    def say(self, rank: int, message: Message) -> None:
        """Tell a peer something, if it still listens; may be called from any thread."""
        if connection := self._connections.get(rank):
            with suppress(WireError):  # it may have said why, which is yet to be read
                connection.send(message)

    def close(self) -> None:
        self._closing.set()
        if threading.current_thread() is not self:
            self.join(2 * self._interval)

    def _listen(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0 and not self._closing.is_set():
            by_file = {c.fileno(): rank for rank, c in self._connections.items()}
            ready, _, _ = select.select(list(by_file), [], [], left)
            for file in ready:
                self._hear(by_file[file])

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
            own.take(self._pulse.message(), now)
        for rank, peer in list(self._peers.items()):
            if fault := peer.fault(now, self._limit):
                self._lose(rank, fault)

    def _lose(self, rank: int, why: str) -> None:
        if self._peers.pop(rank, None) is None or self._closing.is_set():
            return
        if connection := self._connections.pop(rank, None):
            connection.close()
        self._on_loss(rank, why)


class WakePipe:
    """Wakes a thread that waits in `select`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        os.write(self._write, b"!")

    def reset(self) -> None:
        while select.select([self._read], [], [], 0)[0]:
            os.read(self._read, 1)
