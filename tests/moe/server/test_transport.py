"""What comes before fields: bodies, headers and host names that are no good."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    yield server.http
    assert server.http.post(COMPLETIONS, json=GOOD).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="C3-empty"),
        pytest.param(b"{", id="C3-open-brace"),
        pytest.param(b"[]", id="C3-list"),
        pytest.param(b"3", id="C3-number"),
        pytest.param(b"null", id="C3-null"),
        pytest.param(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, id="C3-deep-objects"),
        pytest.param(b"[" * 1_000_000, id="C3-deep-lists"),
        pytest.param(b'{"model": "tiny", "prompt": NaN}', id="C3-nan"),
        pytest.param(b'{"model": "tiny", "prompt": "x", "temperature": NaN}', id="C3-nan-number"),
        pytest.param(b'{"model": "tiny", "prompt": [1e999]}', id="C3-exponent"),
        pytest.param(
            b'{"model": "tiny", "prompt": "x", "n": ' + b"9" * 100_000 + b"}", id="C3-digits"
        ),
        pytest.param(b'{"model": "tiny", "prompt": "\xff"}', id="C3-utf8"),
        pytest.param(b'{"model": "tiny", "prompt": "\\ud800"}', id="C3-surrogate"),
        pytest.param(b'\xef\xbb\xbf{"model": "tiny"}', id="C3-bom"),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_good_json(route: str, body: bytes, http: httpx.Client) -> None:
    answer = http.post(route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


def test_c3_nul_characters_are_text_like_any_other(http: httpx.Client) -> None:
    body = GOOD | {"prompt": "a\0b"}
    assert http.post(COMPLETIONS, json=body).status_code in (200, 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_c24_other_content_types(kind: str, http: httpx.Client) -> None:
    body = json.dumps(GOOD)
    answer = http.post(COMPLETIONS, content=body, headers={"content-type": kind})
    assert answer.status_code == 415
    error_of(answer)


def test_compressed_bodies_are_refused_as_such(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post(COMPLETIONS, content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert "must not be compressed (Content-Encoding is 'gzip')" in error_of(answer)["message"]


def test_c2_bodies_that_are_too_large_declared_and_counted(serve: Any) -> None:
    small = 1000
    long = json.dumps(GOOD | {"prompt": "x" * small})
    kind = {"content-type": "application/json"}
    with serve(max_body_bytes=small) as server:
        declared = server.http.post(COMPLETIONS, content=long, headers=kind)
        pieces = (long[i : i + 100].encode() for i in range(0, len(long), 100))
        chunked = server.http.post(COMPLETIONS, content=pieces, headers=kind)
        for answer in (declared, chunked):
            assert answer.status_code == 413
            assert "server.max_body_bytes" in error_of(answer)["message"]
        assert server.http.post(COMPLETIONS, json=GOOD).status_code == 200


def exchange(url: str, data: bytes) -> bytes:
    """Send raw bytes; what comes back until the server closes."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
        return answer


def test_c1_headers_have_a_limit(server: Any, http: httpx.Client) -> None:
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 10**6
    assert b" 200 " not in exchange(server.url, data)
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000
    assert exchange(server.url, data).startswith(b"HTTP/1.1 400")
    assert http.get("/health").status_code == 200


def test_garbage_is_not_http(server: Any, http: httpx.Client) -> None:
    assert b" 400 " in exchange(server.url, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")


def test_c23_a_foreign_host_name_is_refused(server: Any) -> None:
    """A web page that points its own name at this machine (DNS rebinding) gets nothing."""
    answer = server.http.get("/v1/models", headers={"host": "evil.example:8000"})
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "wrong_host"
    assert server.http.get("/health", headers={"host": "localhost:1"}).status_code == 200


def test_c2_two_lengths_of_a_body_exclude_each_other(server: Any) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        answer = connection.recv(4096)
        assert b" 400 " in answer
        assert b"exclude each other" in answer + connection.recv(4096)
        while connection.recv(4096):  # and the connection ends: what follows may be smuggled
            pass
