"""Any JSON to any route: an answer or a refusal in the API's shape, and the next request is served.

Bodies are good ones with one or two places changed for anything, so that they come far. Many more:

    python -m pytest tests/moe/server/test_any_body.py --hypothesis-profile hostile
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe import MoE
from tests.moe.server.conftest import TAKES, forget_habits
from tests.moe.text.tool_calls.templates import QWEN3_CODER

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["x"]}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ABOUT = {"name": "f", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": ABOUT}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "c"},
]
SAMPLING = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 2},
    **{"stop": ["z"], "stop_token_ids": [3], "logit_bias": {"5": 1.0}, "metadata": {"a": "b"}},
}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "7"},
]
BLOCKS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]},
]
TOLD = [{"name": "f", "input_schema": SCHEMA}]
# What other servers have answered, and tools that are no functions.
PATCH = {"name": "g", "format": {"type": "text"}}
TOOLS = [TOOL, {"type": "custom", "custom": PATCH}, {"type": "web_search"}]
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
OTHERS = [
    TURNS[0],
    {"role": "assistant", "content": None, "refusal": "No.", "reasoning_details": [{"text": "a"}]},
    {"role": "user", "content": "hi", "weight": 1},
]
OTHER_TOOLS = [
    {"type": "namespace", "name": "n", "tools": [ABOUT | {"type": "function"}]},
    {"type": "custom", **PATCH},
]
OTHER_ITEMS = [
    *ITEMS,
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_file"}]},
]
OTHER_BLOCKS = [
    BLOCKS[0],
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
    {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": TURNS, "max_tokens": 2, "tools": [TOOL], **SAMPLING, "logprobs": True}),
    (CHAT, {"messages": TURNS[:1], "max_tokens": 2, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": TURNS[:1], "max_tokens": 2, "response_format": FORMAT}),
    (TEXT, {"prompt": [[5], [6]], "max_tokens": 2, **SAMPLING, "logprobs": 1, "echo": True}),
    (TEXT, {"prompt": "hi", "max_tokens": 2, "structured_outputs": {"grammar": 'start: "a"'}}),
    (
        "/v1/responses",
        {"input": ITEMS, "max_output_tokens": 2, "tools": [ABOUT | {"type": "function"}]},
    ),
    ("/v1/messages", {"messages": BLOCKS, "max_tokens": 2, "tools": TOLD}),
    (
        "/v1/messages",
        {"messages": BLOCKS[:1], "max_tokens": 2, "tools": TOLD, "tool_choice": {"type": "any"}},
    ),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "tools": TOLD}),
    (CHAT, {"messages": OTHERS, "max_tokens": 2, "tools": TOOLS, "tool_choice": ALLOWED}),
    ("/v1/responses", {"input": OTHER_ITEMS, "max_output_tokens": 2, "tools": OTHER_TOOLS}),
    ("/v1/messages", {"messages": OTHER_BLOCKS, "max_tokens": 2, "thinking": {"type": "x"}}),
    (CHAT, {"messages": TURNS, "max_tokens": 2, "stream": True, "tools": [TOOL], **SAMPLING}),
    ("/v1/responses", {"input": ITEMS, "max_output_tokens": 2, "stream": True}),
    ("/v1/messages", {"messages": BLOCKS, "max_tokens": 2, "tools": TOLD, "stream": True}),
    ("/v1/responses/input_tokens", {"input": ITEMS, "tools": [ABOUT | {"type": "function"}]}),
    ("/v1/experts/tokens", {"prompt": "hi"}),
    ("/tokenize", {"messages": TURNS}),
    ("/detokenize", {"tokens": [5, 6]}),
]
GOOD = [(route, {"model": "tiny"} | body) for route, body in _GOOD]
ODD = [
    *(None, True, 0, -1, 2**63, 10**400, 1e308, float("inf"), float("nan"), "", "\0", "\ud800"),
    *({"$ref": "#"}, {"type": "object", "required": 5}, {"type": "string", "enum": 5}, [[]], {}),
    *("a" * 5000, [0] * 5000, json.loads("[" * 199 + "]" * 199), "start: start", '{"a": 1e999}'),
]
ANYTHING = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield from places(tree[key], (*place, key))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    route, body = deepcopy(draw(st.sampled_from(GOOD)))
    limits = {key: body[key] for key in body if key.startswith("max_")}  # else it takes a while
    for _ in range(draw(st.integers(0, 2))):
        *outer, last = draw(st.sampled_from(list(places(body))))
        inner: Any = body
        for key in outer:
            inner = inner[key]
        if draw(st.integers(0, 4)):
            inner[last] = deepcopy(draw(ANYTHING))
        else:
            del inner[last]
    return route, json.dumps(limits | body).encode()


@pytest.fixture(scope="module")
def demo(serve: Any) -> Iterator[Any]:
    """The shipped model, which follows structures, with a template that takes tools."""
    model = MoE.from_pretrained(Path(__file__).parents[3] / "examples" / "demo-model")
    assert model.codec.tokenizer is not None
    model.codec.tokenizer.chat_template = QWEN3_CODER
    forget_habits(model)
    with serve(load=lambda: model) as server:
        server.http.timeout = 600  # a busy machine is no answer
        yield server


@TAKES
def test_good_bodies_of_all_routes_are_good(demo: Any) -> None:
    paths = demo.http.get("/openapi.json").json()["paths"]
    assert {route for route, _ in GOOD} == {path for path in paths if "post" in paths[path]}
    for route, body in GOOD:
        answer = demo.http.post(route, json=body)
        assert answer.status_code == 200, (route, answer.text)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(bodies())
def test_any_body_is_answered_or_refused(demo: Any, made: tuple[str, bytes]) -> None:
    route, body = made
    headers = {"content-type": "application/json"}
    answer = demo.http.post(route, content=body, headers=headers)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) >= {"message", "type"} | ({"param"} if "messages" not in route else set())
        assert 0 < len(error["message"]) < 1000
        for internal in ("Traceback", "instance of", "literal[", "/moe/"):
            assert internal not in error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in answer.text
        assert "api_error" not in answer.text
    good = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    assert demo.http.post(TEXT, json=good).status_code == 200
    assert demo.is_idle()
