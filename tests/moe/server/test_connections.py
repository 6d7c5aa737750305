"""Connections that are slow, silent, too many or not read from: closed, and the server answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from moe.server.connections import TimedProtocol
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


def test_c21_a_flood_of_connections_is_refused_and_forgotten(
    wait_for: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.server.serve.MAX_CONNECTIONS", 20)
    with serve(read_timeout_s=2.0) as server:  # by when all are there
        crowd = [server.connect() for _ in range(40)]
        assert server.http.get("/health").status_code == 503

        def answers() -> bool:
            return httpx.get(f"{server.url}/health", timeout=60).status_code == 200

        wait_for(answers, "the crowd to be closed")
        for connection in crowd:
            connection.close()
        assert server.http.post(URL, json=SHORT).status_code == 200
