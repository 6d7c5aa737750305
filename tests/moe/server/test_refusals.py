"""Bad requests of every kind: an error in OpenAI's shape, and the server answers after each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "hello", "max_tokens": 2},
    CHAT: {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
    },
}
WRONG_TYPES = ["x", [], {}, True, [1], {"a": 1}]
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 129, 10**30, 1.5, "2"],
    "temperature": [-0.1, 2.1, "1", 1e999],
    "top_p": [0, -1, 1.1, "1"],
    "top_k": [-1, 1.5, 2**70],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e9],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [-1, 2**63, 1.5, "1"],
    "stop": ["", [""], ["a"] * 17, [1], "x" * 1025, {}, 3],
    "stop_token_ids": [[-1], ["1"], [1.5], [0] * 200, 3],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, {"x": 1}, 3],
    "ignore_eos": [1, "x"],
    "user": [3, "x" * 513],
    "max_tokens": [0, -1, 1.5, "2", 2**40, 255, 2**31 - 1],
    "model": ["other", 3, "", ["tiny"]],
    "logit_bias": [{"5": 10}, 3],
    "surprise": [1],
}
BAD_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": ["", [], [""], [[]], 3, {}, [1.5], [True], [-1], [128], [[1], "a"], [[128]], [{}]]
    + ["x" * 300, [["a"]], ["a"] * 129, [2**70]],
    "logprobs": [-1, 21, 1.5, True],
    "echo": [True, 1],
    "best_of": [2, True],
    "suffix": ["x"],
    "messages": [[]],
}
BAD_CHAT: dict[str, list[Any]] = {
    "messages": [
        *([], "hello", [3], [{}], [{"role": "user"}], [{"content": "x"}]),
        [{"role": "", "content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "x", "surprise": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
    ],
    "logprobs": [3, "x"],
    "top_logprobs": [2, -1, 21],
    "max_completion_tokens": [1, 0],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required"],
    "functions": [[{}]],
    "response_format": [{"type": "json_object"}, "text"],
    "reasoning_effort": ["high"],
    "store": [True],
    "modalities": [["audio"]],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"tokenize": True}],
    "prompt": ["x"],
}
CASES = [
    (route, field, value)
    for route, own in ((COMPLETIONS, BAD_COMPLETIONS), (CHAT, BAD_CHAT))
    for field, values in (BAD | own).items()
    for value in values
]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    yield server.http
    for route, body in BASE.items():
        assert server.http.post(route, json=body).status_code == 200
    assert not any(server.occupancy[key] for key in ("waiting_requests", "running_requests"))


@pytest.mark.parametrize("route", BASE)
def test_bad_values_of_every_field(route: str, http: httpx.Client) -> None:
    for case_route, field, value in CASES:
        if case_route != route:
            continue
        text = json.dumps(BASE[route] | {field: value}).replace("Infinity", "1e999")
        headers = {"content-type": "application/json"}
        answer = http.post(route, content=text, headers=headers)
        unknown_model = field == "model" and isinstance(value, str)
        assert answer.status_code == (404 if unknown_model else 400), (field, value, answer.text)
        error = error_of(answer)
        assert len(error["message"]) < 1000


@pytest.mark.parametrize("route", BASE)
def test_wrong_types_never_break_the_server(route: str, http: httpx.Client) -> None:
    fields = {*BASE[route], *BAD, *(BAD_CHAT if route == CHAT else BAD_COMPLETIONS)}
    for field in sorted(fields):
        for value in WRONG_TYPES:
            answer = http.post(route, json=BASE[route] | {field: value})
            if answer.status_code != 200:
                assert answer.status_code in (400, 404), (field, value, answer.text)
                error_of(answer)


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_fields_are_named(missing: str, http: httpx.Client) -> None:
    body = {key: v for key, v in BASE[COMPLETIONS].items() if key != missing}
    error = error_of(http.post(COMPLETIONS, json=body))
    assert error["message"] == f"the field {missing!r} is missing"
    assert error["param"] == missing


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {}), ("echo", False), ("best_of", 1), ("suffix", None), ("stop", None)],
)
def test_values_that_ask_for_nothing_pass(field: str, value: Any, http: httpx.Client) -> None:
    assert http.post(COMPLETIONS, json=BASE[COMPLETIONS] | {field: value}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/docs", 404),
        ("OPTIONS", COMPLETIONS, 405),
    ],
)
def test_other_routes(method: str, path: str, status: int, http: httpx.Client) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    error_of(answer)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": ""}),
        ("/tokenize", {"prompt": "x", "messages": BASE[CHAT]["messages"]}),
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
