"""Connections that are slow, silent, too many or not read from: closed, and the server answers."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe.server.connections import Crowd, TimedProtocol, address_of, most_connections
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
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.server.connections.MOST", 20)
    with serve() as server:
        crowd = [server.connect() for _ in range(40)]
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            crowd += [server.connect() for _ in range(20)]
        assert server.http.post(URL, json=SHORT).status_code == 200
        metrics = server.http.get("/metrics").text
        assert int(_GAVE_WAY.findall(metrics)[0]) >= 80
        for connection in crowd:
            connection.close()


_GAVE_WAY = re.compile(r'moe_connections_closed_total\{why="gave_way"\} (\d+)')


# A server of one route, which says how many descriptors it has open. Once it has chosen its limit,
# it opens so many more.
COUNTING = """
import asyncio, os, socket, ssl, sys
from functools import partial
import uvicorn
from moe.server.connections import Acceptor, Crowd, TimedProtocol, most_connections

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % len(os.listdir("/dev/fd"))})

async def main(more, certificate=None):
    config = uvicorn.Config(app, lifespan="off", log_level="critical")
    config.load()
    crowd = Crowd(most_connections())
    make = partial(TimedProtocol, config=config, server_state=uvicorn.server.ServerState(),
                   app_state={}, read_timeout_s=60.0, crowd=crowd)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
    if tls:
        tls.load_cert_chain(certificate)
    acceptor = Acceptor(listener, make, crowd, tls)
    opened = [open("/dev/null") for _ in range(int(more))]
    print(listener.getsockname()[1], crowd.busy_limit, flush=True)
    await acceptor.wait_closed()

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def counting(soft: int, hard: int, more: int = 0, *certificate: str) -> Iterator[tuple[int, int]]:
    """That server in a process that may have so many descriptors: its port, and its limit of
    connections with requests."""
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTING, str(more), *certificate],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    try:
        with process.stdout as said:  # type: ignore[union-attr]
            port, limit = map(int, said.readline().split())
            yield port, limit
    finally:
        process.kill()
        process.wait()


def connect(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(count)]


def test_c21_silent_connections_lock_nobody_out_where_descriptors_are_few() -> None:
    """1,100 of one address: others are served at once, and the model's files find descriptors."""
    with counting(256, 512) as (port, limit):
        assert 200 < limit < 256, "of the hard limit, less what is reserved"
        crowd = connect(port, 1100)
        answers = [httpx.get(f"http://127.0.0.1:{port}", timeout=30) for _ in range(3)]
        assert all(int(answer.text) < 512 - 256 for answer in answers)
        for connection in crowd:
            connection.close()


def test_c21_connections_give_way_where_others_have_taken_the_descriptors() -> None:
    with counting(512, 512, more=450) as (port, _):
        crowd = connect(port, 100)
        answers = [httpx.get(f"http://127.0.0.1:{port}", timeout=30) for _ in range(3)]
        assert all(500 <= int(answer.text) <= 512 for answer in answers)
        for connection in crowd:
            connection.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_c21_handshakes_that_never_begin_give_way(certificate: Path) -> None:
    with counting(256, 256, 0, str(certificate)) as (port, limit):
        assert limit < 64, "a quarter of very few"
        crowd = connect(port, 300)
        trusted = ssl.create_default_context(cafile=str(certificate))
        answers = [httpx.get(f"https://127.0.0.1:{port}", verify=trusted) for _ in range(3)]
        assert all(int(answer.text) < 100 for answer in answers)
        for connection in crowd:
            connection.close()


def test_c21_limits_follow_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 44)
    for hard, most in ((64, 16), (1024, 724), (4096, 2048), (resource.RLIM_INFINITY, 2048)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (64, hard))
        assert most_connections() == most
        assert raised.pop() == (hard, hard)

    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert most_connections() == 724, "the soft limit, where that is all there is"


class FakeConnection:
    """As much of a connection as `Crowd` sees."""

    def __init__(self, is_idle: bool = True) -> None:
        self.is_idle, self.is_closed = is_idle, False

    def abort(self) -> None:
        self.is_closed = True


def test_c21_an_address_has_a_limit_and_gives_way_first() -> None:
    closed = list[str]()
    crowd = Crowd(most=9, each=4, on_close=closed.append)
    made = list[tuple[FakeConnection, str]]()
    assert crowd.busy_limit == 8

    def connect(address: str, is_idle: bool = True) -> FakeConnection:
        new = FakeConnection(is_idle)
        made.append((new, address))
        if not crowd.admit(new, address):  # type: ignore[arg-type]
            new.abort()
        return new

    few, many = [connect("few"), connect("few")], [connect("many") for _ in range(5)]
    assert [each.is_closed for each in many] == [True, *[False] * 4], "its own oldest"
    connect("few")
    connect("other")
    assert sum(each.is_closed for each in many) == 2, "of the address that has most"
    assert not any(each.is_closed for each in few)
    busy = [connect("busy", is_idle=False) for _ in range(4)]
    assert set(closed) == {"gave_way"}
    assert connect("busy").is_closed, "requests are not cut off for a new connection"
    assert closed[-1] == "refused"
    assert not any(each.is_closed for each in busy)
    for each, address in made:
        crowd.leave(each, address)  # type: ignore[arg-type]
    assert not any(connect("busy").is_closed for _ in range(4))


def test_c21_there_are_never_more_than_the_limit_with_requests_in_all() -> None:
    """Beyond `busy_limit` they hear that there are too many, beyond all they are closed."""
    crowd = Crowd(most=9, each=20)
    busy = [FakeConnection(is_idle=False) for _ in range(20)]
    assert [crowd.admit(each, "a") for each in busy] == [True] * 9 + [False] * 11  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peer", "whose"),
    [
        (("192.0.2.1", 5), "192.0.2.1"),
        (("::ffff:192.0.2.1", 5, 0, 0), "::ffff:192.0.2.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
    ],
)
def test_c21_whom_a_connection_counts_for(peer: object, whose: str) -> None:
    assert address_of(peer) == whose
