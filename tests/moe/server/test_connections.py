"""Connections that are slow, silent, too many or not read from: closed, and the server answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from moe.server.connections import Crowd, TimedProtocol
from moe.server.metrics import Metrics

URL = "/v1/completions"
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
HEAD = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\n"
JSON = "Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        pytest.param("", b"", id="C21-silent"),
        pytest.param(HEAD, b"", id="C21-half-headers"),
        pytest.param(f"{HEAD}{JSON}Content-Length: 9\r\n\r\n{{", b" 408 ", id="C21-half-body"),
        pytest.param(f"{HEAD}{JSON}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n", b" 408 ",
                     id="C2-half-chunked-body"),
        pytest.param(f"{HEAD}Content-Length: 9\r\n\r\n{{", b" 415 ", id="C21-body-nobody-reads"),
        pytest.param("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 200 ", id="C21-idle"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("drips", [False, True], ids=["waits", "drips"])
def test_slow_connections_are_closed(
    sent: str, answered: bytes, drips: bool, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the rest never comes, or comes a byte at a time."""
    with serve(read_timeout_s=0.3) as server, server.connect() as connection:
        connection.sendall(sent.encode())
        connection.settimeout(0.05)
        got, deadline = b"", time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                piece = connection.recv(65536)
                if not piece:
                    break
                got += piece
            except TimeoutError:
                if drips:
                    connection.send(b"a")
            except ConnectionError:
                break
        else:
            pytest.fail("the connection stays open")
        assert answered in got.partition(b"\r\n")[0]
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_c21_an_answer_that_nobody_reads_does_not_hold_its_connection(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Metrics, "exposition", lambda _: b"x" * 2**26)
    lost = threading.Event()
    connection_lost = TimedProtocol.connection_lost

    def lost_too(protocol: TimedProtocol, error: Exception | None) -> None:
        connection_lost(protocol, error)
        lost.set()

    monkeypatch.setattr(TimedProtocol, "connection_lost", lost_too)
    with serve(read_timeout_s=0.3) as server, server.connect(receive_buffer=1024) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert lost.wait(20)
        assert server.http.post(URL, json=SHORT).status_code == 200


def test_c21_silent_connections_keep_nobody_out(
    wait_for: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.server.serve.MAX_CONNECTIONS", 20)
    with serve() as server:
        crowd = [server.connect() for _ in range(40)]
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            crowd += [server.connect() for _ in range(20)]
        assert server.http.post(URL, json=SHORT).status_code == 200
        for connection in crowd:
            connection.close()


class FakeConnection:
    """As much of a connection as `Crowd` sees."""

    def __init__(self, is_idle: bool = True) -> None:
        self.is_idle, self.is_closed = is_idle, False
        self.transport = self

    def abort(self) -> None:
        self.is_closed = True


def test_c21_an_address_has_a_limit_and_gives_way_first() -> None:
    crowd, made = Crowd(most=8, each=4), list[FakeConnection]()

    def connect(address: str, is_idle: bool = True) -> FakeConnection:
        made.append(FakeConnection(is_idle))
        if not crowd.admit(made[-1], address):  # type: ignore[arg-type]
            made[-1].abort()
        return made[-1]

    few, many = [connect("few"), connect("few")], [connect("many") for _ in range(5)]
    assert [each.is_closed for each in many] == [True, *[False] * 4], "its own oldest"
    connect("few")
    connect("other")
    assert sum(each.is_closed for each in many) == 2, "of the address that has most"
    assert not any(each.is_closed for each in few)
    busy = [connect("busy", is_idle=False) for _ in range(4)]
    assert connect("busy").is_closed, "requests are not cut off for a new connection"
    assert not any(each.is_closed for each in busy)
    for each in made:
        crowd.leave(each)  # type: ignore[arg-type]
    assert not any(connect("busy").is_closed for _ in range(4))
