"""Lengths of answers: limits of reasoning, least tokens, and contexts that are too short."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe import MoE
from tests.moe.server.conftest import TAKES, forget_habits
from tests.moe.server.test_messages import ASKED
from tests.moe.text.tool_calls.reasoning_templates import QWEN3_OPENED

CHAT, MESSAGES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/completions"


@pytest.fixture(scope="module")
def demo(serve: Any) -> Iterator[Any]:
    """The shipped model, which has never been taught to think or to stop it."""
    model = MoE.from_pretrained(Path(__file__).parents[3] / "examples" / "demo-model")
    assert model.codec.tokenizer is not None
    model.codec.tokenizer.chat_template = QWEN3_OPENED
    forget_habits(model)
    with serve(load=lambda: model) as server:
        yield server


def post(server: Any, route: str, **body: Any) -> Any:
    answer = server.http.post(route, json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    assert "x-moe-ignored" not in answer.headers
    return answer.json()


@pytest.mark.parametrize("budget", [1, 7])
def test_the_budget_of_thinking_is_kept_to(demo: Any, budget: int) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    close = len(demo.http.post("/tokenize", json={"prompt": "</think>"}).json()["tokens"])
    asked: Any = {"messages": ASKED, "max_tokens": budget + close + 9}
    free = post(demo, MESSAGES, **asked)
    assert [block["type"] for block in free["content"]] == ["thinking"]
    for stream in (False, True):
        body = {"model": "tiny", **asked, "thinking": thinking, "stream": stream}
        answer = demo.http.post(MESSAGES, json=body)
        assert "x-moe-ignored" not in answer.headers
        if stream:
            kinds = re.findall(r'"content_block":\{"type":"(\w+)"', answer.text)
            assert kinds == ["thinking", "text"]
            continue
        got = answer.json()
        thought, said = got["content"]
        assert said["text"]
        assert got["usage"]["output_tokens_details"] == {"thinking_tokens": budget + close}
        assert free["content"][0]["thinking"].startswith(thought["thinking"].strip())
    chat = post(demo, CHAT, **asked, thinking_token_budget=budget)
    assert chat["choices"][0]["message"]["content"] == said["text"]
    none = post(demo, CHAT, **asked, thinking_token_budget=0)["choices"][0]["message"]
    assert "reasoning_content" not in none
    assert none["content"]


def test_the_budget_leaves_room_for_a_structure(demo: Any) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
    schema |= {"required": ["a"]}
    schema |= {"additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: Any = {"messages": ASKED, "response_format": format, "max_tokens": 200}
    said = post(demo, CHAT, **asked, thinking_token_budget=3)["choices"][0]["message"]
    assert json.loads(said["content"])["a"] in (1, 2)


def test_least_tokens_and_token_ids(server: Any, model: MoE) -> None:
    asked: Any = {"prompt": "hello", "max_tokens": 6, "return_token_ids": True, "temperature": 0}
    (choice,) = post(server, TEXT, **asked)["choices"]
    assert choice["prompt_token_ids"] == model.codec.encode("hello")
    assert len(choice["token_ids"]) == 6
    assert model.codec.decode(choice["token_ids"]) == choice["text"]
    second = choice["token_ids"][1]
    stopped: Any = asked | {"stop_token_ids": [second]}
    assert len(post(server, TEXT, **stopped)["choices"][0]["token_ids"]) <= 2
    least = post(server, TEXT, **stopped, min_tokens=4)["choices"][0]["token_ids"]
    assert len(least) >= 4
    assert second not in least[:4]
    stop = choice["text"][1]
    late = post(server, TEXT, **asked, stop=stop, min_tokens=3)["choices"][0]
    assert late["token_ids"][:3] == choice["token_ids"][:3]
    for n, route, more in ((2, TEXT, {"prompt": ["a", "bc"]}), (2, CHAT, {"messages": ASKED})):
        body: Any = {"n": n, "max_tokens": 2, "return_token_ids": True, "ignore_eos": True} | more
        whole = post(server, route, **body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = server.http.post(route, json=body | {"stream": True, "stream_options": options})
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[6:7] == "{"]
        parts = [part for chunk in chunks for part in chunk["choices"]]
        for own in whole["choices"]:
            mine = [part for part in parts if part["index"] == own["index"]]
            assert len([i for part in mine for i in part.get("token_ids", [])]) == 2
            told = [part["prompt_token_ids"] for part in mine if "prompt_token_ids" in part]
            assert told == ([own["prompt_token_ids"]] if route == TEXT else [])
        if route == CHAT:
            told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
            assert told == [whole["prompt_token_ids"]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 2 * len(whole["choices"])


@TAKES
def test_no_limit_is_the_room_there_is(server: Any, model: MoE) -> None:
    asked: Any = {"max_tokens": -1, "ignore_eos": True}
    usage = post(server, TEXT, prompt="hello", **asked)["usage"]
    assert usage["total_tokens"] == model.context_length
    assert post(server, CHAT, messages=ASKED, **asked)["usage"]["total_tokens"] == 256


def turns(length: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x" * length}]


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        (CHAT, {"messages": ASKED, "max_tokens": 10_000}, "This model's maximum context length"),
        (TEXT, {"prompt": "x" * 300, "max_tokens": 2}, "This model's maximum context length"),
        (TEXT, {"prompt": "x" * 9999}, "This model's maximum context length"),
        ("/v1/responses", {"input": "x" * 300}, "This model's maximum context length"),
        (MESSAGES, {"messages": ASKED, "max_tokens": 10_000}, "input length and `max_tokens`"),
        (MESSAGES, {"messages": [ASKED[0] | {"content": "x" * 300}], "max_tokens": 9}, "prompt is"),
        (
            MESSAGES,
            {"messages": [ASKED[0] | {"content": "x" * 9999}], "max_tokens": 9},
            "prompt is",
        ),
    ],
)
def test_clients_know_a_context_error(server: Any, route: str, body: Any, words: str) -> None:
    """By the expressions that Claude Code and litellm look for."""
    refused = server.http.post(route, json={"model": "tiny"} | body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"].startswith(words)
    if route != MESSAGES:
        assert error["code"] == "context_length_exceeded"
        limit, asked = re.findall(
            r"maximum context length is (\d+) tokens. However, you requested (\d+) tokens",
            error["message"],
        )[0]
        assert int(asked) > int(limit) == 256
        return
    assert error["details"] == {"error_code": "context_length_exceeded"}
    if words == "prompt is":
        pattern = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
        actual, most = map(int, re.findall(pattern, error["message"])[0])
        assert actual > most
    else:
        pattern = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
        prompt, new, most = map(int, re.findall(pattern, error["message"])[0])
        assert prompt + new > most > prompt
