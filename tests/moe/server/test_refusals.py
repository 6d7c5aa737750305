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
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG_TYPES = ["x", [], {}, True, [1], {"a": 1}]
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 129, 10**30, 1.5, "2"],
    "temperature": [-0.1, 2.1, "1", 1e999],
    "top_p": [-0.1, -1, 1.1, "1"],
    "top_k": [-2, 1.5, 2**70],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e9],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [-(2**63) - 1, 2**63, 1.5, "1"],
    "stop": ["", [""], ["a"] * 17, [1], "x" * 1025, {}, 3],
    "stop_token_ids": [[-1], ["1"], [1.5], [0] * 200, 3],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, {"x": 1}, 3],
    "ignore_eos": [1, "x"],
    "response_format": [
        "json",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_object", "json_schema": {"name": "a", "schema": {}}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
    ],
    "structured_outputs": [
        {},
        {"json": [1]},
        {"json": "[1]"},
        {"regex": 3},
        {"regex": "a" * 65537},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": ["a"], "regex": "a"},
        {"json_object": False},
        {"structural_tag": "x"},
    ],
    "user": [3, "x" * 513],
    "max_tokens": [0, -1, 1.5, "2", 2**40, 255, 2**31 - 1],
    "model": ["other", 3, "", ["tiny"]],
    "logit_bias": [3, [], {"5": 101}, {"5": -101}, {"5": "1"}, {"-1": 1}, {"x": 1}, {"1.0": 1}]
    + [{"05": 1}, {"128": 1}, {"9" * 40: 1}, {str(i): 1 for i in range(1025)}],
    "cache_salt": [3, "x" * 513],
    "metadata": [3, {"a": 1}, {"a" * 65: "b"}, {str(i): "" for i in range(17)}],
    "safety_identifier": [3, "x" * 513],
    "prompt_cache_key": [3, "x" * 513],
    "priority": [101, -101, 1.5, "1", True],
    "surprise": [1],
}
BAD_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": ["", [], [""], [[]], 3, {}, [1.5], [True], [-1], [128], [[1], "a"], [[128]], [{}]]
    + ["x" * 300, [["a"]], ["a"] * 129, [2**70]],
    "logprobs": [-1, 21, 1.5, True],
    "echo": [1, "x"],
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
        [{"role": "user", "content": "x", "name": ""}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [CALL]}],  # as above
        [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "user", "content": "x", "tool_call_id": "a"}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
    ],
    "logprobs": [3, "x"],
    "top_logprobs": [2, -1, 21],
    "max_completion_tokens": [1, 0],
    "tools": [
        *([{"type": "function"}], {}, [3], [{"type": "x", "function": {"name": "f"}}]),
        *([TOOL, TOOL], [{"type": "function", "function": {"name": "f g"}}], [TOOL] * 129),
        [TOOL],  # the template knows of no tools
        [{"type": "function", "function": {"name": "f", "strict": 1}}],
        [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
    ],
    "tool_choice": ["required", "x", 3, {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [1, "x"],
    "functions": [[{}]],
    "response_format": [{"type": "json_object"}, "text"],
    "reasoning_effort": ["high"],
    "store": [True],
    "modalities": [["audio"]],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"tokenize": True}],
    "add_generation_prompt": [1, "x"],
    "continue_final_message": [1, "content"],
    "prompt": ["x"],
}
URLS = [
    [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]
    for kind in ("image_url", "video_url", "audio_url", "input_audio")
    for url in ("file:///etc/passwd", "http://127.0.0.1:1/x", "data:image/png;base64,AAAA")
]
# Rows of the list of faults that this project tests (see test_faults.py).
ROWS = {
    **dict.fromkeys(["n", "best_of"], "C4"),
    **dict.fromkeys(["prompt", "messages"], "C5"),
    **dict.fromkeys(["max_tokens", "max_completion_tokens", "priority"], "C6"),
    **dict.fromkeys(["stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs"], "C7"),
    **dict.fromkeys(["temperature", "top_p", "top_k", "min_p", "repetition_penalty"], "C9"),
    **dict.fromkeys(["presence_penalty", "frequency_penalty", "seed"], "C9"),
    **dict.fromkeys(["chat_template", "chat_template_kwargs"], "C10"),
    **dict.fromkeys(["response_format"], "C12"),
    **dict.fromkeys(["cache_salt"], "D4"),
}
CASES = [
    pytest.param(route, field, values, id=f"{ROWS.get(field, 'C24')}-{field}-{name}")
    for name, route, own in (
        ("completions", COMPLETIONS, BAD_COMPLETIONS),
        ("chat", CHAT, BAD_CHAT),
    )
    for field, values in (BAD | own).items()
]
CASES.append(pytest.param(CHAT, "messages", URLS, id="C18-media-urls"))


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
    for route, body in BASE.items():
        assert server.http.post(route, json=body).status_code == 200
    assert not any(server.occupancy[key] for key in ("waiting_requests", "running_requests"))


@pytest.mark.parametrize(("route", "field", "values"), CASES)
def test_bad_values(route: str, field: str, values: list[Any], http: httpx.Client) -> None:
    for value in values:
        text = json.dumps(BASE[route] | {field: value}).replace("Infinity", "1e999")
        headers = {"content-type": "application/json"}
        answer = http.post(route, content=text, headers=headers)
        unknown_model = field == "model" and isinstance(value, str)
        assert answer.status_code == (404 if unknown_model else 400), (value, answer.text)
        error = error_of(answer)
        assert len(error["message"]) < 1000


def test_what_programs_compare_in_a_refusal(http: httpx.Client) -> None:
    for field, value, param, code in (
        ("max_tokens", 10_000, None, "context_length_exceeded"),
        ("messages", [{"role": "user", "content": "x" * 9999}], None, "context_length_exceeded"),
        ("tools", [TOOL], "tools", "tools_not_supported"),
        ("surprise", 1, "surprise", None),
    ):
        error = error_of(http.post(CHAT, json=BASE[CHAT] | {field: value}))
        assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("route", BASE)
def test_wrong_types_never_break_the_server(route: str, http: httpx.Client) -> None:
    fields = {*BASE[route], *BAD, *(BAD_CHAT if route == CHAT else BAD_COMPLETIONS)}
    for field in sorted(fields):
        for value in WRONG_TYPES:
            answer = http.post(route, json=BASE[route] | {field: value})
            if answer.status_code != 200:
                assert answer.status_code in (400, 404), (field, value, answer.text)
                error_of(answer)


def test_missing_fields_are_named(http: httpx.Client) -> None:
    error = error_of(http.post(COMPLETIONS, json={"model": "tiny"}))
    assert error["message"] == "the field 'prompt' is missing"
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {}),
        ("logit_bias", {"5": 1}),
        ("echo", False),
        ("echo", True),
        ("best_of", 1),
        ("suffix", None),
        ("stop", None),
    ],
)
def test_values_that_ask_for_nothing_pass(field: str, value: Any, http: httpx.Client) -> None:
    assert http.post(COMPLETIONS, json=BASE[COMPLETIONS] | {field: value}).status_code == 200
