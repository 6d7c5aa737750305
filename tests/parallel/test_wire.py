"""What travels between ranks is data of bounded length, from somebody who knows the secret."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.parallel import transport as wire
from moe.parallel.transport import Connection, WireError, accept, connect, listen, readable

SECRET = b"a secret"
WHO = {"rank": 1, "kind": "watch"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Connection(ours, limit=1000), theirs
    ours.close()
    theirs.close()


@given(st.lists(st.dictionaries(st.text(), json_values), max_size=4))
def test_messages_arrive_as_they_were(messages: list[dict[str, Any]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one, other = Connection(ours), Connection(theirs)
        for message in messages:
            one.send(message)
        assert [other.receive() for _ in messages] == messages


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("!I", 1001), "a message of 1001 bytes is longer than the limit of 1000"),
        (struct.pack("!I", 2**32 - 1), "longer than the limit"),
        (struct.pack("!I", 3) + b"abc", "not a message"),
        (struct.pack("!I", 2) + b"[]", "no JSON object"),
        (struct.pack("!I", 4) + b"\x80\x04N.", "not a message"),
        (struct.pack("!I", 9) + b"short", "closed"),
        (b"", "closed"),
    ],
)
def test_what_is_no_message_is_refused(
    pair: tuple[Connection, socket.socket], data: bytes, why: str
) -> None:
    connection, other = pair
    other.sendall(data)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match=why):
        connection.receive()


def handshake(secret: bytes) -> tuple[Any, Any]:
    """What both ends say of a handshake where the second one has this secret."""
    with listen("127.0.0.1", 1) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        joining = pool.submit(connect, "127.0.0.1", port, secret, WHO, 5.0)
        try:
            accepted: Any = accept(listener, SECRET, 5.0)
        except WireError as error:
            accepted = error
        return accepted, joining.exception() or joining.result()


def test_who_knows_the_secret_is_let_in() -> None:
    (connection, who), other = handshake(SECRET)
    assert who == WHO
    other.send({"hello": 1})
    assert connection.receive() == {"hello": 1}
    assert connection.limit == other.limit == wire.MAX_BYTES


def test_who_does_not_is_not() -> None:
    accepted, joined = handshake(b"a guess")
    assert "does not know the secret" in str(accepted)
    assert isinstance(joined, WireError)


def test_a_long_greeting_is_not_read() -> None:
    with listen("127.0.0.1", 1) as listener, ThreadPoolExecutor(1) as pool:
        stranger = socket.create_connection(listener.getsockname())
        waiting = pool.submit(accept, listener, SECRET, 5.0)
        stranger.sendall(struct.pack("!I", 5000))
        with pytest.raises(WireError, match="5000 bytes"):
            waiting.result()
        stranger.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"[" * 4000,
        b'{"who":' + b"[" * 1500 + b"]" * 1500 + b"}",
        json.dumps({"who": WHO, "proof": "\u00e9\ud800", "challenge": "x"}).encode(),
        b'{"who":{},"proof":null}',
    ],
)
def test_no_greeting_of_a_stranger_is_more_than_a_wire_error(greeting: bytes) -> None:
    with (
        listen("127.0.0.1", 1) as listener,
        ThreadPoolExecutor(1) as pool,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        waiting = pool.submit(accept, listener, SECRET, 5.0)
        stranger.sendall(struct.pack("!I", len(greeting)) + greeting)
        with pytest.raises(WireError):
            waiting.result()


def test_a_greeting_that_drips_has_the_same_time() -> None:
    with (
        listen("127.0.0.1", 1) as listener,
        ThreadPoolExecutor(1) as pool,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        waiting = pool.submit(accept, listener, SECRET, 0.5)
        began = time.monotonic()
        stranger.sendall(struct.pack("!I", 4000))
        while not waiting.done() and time.monotonic() < began + 10:
            with suppress(OSError):
                stranger.send(b" ")
            time.sleep(0.2)
        with pytest.raises(WireError, match="timed out"):
            waiting.result()
        assert time.monotonic() - began < 5


def test_an_address_has_one_listener() -> None:
    with listen("127.0.0.1", 1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_c21_descriptors_above_those_that_select_can_name() -> None:
    """Connections of clients may have all below 1024 when ranks meet or a watch begins."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        above = fcntl.fcntl(ours, fcntl.F_DUPFD, 1100)
        assert readable([above], 0) == []
        theirs.send(b"x")
        assert readable([above]) == [above]
        os.close(above)
