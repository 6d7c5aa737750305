"""Routes that there are not, and bad requests of those about text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server(strict: Any) -> Any:
    """What is not honoured is refused; `test_unknown_fields.py` has what is taken."""
    return strict


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    yield server.http
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    assert server.http.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("GET", "/nothing", 404, id="C24-no-such-route"),
        pytest.param("GET", COMPLETIONS, 405, id="C24-method"),
        pytest.param("POST", "/health", 405, id="C24-method-health"),
        pytest.param("GET", "/v1/models/other", 404, id="C24-no-such-model"),
        pytest.param("GET", "/v1/models/../../etc/passwd", 404, id="C24-path"),
        pytest.param("GET", "/docs", 404, id="C16-docs"),
        pytest.param("POST", "/v1/load_lora_adapter", 404, id="C16-admin-route"),
        pytest.param("OPTIONS", COMPLETIONS, 405, id="C23-cors-preflight"),
    ],
)
def test_other_routes(method: str, path: str, status: int, http: httpx.Client) -> None:
    answer = http.request(method, path, headers={"origin": "https://evil.example"})
    assert answer.status_code == status
    error = error_of(answer)
    if status == 405:
        assert answer.headers["allow"] == ("GET" if path == "/health" else "POST")
        assert error["message"].startswith(f"Method Not Allowed: no {method} at this path")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_monitors_may_ask_by_head(http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/"):
        answer, whole = http.head(path), http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == str(len(whole.content))
    assert http.head("/v1/models").status_code == 405


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": ""}),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}),
        ("/tokenize", {"prompt": "x", "surprise": 1}),
        ("/detokenize", {"tokens": []}),
        ("/detokenize", {"tokens": [128]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["1"]}),
        ("/detokenize", {"tokens": "1"}),
    ],
)
def test_bad_texts(route: str, body: Any, http: httpx.Client) -> None:
    answer = http.post(route, json=body)
    assert answer.status_code == 400
    error_of(answer)
