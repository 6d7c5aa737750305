"""The pages on the server and the code say the same, and their examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from moe import MoE
from moe.server import anthropic, responses
from moe.server import anthropic as turns
from moe.server import response_items as items
from moe.server.openai.request import ChatMessage, ChatRequest, CompletionRequest
from moe.server.routes import DetokenizeRequest, TokenizeRequest
from moe.settings import ServerSettings
from tests.moe.text.tool_calls.templates import HERMES

ROOT = Path(__file__).parents[3]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("server.md", "watching.md"))
EXAMPLES = re.findall(r"```json\n(\{\"model\": \"MODEL\".*?)```", PAGE, re.DOTALL)


def test_every_field_is_named() -> None:
    fields = set[str]()
    bodies: list[type[BaseModel]] = [ChatRequest, CompletionRequest, ChatMessage, TokenizeRequest]
    bodies += [DetokenizeRequest, responses.ResponsesRequest, anthropic.MessagesRequest]
    bodies += [
        items.MessageItem,
        items.ReasoningItem,
        items.FunctionCallItem,
        items.FunctionOutputItem,
    ]
    bodies += [turns.InputMessage, turns.ThinkingBlock, turns.ToolUseBlock, turns.ToolResultBlock]
    bodies += [anthropic.Thinking, anthropic.MessagesToolChoice, anthropic.OutputConfig]
    for body in bodies:
        fields |= body.model_fields.keys()
    assert sorted(field for field in fields if f"`{field}" not in PAGE) == []


def test_every_route_is_named(server: Any) -> None:
    for path, methods in server.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path.replace(':path', '')}`" in PAGE, path


def test_every_code_and_limit_is_named() -> None:
    sources = [file.read_text() for file in (ROOT / "moe" / "server").rglob("*.py")]
    codes = {code for text in sources for code in re.findall(r'\bcode="(\w+)"', text)}
    codes |= {"context_length_exceeded", "loading", "failed"}
    assert len(codes) > 10
    assert sorted(code for code in codes if f"`{code}`" not in PAGE) == []
    assert [name for name in ServerSettings.model_fields if f"`server.{name}`" not in PAGE] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_work(example: str, serve: Any) -> None:
    model = MoE.from_pretrained(ROOT / "examples" / "demo-model")
    assert model.codec.tokenizer is not None
    model.codec.tokenizer.chat_template = HERMES
    with serve(load=lambda: model) as server:
        body = json.loads(example) | {"model": "tiny", "seed": 1}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        call = (choice["message"].get("tool_calls") or [{"function": {}}])[0]["function"]
        said = call.get("arguments", choice["message"]["content"])
        assert json.loads(said).keys() == {"city"}
