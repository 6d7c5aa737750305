"""Who is lost, who is only slow or waits for others, and within which time that is known."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moe.parallel import watchdog
from moe.parallel.transport import Connection, WireError, readable
from moe.parallel.watchdog import SOONER, Heartbeat, State, Watchdog

TIMEOUT_S = 2.0


class Watched:
    """A watch over one peer that the test plays; what it has reported."""

    def __init__(self, progress_s: float | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.peer, self.heartbeat = Connection(theirs), Heartbeat()
        self.lost: dict[int, str] = {}
        self.heard: list[dict[str, Any]] = []
        self.watch = Watchdog(
            0,
            {1: Connection(ours)},
            self.heartbeat,
            TIMEOUT_S,
            self.lost.__setitem__,
            lambda _, message: self.heard.append(message),
            progress_s,
        )
        self._playing = threading.Event()
        self.watch.start()

    def play(self, seconds: float, state: str, *, moves: bool) -> None:
        """Be a peer that says so all the time."""
        ticks, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            ticks += moves
            try:
                self.peer.send({"state": state, "ticks": ticks})
            except WireError:
                return
            time.sleep(0.02)

    def close(self) -> None:
        self.watch.close()
        self.peer.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


def test_a_watch_ends_at_once_however_long_its_limit() -> None:
    """Else rank 0 would say stop so late that whoever ends it no longer waits."""
    ours, theirs = socket.socketpair()
    peer = Connection(theirs)
    watch = Watchdog(0, {1: Connection(ours)}, Heartbeat(), 400.0, lambda *_: None, lambda *_: None)
    watch.start()
    peer.receive()
    time.sleep(0.2)  # the watch listens now, for 50 s
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 20
    assert not watch.is_alive()
    peer.close()


def test_a_silent_peer_is_lost_within_the_bound(watched: Watched) -> None:
    began = time.monotonic()
    while not watched.lost and time.monotonic() < began + 60:
        time.sleep(0.01)
    assert "has not been heard of" in watched.lost[1]
    # The watch has begun a little earlier than this clock.
    assert time.monotonic() - began >= 0.9 * SOONER * TIMEOUT_S


def test_who_was_stopped_itself_blames_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a whole machine pauses: the peer's heartbeats come when it goes on."""
    stopped, until = threading.Event(), time.monotonic() + 1.5 * TIMEOUT_S

    def paused(*asked: Any) -> Any:
        if time.monotonic() > until:
            return readable(*asked)
        stopped.set()
        time.sleep(max(0.0, until - time.monotonic()))
        return []

    monkeypatch.setattr(watchdog, "readable", paused)
    assert stopped.wait(60)
    time.sleep(max(0.0, until - time.monotonic()))
    watched.play(0.5 * TIMEOUT_S, "idle", moves=False)
    assert not watched.lost


def test_a_closed_connection_is_a_loss_at_once(watched: Watched) -> None:
    watched.peer.close()
    for _ in range(2000):
        if watched.lost:
            break
        time.sleep(0.01)
    assert "has ended or cannot be reached" in watched.lost[1]


def test_who_computes_without_getting_anywhere_is_lost() -> None:
    """Also a process that hangs, which notices it itself."""
    states: list[tuple[State, State, bool, float | None]] = [
        ("idle", "computing", False, None),
        ("computing", "waiting", False, None),
        ("idle", "computing", True, None),
        ("idle", "waiting", False, None),
        ("idle", "idle", False, None),
        ("computing", "computing", False, 4 * TIMEOUT_S),  # a GPU's kernels are being compiled
    ]

    def lost(how: tuple[State, State, bool, float | None]) -> dict[int, str]:
        own, state, moves, progress_s = how
        watched = Watched(progress_s)
        watched.heartbeat.now(own)
        watched.play(2.5 * TIMEOUT_S, state, moves=moves)
        watched.close()
        return watched.lost

    with ThreadPoolExecutor(len(states)) as pool:
        stuck, hanging, *others = pool.map(lost, states)
    assert "has got nowhere" in stuck[1]
    assert hanging.keys() == {0}
    assert "has got nowhere" in hanging[0]
    assert others == [{}, {}, {}, {}]


def test_other_messages_are_handed_on(watched: Watched) -> None:
    watched.peer.send({"failed": "why"})
    watched.play(0.3, "idle", moves=False)
    assert watched.heard == [{"failed": "why"}]
    assert not watched.lost
