"""The turns of a conversation, as ``/v1/messages`` takes them, and the chat that they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from moe.server.base import Returned
from moe.server.fields import Items, Json, by_type, text_of, text_or
from moe.server.openai.tools import MAX_CALLS, CallId, ToolName, call_of
from moe.tools.reasoning import KEY

_LABELS = ("cache_control", "citations")
Blocks = BeforeValidator(text_of("text", labels=_LABELS, between="\n"))
BlockText = Annotated[str, Blocks]
"""A text, or blocks of text, which become lines."""


class Block(Returned):
    cache_control: dict[str, Any] | None = None
    """Of no effect: known prefixes are found by their tokens."""


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] = Field(default_factory=list, max_length=0)


class ThinkingBlock(Block):
    """What the model thought before what follows."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Of no effect: nothing is signed."""


class UseBlock(Block):
    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]


class ResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: BlockText = ""
    is_error: bool = False
    """Of no effect: the model reads the content."""


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[UseBlock, Tag("tool_use")]
    | Annotated[ResultBlock, Tag("tool_result")],
    by_type("text", "thinking", "tool_use", "tool_result"),
]
_ROLES = {"assistant": (TextBlock, ThinkingBlock, UseBlock), "user": (TextBlock, ResultBlock)}


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Turn(Returned):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[ContentBlock], BeforeValidator(_blocks)] = Field(
        min_length=1, json_schema_extra=text_or
    )

    @model_validator(mode="after")
    def _check_blocks(self) -> Turn:
        for block in self.content:
            if not isinstance(block, _ROLES.get(self.role, TextBlock)):
                raise ValueError(f"a block of type {block.type} is not of role {self.role}")
        if sum(isinstance(block, UseBlock) for block in self.content) > MAX_CALLS:
            raise ValueError(f"a turn may have {MAX_CALLS} calls")
        return self


def conversation(system: str | None, turns: Iterable[Turn]) -> list[Json]:
    """Messages of a chat: results of tools are messages of their own, in their place."""
    made = [] if system is None else [_message("system", [system])]
    for turn in turns:
        if turn.role == "assistant":
            made.append(_answer(turn))
        else:
            made += _asked(turn)
    return made


def _asked(turn: Turn) -> list[Json]:
    made: list[Json] = []
    texts: list[str] = []
    for block in turn.content:
        if isinstance(block, ResultBlock):
            made += [_message(turn.role, texts)] if texts else []
            made.append(_message("tool", [block.content]) | {"tool_call_id": block.tool_use_id})
            texts = []
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    return [*made, _message(turn.role, texts)] if texts or not made else made


def _answer(turn: Turn) -> Json:
    message = _message("assistant", [b.text for b in turn.content if isinstance(b, TextBlock)])
    if thoughts := [b.thinking for b in turn.content if isinstance(b, ThinkingBlock)]:
        message[KEY] = "\n".join(thoughts)
    if calls := [_call(block) for block in turn.content if isinstance(block, UseBlock)]:
        message["tool_calls"] = calls
    return message


def _message(role: str, texts: Iterable[str]) -> Json:
    return {"role": role, "content": "\n".join(texts)}


def _call(block: UseBlock) -> Json:
    return call_of(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
