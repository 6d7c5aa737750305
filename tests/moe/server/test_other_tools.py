"""Tools beside functions: of one text, in namespaces, of servers; and those that are allowed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from moe.server.anthropic import MessagesRequest
from moe.server.errors import APIError
from moe.server.ignored import HEADER
from moe.server.openai.request import ChatRequest
from moe.server.openai.tools import CUSTOM_INPUT
from moe.server.responses import ResponsesRequest
from tests.moe.server.conftest import TAKES, Say
from tests.moe.server.test_messages import ASKED
from tests.moe.server.test_unknown_fields import parsed
from tests.moe.server.wire import events_of

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
PATCH: Any = {"name": "patch", "description": "Edits."}
GRAMMAR: Any = {"syntax": "lark", "definition": 'start: "x"'}


def function(name: str) -> Any:
    return {"type": "function", "name": name, "parameters": SCHEMA}


def chat_function(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def space(name: str, *tools: Any) -> Any:
    return {"type": "namespace", "name": name, "description": f"Of {name}.", "tools": list(tools)}


def said(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def test_a_tool_with_one_text_is_a_function_for_the_model(
    client: openai.OpenAI, server: Any, say: Say
) -> None:
    say(said("patch", {"input": "*** x"}))
    tools: Any = [{"type": "custom", "custom": PATCH}]
    asked: Any = {"model": "tiny", "messages": ASKED, "tools": tools}
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("patch", "*** x")
    chunks = server.http.post("/v1/chat/completions", json=asked | {"stream": True}).text
    (streamed,) = [json.loads(line[6:]) for line in chunks.splitlines() if '"custom"' in line]
    (delta,) = streamed["choices"][0]["delta"]["tool_calls"]
    assert delta["custom"] == {"name": "patch", "input": "*** x"}
    say("Done.")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    asked["messages"] = [*ASKED, choice.message, result]
    assert client.chat.completions.create(**asked).choices[0].message.content == "Done."
    body, names = parsed(ChatRequest, tools=tools)
    function = {"name": "patch", "description": "Edits.", "parameters": CUSTOM_INPUT}
    assert body.offered_tools == [{"type": "function", "function": function}]
    assert names == []


@TAKES
def test_responses_answer_such_a_tool_with_items_of_its_own(
    client: openai.OpenAI, server: Any, say: Say
) -> None:
    say(said("patch", {"input": "*** x"}))
    tool = {"type": "custom", **PATCH, "format": {"type": "grammar", **GRAMMAR}}
    body: Any = {"model": "tiny", "input": "Go", "tools": [tool]}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.headers[HEADER] == "tools.format"
    with client.responses.stream(**body) as stream:
        kinds = [event.type for event in stream]
        found: list[Any] = list(stream.get_final_response().output)
    (item,) = found
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "*** x")
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    say("Done.")
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    body["input"] = [*ASKED, item.to_dict(), output]
    assert client.responses.create(**body).output_text == "Done."
    offered = parsed(ResponsesRequest, tools=[tool])[0].chat.offered_tools
    assert 'lark grammar:\nstart: "x"' in offered[0]["function"]["description"]


def test_namespaces_are_flattened_and_answered(server: Any, say: Say) -> None:
    tools = [
        space("mcp/git", function("find"), {"type": "custom", **PATCH}),
        space("web", function("find"), function("open")),
        function("weather"),
    ]
    chat = parsed(ResponsesRequest, tools=tools)[0].chat
    names = [tool["function"]["name"] for tool in chat.offered_tools]
    assert names == ["mcp_git__find", "patch", "web__find", "open", "weather"]
    assert chat.offered_tools[3]["function"]["description"] == "Of web."
    body: Any = {"model": "tiny", "input": "Go", "tools": tools}
    for name, own, namespace in (
        ("web__find", "find", "web"),
        ("open", "open", "web"),
        ("weather", "weather", None),
    ):
        say(said(name, {"city": "Ulm"}))
        (item,) = server.http.post("/v1/responses", json=body).json()["output"]
        assert (item["name"], item.get("namespace")) == (own, namespace)
        done = [e for e in events_of(server.http, "/v1/responses", body) if "arguments" in e]
        assert done[0]["name"] == own
        history = [*ASKED, item, {"type": "function_call_output", "call_id": item["call_id"]}]
        again, _ = parsed(ResponsesRequest, tools=tools, input=history)
        assert again.chat.messages[1].tool_calls[0].function.name == name


MANY = [f"f{i}" for i in range(500)]


@pytest.mark.parametrize(
    ("model", "tools", "left", "named"),
    [
        (
            ResponsesRequest,
            [{"type": "web_search"}, {"type": "local_shell"}, function("f"), {"type": "mcp"}],
            ["f"],
            ["tools.web_search", "tools.local_shell", "tools.mcp"],
        ),
        (
            MessagesRequest,
            [
                {"type": "web_search_20250305", "name": "web_search"},
                {"name": "f", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
                | {"allowed_callers": ["direct"], "eager_input_streaming": True},
            ],
            ["f"],
            ["tools.web_search_20250305"],
        ),
        (
            MessagesRequest,
            [{"name": "f", "input_schema": SCHEMA, "input_examples": [{}], "defer_loading": False}],
            ["f"],
            ["tools.defer_loading", "tools.input_examples"],
        ),
        (ChatRequest, [{"type": "x_search"}, chat_function("f")], ["f"], ["tools.x_search"]),
        (ChatRequest, [{"type": "x_search"}], [], ["tools.x_search"]),
        (
            ChatRequest,
            [chat_function(f"f{i}") for i in range(500)],
            [f"f{i}" for i in range(500)],
            [],
        ),
    ],
)
def test_tools_of_servers_are_left_out(model: Any, tools: Any, left: Any, named: Any) -> None:
    body, names = parsed(model, tools=tools)
    chat = body if model is ChatRequest else body.chat
    assert [tool.function.name for tool in chat.tools] == left
    assert sorted(names) == sorted(named)
    if not left:
        assert chat.offered_tools is None


@pytest.mark.parametrize(
    ("model", "more", "rule"),
    [
        (ChatRequest, {"tools": [{"type": "web"}], "tool_choice": "required"}, "only with tools"),
        (
            MessagesRequest,
            {"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}},
            "only with tools that the client runs",
        ),
        (
            ResponsesRequest,
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tools of the type 'web_search' are run by servers, and this one runs none",
        ),
        (
            ResponsesRequest,
            {"tools": [space("a", function("f"), function("f"))]},
            "'a__f' is there twice",
        ),
        (ChatRequest, {"tools": [chat_function(f"f{i}") for i in range(2049)]}, "at most 2048"),
        (ChatRequest, {"tools": [{"type": "custom"}]}, "has custom with its name"),
    ],
)
def test_what_has_to_be_called_must_be_the_clients(model: Any, more: Any, rule: str) -> None:
    with pytest.raises(APIError, match=rule):
        parsed(model, **more)


def allowed(mode: str, *tools: Any) -> Any:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def test_only_allowed_tools_are_seen() -> None:
    named = [{"type": "function", "name": "b"}]
    body, _ = parsed(
        ResponsesRequest,
        tools=[function("a"), function("b"), {"type": "web_search"}],
        tool_choice=allowed("required", *named, {"type": "web_search"}),
    )
    assert [tool["function"]["name"] for tool in body.chat.offered_tools] == ["b"]
    assert body.chat.tool_choice == "required"
    inner = {"mode": "auto", "tools": [chat_function("b"), {"type": "custom", "custom": PATCH}]}
    chat, _ = parsed(
        ChatRequest,
        tools=[chat_function("a"), chat_function("b"), {"type": "custom", "custom": PATCH}],
        tool_choice={"type": "allowed_tools", "allowed_tools": inner},
    )
    assert [tool.function.name for tool in chat.tools] == ["b", "patch"]
    assert chat.tool_choice == "auto"
    for choice, rule in (
        (allowed("none", *named), "a mode, auto or required"),
        (allowed("auto"), "and tools"),
        (allowed("auto", {"type": "function", "name": "z"}), "there is no tool 'z'"),
        (allowed("auto", *named * 3000), "a list of at most 2048"),
    ):
        with pytest.raises(APIError, match=rule):
            parsed(ResponsesRequest, tools=[function("b")], tool_choice=choice)
    custom, _ = parsed(
        ChatRequest,
        tools=[{"type": "custom", "custom": PATCH}],
        tool_choice={"type": "custom", "custom": {"name": "patch"}},
    )
    assert custom.tool_choice.function.name == "patch"
