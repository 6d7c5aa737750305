"""Conversations as clients send them back, with what other servers have answered, in all dialects.

What a history amounts to is seen in its prompt: the same as of a plain conversation.
"""

from __future__ import annotations

from typing import Any

import pytest

from moe.server.anthropic import MessagesRequest
from moe.server.errors import APIError
from moe.server.ignored import HEADER
from moe.server.openai.request import ChatRequest
from moe.server.responses import ResponsesRequest
from tests.moe.server.conftest import TAKES, Say
from tests.moe.server.test_messages import ASKED
from tests.moe.server.test_unknown_fields import parsed

CALL: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TEXT = {"type": "text", "text": "A"}
PIXEL = "data:image/png;base64,AAAA"
NO_IMAGE = "[image: this model reads text only]"


def turns_of(model: Any, said: Any) -> list[dict[str, Any]]:
    """The messages of the chat that a history amounts to, without the question before it."""
    if model is ResponsesRequest:
        body, _ = parsed(model, input=[*ASKED, *said])
    else:
        body, _ = parsed(model, messages=[*ASKED, *said])
    chat = body if model is ChatRequest else body.chat
    (made,) = chat.prompts
    return list(made[1:])


def answer(**fields: Any) -> list[Any]:
    return [{"role": "assistant", **fields}]


def result(content: Any) -> list[Any]:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    return [*answer(content=[use]), {"role": "user", "content": [block]}]


@pytest.mark.parametrize(
    ("model", "said", "content", "more"),
    [
        (ChatRequest, answer(content=[]), "", {}),
        (ChatRequest, answer(content=None, tool_calls=[]), "", {}),
        (ChatRequest, answer(), "", {}),
        (ChatRequest, answer(content="A", refusal=None, annotations=[], audio=None), "A", {}),
        (ChatRequest, answer(content=None, refusal="No."), "No.", {}),
        (ChatRequest, answer(content=[{"type": "refusal", "refusal": "No."}]), "No.", {}),
        (
            ChatRequest,
            answer(content="A", reasoning_details=[{"type": "reasoning.text", "text": "hm"}]),
            "A",
            {"reasoning_content": "hm"},
        ),
        (ChatRequest, answer(content="", tool_calls=[CALL | {"index": 0}]), "", {"tool_calls": 1}),
        (MessagesRequest, answer(content=[]), "", {}),
        (MessagesRequest, answer(content=""), "", {}),
        (
            MessagesRequest,
            answer(
                content=[{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A"}]
            ),
            "A",
            {},
        ),
        (
            MessagesRequest,
            answer(
                content=[
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {"type": "text", "text": "A", "citations": [{"type": "x"}]},
                ]
            ),
            "[server_tool_use web_search: cannot be read here]\n"
            "[web_search_tool_result: cannot be read here]\nA",
            {},
        ),
        (ResponsesRequest, answer(type="message", content=[]), "", {}),
        (
            ResponsesRequest,
            answer(content=[{"type": "output_text", "text": "A", "annotations": [{"a": 1}]}]),
            "A",
            {},
        ),
        (ResponsesRequest, answer(content=[{"type": "refusal", "refusal": "No."}]), "No.", {}),
        (
            ResponsesRequest,
            [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
                | {"encrypted_content": "x"},
                {"type": "web_search_call", "id": "w", "status": "completed"},
                *answer(content="A"),
            ],
            "A",
            {"reasoning_content": "hm"},
        ),
    ],
)
def test_answers_go_back(model: Any, said: Any, content: str, more: Any) -> None:
    (turn,) = turns_of(model, said)
    assert (turn["role"], turn["content"]) == ("assistant", content)
    for name, value in more.items():
        assert turn[name] == value or len(turn[name]) == value
    assert turn.keys() == {"role", "content", *more}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "text", "text": "A"}, "A"),
        ({"type": "document", "source": {"type": "text", "data": "B"}, "title": "T"}, "T\nB"),
        (
            {"type": "document", "source": {"type": "base64", "data": "x"}, "title": "a.pdf"},
            "[document a.pdf: cannot be read here]",
        ),
        (
            {"type": "search_result", "source": "u", "title": "T"}
            | {"content": [{"type": "text", "text": "B"}]},
            "T (u)\nB",
        ),
        (
            {"type": "tool_reference", "tool_name": "f"},
            "[tool_reference f: cannot be read here]",
        ),
        ({"type": "input_file", "filename": "a.pdf"}, "[input_file a.pdf: cannot be read here]"),
        ({"type": "input_audio", "input_audio": {}}, "[input_audio: cannot be read here]"),
    ],
)
def test_what_a_tool_returned_is_read_or_becomes_a_line(part: Any, text: str) -> None:
    for model, said in (
        (MessagesRequest, result([part])),
        (
            ChatRequest,
            [
                *answer(content="", tool_calls=[CALL]),
                {"role": "tool", "tool_call_id": "c1", "content": [part]},
            ],
        ),
        (
            ResponsesRequest,
            [
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [part]},
            ],
        ),
    ):
        assert turns_of(model, said)[1]["content"] == text


