"""What becomes of fields that this server does not honour, in every dialect.

The SDKs' own types say which fields clients send: a release with a new one breaks nothing, and the
table is complete.
"""

from __future__ import annotations

import json
import logging
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from moe.server import ignored as reports
from moe.server.anthropic import CountTokensRequest, MessagesRequest
from moe.server.bodies import EndpointBody, parse
from moe.server.errors import APIError
from moe.server.ignored import HEADER, Ignored
from moe.server.openai.request import ChatRequest, CompletionRequest
from moe.server.responses import InputTokensRequest, ResponsesRequest
from moe.server.unsupported import UNSUPPORTED
from tests.moe.server.conftest import TAKES, Say
from tests.moe.text.tool_calls.reasoning_templates import (
    DEEPSEEK_31,
    HARMONY,
    MINIMAX,
    QWEN3,
    QWEN3_OPENED,
)
from tests.moe.text.tool_calls.templates import HERMES

pytestmark = TAKES
TURN: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"messages": TURN},
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    InputTokensRequest: {"input": "hi"},
    MessagesRequest: {"model": "m", "max_tokens": 9, "messages": TURN},
    CountTokensRequest: {"model": "m", "messages": TURN},
}


def parsed(model: Any, **more: Any) -> tuple[Any, list[str]]:
    """A body, and the names of what has no effect in it."""
    ignored = Ignored()
    body = parse(model, json.dumps(BODIES[model] | more).encode(), ignored)
    return body, ignored.names


def sdk_parameters() -> dict[type[BaseModel], Any]:
    """Bodies, and the types of their fields in the SDKs that are installed."""
    anthropic: Any = pytest.importorskip("anthropic.types")
    from anthropic.types import beta
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import input_token_count_params, response_create_params

    return {
        ChatRequest: [chat.CompletionCreateParamsNonStreaming],
        CompletionRequest: [completions.CompletionCreateParamsNonStreaming],
        ResponsesRequest: [response_create_params.ResponseCreateParamsNonStreaming],
        InputTokensRequest: [input_token_count_params.InputTokenCountParams],
        MessagesRequest: [
            anthropic.message_create_params.MessageCreateParamsNonStreaming,
            beta.message_create_params.MessageCreateParamsNonStreaming,
        ],
        CountTokensRequest: [
            anthropic.message_count_tokens_params.MessageCountTokensParams,
            beta.message_count_tokens_params.MessageCountTokensParams,
        ],
    }


@pytest.mark.parametrize("model", BODIES)
def test_each_field_of_the_sdks_is_honoured_or_in_the_table(model: Any) -> None:
    names = {name for own in sdk_parameters()[model] for name in typing.get_type_hints(own)}
    assert len(names) > 8
    table = UNSUPPORTED[model.dialect]
    known = model.model_fields.keys() | table.keys()
    if model is CountTokensRequest:  # clients may send the body that they are about to send
        known |= MessagesRequest.model_fields.keys()
    assert names - known == set(), "new in the SDK: taken and named until the table has it"


def test_the_table_has_no_field_that_is_honoured_and_a_reason_for_each_refusal() -> None:
    models: list[type[EndpointBody]] = [ChatRequest, CompletionRequest]
    models += [ResponsesRequest, MessagesRequest]
    for model in models:
        table = UNSUPPORTED[model.dialect]
        assert table.keys() & model.model_fields.keys() == set()
        for name, row in table.items():
            assert row.verdict != "refused" or row.why, name


@pytest.mark.parametrize("model", BODIES)
def test_fields_are_taken_and_named_or_refused_as_the_table_says(model: Any) -> None:
    _, names = parsed(model, brand_new={"a": [1]}, other=None)
    assert names == ["brand_new"]
    for name, row in UNSUPPORTED[model.dialect].items():
        for value in row.neutral:
            assert parsed(model, **{name: value})[1] == []
        if row.verdict == "refused":
            with pytest.raises(APIError, match=f"^{name} is not supported: ") as refusal:
                parsed(model, **{name: {"a": 1}})
            assert (refusal.value.param, refusal.value.code) == (name, row.code)
        else:
            assert parsed(model, **{name: {"a": 1}})[1] == ([name] if row.verdict == "hint" else [])
    strictly = json.dumps(BODIES[model] | {"brand_new": 1}).encode()
    with pytest.raises(APIError, match="unknown field 'brand_new'; remove it"):
        parse(model, strictly)


