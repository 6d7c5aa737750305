"""`/v1/messages` as Anthropic's clients speak it: a chat in other words.

The client library itself is tried in `test_anthropic_client.py`; these are the bytes.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest

from moe import MoE
from moe.server.anthropic import MessagesRequest
from moe.server.unsupported import UNSUPPORTED
from tests.moe.server.conftest import Say
from tests.moe.server.wire import check_wrong_types, events_of
from tests.moe.text.tool_calls.reasoning_templates import MINIMAX, QWEN3, QWEN3_OPENED
from tests.moe.text.tool_calls.templates import HERMES

ROUTE, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
ASKED: Any = [{"role": "user", "content": "Is it raining?"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
LABEL: Any = {"cache_control": {"type": "ephemeral"}}
WEATHER: Any = {"name": "weather", "input_schema": SCHEMA, **LABEL}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture
def server(strict: Any) -> Any:
    """What is not honoured is refused; `test_unknown_fields.py` has what is taken."""
    return strict


def ask(server: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 200} | more
    answer = server.http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    got: dict[str, Any] = answer.json()
    return got


def chat(server: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 200} | more
    got: dict[str, Any] = server.http.post(CHAT, json=body).json()
    return got


def test_the_tokens_are_those_of_a_chat(server: Any) -> None:
    turns: Any = [*ASKED, {"role": "assistant", "content": "Yes"}, *ASKED]
    asked: Any = {"temperature": 0, "max_tokens": 12, "top_k": 5, "top_p": 0.9}
    system = [{"type": "text", "text": "Be brief", **LABEL}, {"type": "text", "text": "and kind"}]
    got = ask(server, messages=turns, system=system, metadata={"user_id": "u"}, **asked)
    lead = {"role": "system", "content": "Be brief\nand kind"}
    same = chat(server, messages=[lead, *turns], **asked)
    assert got["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert got["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert got["usage"]["output_tokens"] == same["usage"]["completion_tokens"]
    assert (got["stop_reason"], got["stop_sequence"]) == ("max_tokens", None)
    body = {"model": "tiny", "messages": turns, "system": system} | asked
    texts = [
        event["delta"]["text"]
        for event in events_of(server.http, ROUTE, body)
        if event["type"] == "content_block_delta"
    ]
    assert "".join(texts) == got["content"][0]["text"]


def test_an_answer_that_has_been_begun_is_continued(server: Any) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "Yes, a"}]
    got = ask(server, messages=begun, temperature=0, max_tokens=8)
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    same = chat(server, messages=begun, temperature=0, max_tokens=8, **ending)
    assert got["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert got["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]


def test_a_stream_has_its_events_in_order(server: Any, say: Say) -> None:
    say(SAID, template=QWEN3)
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 200, "tools": [WEATHER]}
    events = events_of(server.http, ROUTE, body)
    block = [f"content_block_{word}" for word in ("start", "delta", "stop")]
    assert [name for name, _ in groupby(event["type"] for event in events)] == [
        *("message_start", "ping", *block * 3, "message_delta", "message_stop")
    ]
    content: list[Any] = []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            content.append(event["content_block"] | {"pieces": []})
            assert event["index"] == len(content) - 1
        elif event["type"] == "content_block_delta":
            kind, piece = event["delta"].values()
            assert kind in ("thinking_delta", "text_delta", "input_json_delta")
            content[event["index"]]["pieces"].append(piece)
    joined = ["".join(block["pieces"]) for block in content]
    assert joined[:2] == ["Hm.", "I look."]
    assert json.loads(joined[2]) == {"city": "Ulm"}
    whole = ask(server, tools=[WEATHER])
    assert whole["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert whole["content"][1] == {"type": "text", "text": "I look."}
    assert whole["content"][2]["input"] == {"city": "Ulm"}
    assert [block["type"] for block in content] == [block["type"] for block in whole["content"]]
    start, end = events[0]["message"], events[-2]
    assert start["content"] == []
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert end["usage"] == whole["usage"]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 20}


def test_calls_and_thoughts_go_back(server: Any, say: Say, model: MoE) -> None:
    say(SAID, template=QWEN3)
    said = ask(server, tools=[WEATHER], tool_choice={"type": "auto"})["content"]
    say("It rains.", template=QWEN3)
    call = said[2]
    result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": True, **LABEL}
    back: Any = [
        *(*ASKED, {"role": "assistant", "content": said}),
        {
            "role": "user",
            "content": [
                result
                | {"content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]},
                *({"type": "text", "text": "So?"}, {"type": "text", "text": "Well?", **LABEL}),
            ],
        },
    ]
    got = ask(server, messages=back, tools=[WEATHER])
    assert got["content"] == [{"type": "text", "text": "It rains."}]
    assert got["stop_reason"] == "end_turn"
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    calls = [{"id": call["id"], "type": "function", "function": function}]
    history: Any = [
        *ASKED,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "ra\nin"},
        {"role": "user", "content": "So?\nWell?"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    same = chat(server, messages=history, tools=tools)["usage"]["prompt_tokens"]
    assert got["usage"]["input_tokens"] == same
    body = {"model": "tiny", "messages": back, "tools": [WEATHER]}
    assert server.http.post(COUNT, json=body).json() == {"input_tokens": same}


def test_how_an_answer_ends(server: Any, say: Say) -> None:
    say("One two three.")
    got = ask(server, stop_sequences=["three", "two"])
    assert got["content"] == [{"type": "text", "text": "One "}]
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "two")
    say("One two<s> three.")  # a special token, whose text is in no answer
    got = ask(server, stop_sequences=["three", "<s>", "two!"])
    assert got["content"] == [{"type": "text", "text": "One two"}]
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "<s>")
    assert ask(server)["content"] == [{"type": "text", "text": "One two three."}]
    say(f"{CALL}\n{CALL}")
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(server, tools=[WEATHER])["content"]) == 2
    assert len(ask(server, tools=[WEATHER], tool_choice=one)["content"]) == 1
    untold = ask(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["type"] for block in untold["content"]] == ["text"]
    say("")
    assert ask(server)["content"] == []


def test_thinking_turns_the_switch_of_the_template(server: Any, say: Say) -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    say("Yes.", template=QWEN3_OPENED)
    kinds = [
        [block["type"] for block in ask(server, **more)["content"]]
        for more in ({}, {"thinking": enabled}, {"thinking": {"type": "adaptive"}})
    ]
    assert kinds == [["thinking"]] * 3
    assert ask(server, thinking={"type": "disabled"})["content"][0]["type"] == "text"
    body = {"model": "tiny", "messages": ASKED, "thinking": {"type": "disabled"}}
    off = chat(server, chat_template_kwargs={"enable_thinking": False})["usage"]
    assert server.http.post(COUNT, json=body).json()["input_tokens"] == off["prompt_tokens"]
    for template, passes, fails, rule in (
        (MINIMAX, enabled, {"type": "disabled"}, "nothing that turns reasoning off"),
        (HERMES, {"type": "disabled"}, enabled, "not known to make it think"),
    ):
        say("Yes.", template=template)
        assert ask(server, thinking=passes)["content"]
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 9, "thinking": fails}
        refused = server.http.post(ROUTE, json=body)
        assert refused.status_code == 400
        assert rule in refused.json()["error"]["message"]


def test_errors_have_anthropics_shape_and_either_key_opens(serve: Any) -> None:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 2}
    with serve(api_key="s3cret", max_body_bytes=2000) as server:
        post = server.http.post
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            refused = post(ROUTE, json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["type"] == "error"
            assert refused.json()["error"]["type"] == "authentication_error"
        version = {"anthropic-version": "2023-06-01"}
        for headers in ({"x-api-key": "s3cret"}, {"authorization": "Bearer s3cret"}):
            assert post(f"{ROUTE}?beta=true", json=body, headers=headers | version).is_success
        key = {"x-api-key": "s3cret"}
        for path, sent, status, kind in (
            (ROUTE, body | {"model": "other"}, 404, "not_found_error"),
            (COUNT, {"model": "other", "messages": ASKED}, 404, "not_found_error"),
            (f"{ROUTE}/batches", {}, 404, "not_found_error"),
            (ROUTE, body | {"system": "x" * 3000}, 413, "request_too_large"),
            (ROUTE, body | {"max_tokens": 10_000}, 400, "invalid_request_error"),
        ):
            refused = post(path, json=sent, headers=key)
            assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)


def turn(*blocks: Any, role: str = "user") -> list[Any]:
    return [*ASKED, {"role": role, "content": list(blocks)}]


USE: Any = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("messages", [], "messages: List should have at least 1 item"),
        ("messages", turn(), "messages.1.content' is missing"),
        ("messages", turn({"type": "image", "source": {}}), "an image must be a data URL"),
        ("messages", turn(USE), "a block of type tool_use is not of role user"),
        ("messages", turn({"type": "redacted_thinking", "data": "x"}), "the type may be"),
        ("messages", turn(USE, role="assistant"), "calls tools, and cannot be continued"),
        ("messages", [{"role": "tool", "content": "x"}], "messages.0.role"),
        ("max_tokens", None, "'max_tokens' is missing"),
        ("system", [{"type": "image"}], "only text is supported"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "the client runs them"),
        ("tools", [{"name": "f"}], "input_schema' is missing"),
        ("tools", [WEATHER, WEATHER], "'weather' is there twice"),
        ("tool_choice", {"type": "any"}, "only with tools"),
        ("tool_choice", {"type": "tool"}, "the type tool, and no other, has a name"),
        ("tool_choice", {"type": "tool", "name": "f"}, "there is no tool 'f'"),
        ("thinking", {"type": "enabled", "display": "omitted"}, "thinking.display"),
        ("output_config", {"effort": "high"}, "does not read a reasoning effort"),
        ("temperature", 1.5, "temperature"),
        ("output_config", {"effort": "none"}, "contradict each other"),
        ("stop_sequences", "x", "stop_sequences"),
        ("context_management", {"edits": [{"type": "x"}]}, "context_management is not supported"),
        ("mcp_servers", [{}], "mcp_servers is not supported: the client runs all tools"),
        ("container", "x", "container is not supported"),
        ("n", 2, "unknown field 'n'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(server: Any, field: str, value: Any, rule: str) -> None:
    thinking = {"type": "enabled"} if value == {"effort": "none"} else None
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 9, "thinking": thinking}
    body |= {field: value}
    refused = server.http.post(ROUTE, json=body)
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert rule in refused.json()["error"]["message"]


def test_wrong_types_never_break_the_server(server: Any) -> None:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 1}
    fields = [*MessagesRequest.model_fields, *UNSUPPORTED["messages"]]
    check_wrong_types(server.http, ROUTE, body, fields)
    assert server.is_idle()


def test_threads_are_refused_so_that_the_client_goes_on_without(server: Any) -> None:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 9, "thread": {"type": "create"}}
    error = server.http.post(ROUTE, json=body).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_what_asks_for_nothing_passes(server: Any) -> None:
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    neutral = {"service_tier": "auto", "context_management": keeps, "mcp_servers": [], **LABEL}
    assert ask(server, max_tokens=2, **neutral, speed="standard", stop_sequences=[])["content"]