@TAKES
def test_images_of_tools_are_read_or_become_a_line(server: Any, strict: Any, say: Say) -> None:
    """On all three routes; those of the user stay refused, as the model would not see them."""
    say("Yes.")
    url = {"type": "image_url", "image_url": {"url": PIXEL}}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    text = "Look:"
    chats = [*ASKED, *answer(content=None, tool_calls=[CALL])]
    seen = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": text}, url]}
    items = [
        *ASKED,
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            **{"type": "function_call_output", "call_id": "c1"},
            "output": [
                {"type": "input_text", "text": text},
                {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
            ],
        },
    ]
    blocks = [
        *ASKED,
        *result([{"type": "text", "text": text}, {"type": "image", "source": source}]),
    ]
    plain = {"messages": [*chats, seen | {"content": f"{text}\n{NO_IMAGE}"}], "max_tokens": 9}
    chat = server.http.post("/v1/chat/completions", json=plain)
    expected = chat.json()["usage"]["prompt_tokens"]
    for route, body in (
        ("/v1/chat/completions", {"messages": [*chats, seen], "max_tokens": 9}),
        ("/v1/responses", {"input": items, "max_output_tokens": 9}),
        ("/v1/messages", {"messages": blocks, "max_tokens": 9, "model": "tiny"}),
    ):
        got = server.http.post(route, json=body)
        assert got.status_code == 200, got.text
        assert got.headers[HEADER] == "messages.content.image"
        usage = got.json()["usage"]
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == expected
        assert strict.http.post(route, json=body).status_code == 400
    asked = [{"role": "user", "content": [url]}]
    refused = server.http.post("/v1/chat/completions", json={"messages": asked})
    assert refused.status_code == 400
    assert "reads text only" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "said", "rule"),
    [
        (ChatRequest, [{"role": "user", "content": None}], "content is missing"),
        (ChatRequest, answer(function_call={"name": "f", "arguments": "{}"}), "send tool_calls"),
        (ChatRequest, [{"role": "user", "content": [{"type": "video_url"}]}], "only text is"),
        (MessagesRequest, [{"role": "user", "content": []}], "content' is missing"),
        (
            MessagesRequest,
            [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}],
            "the type may be",
        ),
        (ResponsesRequest, [{"type": "item_reference", "id": "x"}], "send the item itself"),
        (ResponsesRequest, [{"type": "compaction", "encrypted_content": "x"}], "conversation"),
    ],
)
def test_what_cannot_be_left_out_is_refused(model: Any, said: Any, rule: str) -> None:
    with pytest.raises(APIError, match=rule):
        turns_of(model, said)


def test_calls_of_other_tools_become_calls_of_functions() -> None:
    said = [
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"type": "local_shell_call", "call_id": "b", "status": "completed"}
        | {"action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "b", "output": "x"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "x"}]},
    ]
    turns = turns_of(ResponsesRequest, said)
    assert [turn["role"] for turn in turns] == ["assistant", "tool"] * 3
    functions = [turn["tool_calls"][0]["function"] for turn in turns[::2]]
    assert functions[0] == {"name": "patch", "arguments": '{"input": "*** x"}'}
    assert [each["name"] for each in functions] == ["patch", "local_shell", "shell"]
    assert '"command": ["ls"]' in functions[1]["arguments"]
    assert [turn["content"] for turn in turns[1::2]] == ["done", "x", '[{"stdout": "x"}]']
    assert [turn["tool_call_id"] for turn in turns[1::2]] == ["a", "b", "d"]