@pytest.mark.parametrize(
    ("model", "more", "names"),
    [
        (ChatRequest, {"messages": [TURN[0] | {"weight": 1, "annotations": []}]}, ["weight"]),
        (ChatRequest, {"stream": True, "stream_options": {"x": 1}}, ["stream_options.x"]),
        (
            ChatRequest,
            {"tools": [{"type": "function", "function": {"name": "f", "defer_loading": False}}]},
            ["tools.defer_loading"],
        ),
        (
            MessagesRequest,
            {"thinking": {"type": "between_tools"}, "output_config": {"task_budget": {"a": 1}}},
            ["thinking.type", "output_config.task_budget"],
        ),
        (MessagesRequest, {"thinking": {"type": "adaptive", "display": "omitted"}}, ["display"]),
        (ResponsesRequest, {"reasoning": {"effort": "ultra", "mode": "pro"}}, ["mode", "effort"]),
        (ResponsesRequest, {"text": {"verbosity": "low"}, "truncation": "auto"}, ["verb", "trunc"]),
        (ResponsesRequest, {"include": ["web_search_call.results"]}, ["include"]),
        (CompletionRequest, {"max_tokens": -1, "cache_prompt": True}, ["cache_prompt"]),
    ],
)
def test_fields_inside_are_named_by_their_place(model: Any, more: Any, names: list[str]) -> None:
    got = sorted(parsed(model, **more)[1])
    assert len(got) == len(names)
    assert all(any(name in full for full in got) for name in names), got


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (ChatRequest, {"temperature": 3}),
        (ChatRequest, {"reasoning_effort": 3}),
        (ChatRequest, {"messages": [{"role": "user", "content": []}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}),
        (ChatRequest, {"max_tokens": -2}),
        (ChatRequest, {"max_tokens": 0}),
        (ChatRequest, {"response_format": {"type": "xml"}}),
        (ChatRequest, {"guided_regex": "a"}),
        (CompletionRequest, {"use_beam_search": True}),
        (MessagesRequest, {"thinking": {"type": 3}}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        (ResponsesRequest, {"previous_response_id": "x"}),
        (ResponsesRequest, {"input": [{"type": "item_reference", "id": "x"}]}),
        (ResponsesRequest, {f"a{i}": 1 for i in range(200)}),
    ],
)
def test_what_changes_the_answer_or_is_wrong_stays_refused(model: Any, more: Any) -> None:
    with pytest.raises(APIError) as refusal:
        parsed(model, **more)
    assert refusal.value.status == 400


def test_names_are_said_in_a_header_and_once_in_the_log(
    server: Any, strict: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_logged", set())
    chat = {"model": "tiny", "max_tokens": 1, "messages": TURN}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": TURN}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
    ]
    with caplog.at_level(logging.WARNING, "moe.server"):
        for route, body in asks:
            plain = server.http.post(route, json=body)
            assert plain.status_code == 200, (route, plain.text)
            assert HEADER not in plain.headers
            answer = server.http.post(route, json=body | {"new\nfield": 1, "newer": "x"})
            assert answer.status_code == 200
            assert answer.headers[HEADER] == "new?field, newer"
            assert strict.http.post(route, json=body | {"newer": 1}).status_code == 400
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "/v1/chat/completions: taken without effect: newer "
        "(server.unknown_fields: refuse refuses it)"
    )


