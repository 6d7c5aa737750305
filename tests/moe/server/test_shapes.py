"""Requests with the fields and the structure that clients of today send, in words of our own.

`make world` runs the clients themselves (tests/world); what each of them sends was read from there,
and stands here so that nothing needs to be installed. The versions say when it was looked at.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.moe.server.conftest import TAKES, Running, Say

pytestmark = TAKES
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Where it is."},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "labels": {"type": "object", "propertyNames": {"type": "string"}},
        "mode": {"anyOf": [{"const": "text"}, {"enum": ["lines", "bytes"]}], "default": "text"},
    },
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Others.",
    "tools": [{"type": "function", "strict": False, **FUNCTION, "name": "close"}],
}
CACHED = {"cache_control": {"type": "ephemeral"}}

# Claude Code 2.1: a system message behind the user's, an effort, edits of the context.
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 2000,
    "stream": True,
    "system": [{"type": "text", "text": text, **CACHED} for text in ("You help.", "Be short.")],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>Be kind.</reminder>"},
                {"type": "text", "text": "Read a.txt.", **CACHED},
            ],
        },
        {"role": "system", "content": "Agents: none."},
    ],
    "tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}],
    "metadata": {"user_id": '{"device": "d"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
# What it sends with the tool's result: the answer as it came.
CLAUDE_CODE_RESULT: dict[str, Any] = CLAUDE_CODE | {
    "messages": [
        *CLAUDE_CODE["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A file.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "heron", **CACHED}
            ],
        },
    ],
}
# Codex 0.171: no `instructions`, but developer messages with ids; tools in a namespace.
CODEX: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": f"msg_{number}",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for number, (role, text) in enumerate(
            [
                ("developer", "You write code."),
                ("developer", "Ask first."),
                ("user", "<cwd>/here</cwd>"),
                ("user", "Read a.txt."),
            ]
        )
    ],
    "tools": [{"type": "function", "strict": False, **FUNCTION}, NAMESPACE],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"session_id": "01a2", "turn_id": "01a3"},
}
CODEX_RESULT: dict[str, Any] = CODEX | {
    "input": [
        *CODEX["input"],
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "A file."}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "name": "read",
            "arguments": '{"path": "a.txt"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "heron"},
    ],
}
ASKED = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Read a.txt."}]
# opencode 1.18, through the AI SDK.
OPENCODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 1000,
    "messages": ASKED,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
# OpenAI's Python client 3.57: the message that its stream has put together, as it dumps it.
OPENAI_PYTHON: dict[str, Any] = OPENCODE | {
    "messages": [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "index": 0,
                    "id": "abcdefghi",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a.txt"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "heron"},
    ],
}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("route", "body", "name"),
    [
        pytest.param(MESSAGES, CLAUDE_CODE, '"name":"read"', id="Claude Code"),
        pytest.param(RESPONSES, CODEX, '"name":"read"', id="Codex"),
        pytest.param(CHAT, OPENCODE, '"name":"read"', id="opencode"),
    ],
)
def test_an_agents_first_request_is_answered_with_a_call(
    route: str, body: dict[str, Any], name: str, say: Say, server: Running
) -> None:
    say(CALL)
    answer = server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert name in answer.text.replace('": "', '":"')
    assert "error" not in answer.text.replace('"error":null', "")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        pytest.param(MESSAGES, CLAUDE_CODE_RESULT, id="Claude Code"),
        pytest.param(RESPONSES, CODEX_RESULT, id="Codex"),
        pytest.param(CHAT, OPENAI_PYTHON, id="openai"),
    ],
)
def test_what_it_sends_back_is_taken(
    route: str, body: dict[str, Any], say: Say, server: Running
) -> None:
    say("heron")
    whole = {key: value for key, value in body.items() if "stream" not in key}
    answer = server.http.post(route, json=whole)
    assert answer.status_code == 200, answer.text
    assert "heron" in answer.text


LOAD: dict[str, Any] = {"model": "tiny", "stream": True, "ignore_eos": True}
# guidellm 0.8 and llama-benchy 0.4.
GUIDELLM: dict[str, Any] = LOAD | {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "some words"}]}],
    "max_completion_tokens": 8,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
LLAMA_BENCHY: dict[str, Any] = LOAD | {
    "messages": [{"role": "user", "content": "some words"}],
    "max_tokens": 8,
    "min_tokens": 8,
    "return_token_ids": True,
    "cache_prompt": False,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        pytest.param(GUIDELLM, None, id="guidellm"),
        pytest.param(LLAMA_BENCHY, "cache_prompt", id="llama-benchy"),
    ],
)
def test_load_generators_count_the_tokens_that_they_ask_for(
    body: dict[str, Any], ignored: str | None, server: Running
) -> None:
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert '"completion_tokens":8' in answer.text.replace(" ", "")
    assert answer.headers.get("x-moe-ignored") == ignored
