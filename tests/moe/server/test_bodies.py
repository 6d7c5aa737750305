"""What is said of a body that does not fit, and how many of its faults are looked for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from moe.server.anthropic import MessagesRequest
from moe.server.bodies import parse
from moe.server.errors import APIError
from moe.server.openai.request import ChatRequest, CompletionRequest
from moe.server.responses import ResponsesRequest
from moe.server.routes import DetokenizeRequest

TURN = {"role": "user", "content": "x"}
CHAT = {"model": "m", "messages": [TURN]}
TEXT = {"model": "m", "prompt": "x"}
MESSAGES = {"model": "m", "max_tokens": 1, "messages": [TURN]}
MANY = 20_000
LONG = "a" * 5000


@pytest.mark.parametrize(
    ("model", "body", "param", "message"),
    [
        (
            ChatRequest,
            CHAT | {"tool_choice": "x"},
            "tool_choice",
            "Input should be 'none', 'auto' or 'required' or a JSON object; got 'x'",
        ),
        (
            ChatRequest,
            CHAT | {"tool_choice": {"type": "function", "function": {"name": 1}}},
            "tool_choice.function.name",
            "Input should be a valid string; got 1",
        ),
        (
            ChatRequest,
            CHAT | {"chat_template_kwargs": {"a": [1]}},
            "chat_template_kwargs.a",
            "Input should be a valid boolean or a valid integer or a valid number or a valid "
            "string; got [1]",
        ),
        (
            CompletionRequest,
            TEXT | {"logit_bias": {"5": 101}},
            "logit_bias.5",
            "Input should be less than or equal to 100; got 101",
        ),
        (
            MessagesRequest,
            MESSAGES | {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages.0.content.0.text",
            "Input should be a valid string; got 1",
        ),
        (
            ResponsesRequest,
            {"model": "m", "input": [{"type": "function_call_output", "call_id": 5}]},
            "input.0.call_id",
            "Input should be a valid string; got 5",
        ),
    ],
)
def test_faults_are_named_as_clients_write_them(
    model: type[BaseModel], body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(APIError) as info:
        parse(model, json.dumps(body).encode())
    assert info.value.param == param
    assert str(info.value) == f"{param}: {message}"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatRequest, CHAT | {"metadata": {LONG: 1}}),
        (ChatRequest, CHAT | {"chat_template_kwargs": {LONG: "x"}}),
        (ChatRequest, CHAT | {LONG: 1}),
        (ResponsesRequest, {"model": "m", "input": "x", "client_metadata": {LONG: 1}}),
        (MessagesRequest, MESSAGES | {"metadata": {LONG: 1}}),
    ],
)
def test_a_long_key_is_not_said_back(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(APIError) as caught:
        parse(model, json.dumps(body).encode())
    assert caught.value.param is not None
    assert len(caught.value.param) <= 100
    assert len(caught.value.message) < 500


def test_missing_parts_of_a_choice_are_named() -> None:
    thought = {"role": "assistant", "content": [{"type": "thinking"}]}
    with pytest.raises(APIError, match=r"^the field 'messages.0.content.0.thinking' is missing$"):
        parse(MessagesRequest, json.dumps(MESSAGES | {"messages": [thought, TURN]}).encode())


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (DetokenizeRequest, {"tokens": ["x"] * MANY}),
        (CompletionRequest, TEXT | {"prompt": [["x"]] * MANY}),
        (CompletionRequest, TEXT | {"stop": [1] * MANY}),
        (CompletionRequest, TEXT | {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),
        (CompletionRequest, TEXT | {"metadata": dict.fromkeys(map(str, range(MANY)), 1)}),
        (CompletionRequest, TEXT | dict.fromkeys(map(str, range(MANY)), 1)),
        (CompletionRequest, TEXT | {"structured_outputs": {"choice": [1] * 5 * MANY}}),
        (ChatRequest, CHAT | {"messages": [1] * MANY}),
        (ChatRequest, CHAT | {"messages": [TURN | dict.fromkeys(map(str, range(MANY)), 1)]}),
        (ChatRequest, CHAT | {"chat_template_kwargs": {str(i): [] for i in range(MANY)}}),
        (ChatRequest, CHAT | {"tools": [{}] * MANY}),
        (MessagesRequest, MESSAGES | {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ResponsesRequest, {"model": "m", "input": "x", "include": ["x"] * MANY}),
        (
            ResponsesRequest,
            {"model": "m", "input": "x"}
            | {"client_metadata": dict.fromkeys(map(str, range(MANY)), 1)},
        ),
    ],
)
def test_a_body_full_of_faults_is_refused_for_few_of_them(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    """Each takes a kilobyte, and a body has room for two million: three gigabytes once."""
    with pytest.raises(ValidationError) as info:
        model.model_validate(body)
    assert info.value.error_count() < 10
    with pytest.raises(APIError, match=r"^.{1,400}$"):
        parse(model, json.dumps(body).encode())


@pytest.mark.parametrize("fits", [True, False])
def test_c11_steps_go_on_between_calls_that_keep_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """Reading the JSON and checking it each take 30 ms, by this clock, and each rests as long."""
    now, rests = [0.0], list[float]()

    def clock() -> float:
        now[0] += 0.03
        return now[0]

    monkeypatch.setattr("moe.server.bodies.time.perf_counter", clock)
    monkeypatch.setattr("moe.server.bodies.time.sleep", rests.append)
    body = json.dumps({"tokens": [1, 2, 3 if fits else "x"]}).encode()
    with nullcontext() if fits else pytest.raises(APIError):
        parse(DetokenizeRequest, body)
    assert rests == pytest.approx([0.03, 0.03])