def test_clients_cannot_fill_the_log_or_the_header(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_logged", set())
    with caplog.at_level(logging.WARNING, "moe.server"):
        for start in range(0, 1000, 50):
            ignored = Ignored()
            ignored.add(*(f"{number}" + "x" * 1000 for number in range(start, start + 50)))
            assert len(ignored.names) == 32
            assert max(map(len, ignored.names)) == 64
            ignored.log("here")
    assert len(caplog.records) < 10


ALWAYS: Any = {"type": "enabled", "budget_tokens": 1024}
OFF: Any = {"thinking": {"type": "disabled"}}
_Z = "chat_template_kwargs.z"


def _kwargs(**variables: object) -> Any:
    return {"chat_template_kwargs": variables}


@pytest.mark.parametrize(
    ("template", "more", "settings", "named"),
    [
        (QWEN3_OPENED, {"reasoning_effort": "low"}, {"enable_thinking": True}, None),
        (QWEN3_OPENED, {"reasoning_effort": "none"}, {"enable_thinking": False}, None),
        (MINIMAX, {"reasoning_effort": "high"}, {}, "reasoning_effort"),
        (MINIMAX, {"reasoning_effort": "none"}, {}, "reasoning_effort"),
        (HERMES, {"reasoning_effort": "high"}, {}, "reasoning_effort"),
        (HERMES, {"reasoning_effort": "none"}, {}, None),
        # What other servers call it, and the switch that another template has.
        (QWEN3_OPENED, {"thinking": False}, {"enable_thinking": False}, None),
        (QWEN3_OPENED, {"enable_thinking": False}, {"enable_thinking": False}, None),
        (QWEN3_OPENED, OFF | {"reasoning_effort": "high"}, {"enable_thinking": False}, None),
        (QWEN3_OPENED, {"thinking": {"type": "auto", "new": 1}}, {}, "thinking.new"),
        (QWEN3_OPENED, {"reasoning": {"enabled": False}}, {"enable_thinking": False}, None),
        (QWEN3_OPENED, {"reasoning": {"effort": "none"}}, {"enable_thinking": False}, None),
        (QWEN3_OPENED, _kwargs(thinking=False), {"enable_thinking": False}, None),
        (DEEPSEEK_31, _kwargs(enable_thinking=True), {"thinking": True}, None),
        (DEEPSEEK_31, {"enable_thinking": True}, {"thinking": True}, None),
        # What no template reads is named, and so is a wish that cannot be granted.
        (QWEN3_OPENED, _kwargs(enable_thinking=False, z=1), {"enable_thinking": False}, _Z),
        (MINIMAX, _kwargs(enable_thinking=False), {}, "chat_template_kwargs.enable_thinking"),
        (MINIMAX, _kwargs(enable_thinking=True), {}, None),
        (HERMES, _kwargs(enable_thinking=False), {}, None),
        (MINIMAX, {"enable_thinking": False}, {}, "thinking"),
    ],
)
def test_effort_is_a_wish(
    server: Any, say: Say, template: str, more: Any, settings: Any, named: str | None
) -> None:
    say("Yes.", template=template)
    body = {"model": "tiny", "messages": TURN, "max_tokens": 99}
    answer = server.http.post("/v1/chat/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    same = body | {"chat_template_kwargs": settings}
    plain = server.http.post("/v1/chat/completions", json=same)
    assert answer.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
    assert answer.headers.get(HEADER) == named


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"thinking_budget": 7}, {"thinking_token_budget": 7}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 7}},
            {"thinking": True, "thinking_token_budget": 7},
        ),
        (
            {"reasoning": {"max_tokens": 7, "effort": "low", "exclude": True}},
            {"thinking_token_budget": 7, "reasoning_effort": "low", "include_reasoning": False},
        ),
        ({"reasoning": None, "thinking": None, "enable_thinking": None}, {}),
        ({"reasoning": "high"}, {}),
    ],
)
def test_reasoning_in_the_words_of_other_servers(more: Any, own: Any) -> None:
    body, named = parsed(ChatRequest, **more)
    assert body.model_dump() == parsed(ChatRequest, **own)[0].model_dump()
    assert named == (["reasoning"] if more == {"reasoning": "high"} else [])


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"thinking": True, "reasoning_effort": "none"}, "contradict each other"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "two things of thinking"),
        ({"thinking_budget": 7, "thinking_token_budget": 8}, "of thinking_token_budget; give one"),
        ({"enable_thinking": "yes"}, "thinking: Input should be a valid boolean"),
        ({"thinking": {str(i): i for i in range(99)}}, "thinking: Input should be a valid boolean"),
    ],
)
def test_two_wishes_about_reasoning_are_refused(more: Any, rule: str) -> None:
    with pytest.raises(APIError, match=rule):
        parsed(ChatRequest, **more)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out_of_an_answer(server: Any, say: Say, stream: bool) -> None:
    say("Hm.</think>Yes.", template=QWEN3_OPENED)
    body = {"model": "tiny", "messages": TURN, "max_tokens": 99, "stream": stream}
    told = server.http.post("/v1/chat/completions", json=body | {"include_reasoning": False})
    assert told.status_code == 200
    assert '"reasoning' not in told.text
    assert '"reasoning' in server.http.post("/v1/chat/completions", json=body).text


@pytest.mark.parametrize(
    ("asked", "written"),
    [("minimal", "low"), ("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")],
)
def test_effort_is_the_nearest_that_the_template_reads(
    server: Any, say: Say, asked: str, written: str
) -> None:
    say("Yes.", template="{{- reasoning_effort or '?' }}" + HARMONY)
    body = {"model": "tiny", "messages": TURN, "max_tokens": 99, "reasoning_effort": asked}
    told = server.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    del body["reasoning_effort"]
    plain = server.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    assert told - plain == len(written) - 1


@pytest.mark.parametrize(
    ("template", "more", "named"),
    [
        (MINIMAX, OFF, "thinking"),
        (MINIMAX, {"thinking": ALWAYS}, None),
        (HERMES, OFF, None),
        (HERMES, {"thinking": ALWAYS}, "thinking"),
        (QWEN3, OFF | {"output_config": {"effort": "high"}}, None),
        (QWEN3, {"output_config": {"effort": "high"}}, None),
        (MINIMAX, {"output_config": {"effort": "max"}}, "output_config.effort"),
    ],
)
def test_thinking_is_a_wish(
    server: Any, say: Say, template: str, more: Any, named: str | None
) -> None:
    say("Yes.", template=template)
    body = {"model": "tiny", "messages": TURN, "max_tokens": 99} | more
    answer = server.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(HEADER) == named
