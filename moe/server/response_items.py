"""The items of a conversation in OpenAI's Responses, and the messages of a chat that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, ValidationInfo, WithJsonSchema, model_validator

from moe.server.bodies import ResentBody, ResentMessage
from moe.server.contents import content_of, result_of, text_of
from moe.server.fields import Json, by_type
from moe.server.ignored import Ignored
from moe.server.openai.tools import (
    MAX_CALLS,
    ArgumentsText,
    CallId,
    ToolName,
    call_of,
    custom_arguments,
)
from moe.server.response_tools import ToolNames
from moe.text.chat import REASONING_KEY

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(max_length=256)]
_LABELS = ("annotations", "logprobs")
ItemContent = Annotated[
    str | list[Json],
    BeforeValidator(content_of("input_text", "output_text", labels=_LABELS)),
    WithJsonSchema({"type": "string"}),
]
ItemResult = Annotated[
    str | list[Json],
    BeforeValidator(result_of("input_text", "output_text", labels=_LABELS)),
    WithJsonSchema({"type": "string"}),
]
Thought = Annotated[str, BeforeValidator(text_of("reasoning_text"))]


class InputItemBase(ResentBody):
    place = "input."
    labels = frozenset({"caller"})

    id: ItemId | None = None
    """Has no effect: the conversation is sent in full."""
    status: ItemStatus | None = None
    """Has no effect."""


class MessageItem(ResentMessage, InputItemBase):
    type: Literal["message"] = "message"
    role: str = Field(min_length=1, max_length=64)
    """Who speaks."""
    content: ItemContent
    """Text, or parts of the type ``input_text``, ``output_text`` or ``input_image`` (with a data
    URL as its ``image_url``)."""
    phase: Literal["commentary", "final_answer"] | None = None
    """Has no effect."""


class ReasoningItem(InputItemBase):
    """The model's reasoning before the item that follows."""

    labels = frozenset({"encrypted_content", "format"})

    type: Literal["reasoning"]
    content: Thought = ""
    summary: list[Any] = Field(default_factory=list, max_length=0)
    """Must be empty: answers of this server have no summaries. One of another server is read where
    unknown fields are taken, if the item has no content."""

    @model_validator(mode="before")
    @classmethod
    def _read_summary(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is None or not isinstance(value, dict) or not value.get("summary"):
            return value
        rest = {key: v for key, v in value.items() if key != "summary"}
        return rest if rest.get("content") else rest | {"content": value["summary"]}


class FunctionCallItem(InputItemBase):
    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: ArgumentsText
    namespace: str | None = Field(default=None, max_length=64)
    """That of the tool, if it is one of several with its name."""


class FunctionOutputItem(InputItemBase):
    labels = InputItemBase.labels | {"name", "namespace", "tool"}

    type: Literal["function_call_output"]
    call_id: CallId
    output: ItemResult = ""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    by_type("message", "reasoning", "function_call", "function_call_output", default="message"),
]
_KNOWN = ("message", "reasoning", "function_call", "function_call_output")
_NEEDED = {
    "item_reference": "the server keeps no answers: send the item itself",
    "compaction": "a compacted conversation cannot be read here: send the conversation",
    "compaction_trigger": "conversations are not compacted here: ask for a summary",
}
"""Items that an answer cannot do without, and what to send in their place."""


def read_items(value: Any, info: ValidationInfo) -> Any:
    """A text counts as one message of the user. Items of tools that the client runs become calls
    of functions, and those of tools that another server has run are left out."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if info.context is None or not isinstance(value, list):
        return value
    read = (_readable(item, info.context) for item in value)
    return [item for item in read if item is not None]


def _readable(item: Any, ignored: Ignored) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind in _KNOWN:
        return item
    if kind in _NEEDED:
        raise ValueError(f"an item of the type {kind}: {_NEEDED[kind]}")
    id = item.get("call_id") or item.get("id")
    about = {"call_id": id}
    if kind == "custom_tool_call" and isinstance(item.get("input"), str):
        named = {key: item[key] for key in ("name", "namespace") if key in item}
        arguments = custom_arguments(item["input"])
        return about | named | {"type": "function_call", "arguments": arguments}
    action = item.get("action", item.get("operation"))
    if kind.endswith("_call") and isinstance(action, dict) and "call_id" in item:
        named = {"name": kind.removesuffix("_call"), "arguments": json.dumps(action)}
        return about | named | {"type": "function_call"}
    if kind.endswith("_call_output") and id is not None:
        output = item.get("output", "")
        text = output if isinstance(output, str) else json.dumps(output)
        plain = output if kind == "custom_tool_call_output" else text
        return about | {"type": "function_call_output", "output": plain}
    ignored.add(f"input.{kind}")
    return None


def chat_messages(
    instructions: str | None,
    items: Iterable[InputItem],
    names: ToolNames,
) -> list[Json]:
    """Messages of a chat. Consecutive items of the model become one message.

    Args:
        names: of tools for the model, by namespace and own name.
    """
    turns = [] if instructions is None else [_turn("system", instructions)]
    answering = False  # whether the last turn is the model's, and still open
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            turns.append(_turn(item.role, item.content))
        elif isinstance(item, FunctionOutputItem):
            turns.append(_turn("tool", item.output) | {"tool_call_id": item.call_id})
        else:
            if not (answering and _goes_on(turns[-1], item)):
                turns.append(_turn("assistant"))
            _add_said(turns[-1], item, names)
            answering = True
            continue
        answering = False
    for turn in turns:
        if not any(isinstance(content, list) for content in turn["content"]):
            turn["content"] = "".join(turn["content"])
        else:
            turn["content"] = [part for content in turn["content"] for part in _parts(content)]
    return turns


def _parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _turn(role: str, *contents: str | list[Json]) -> Json:
    return {"role": role, "content": list(contents)}


def _goes_on(turn: Json, item: MessageItem | ReasoningItem | FunctionCallItem) -> bool:
    if isinstance(item, FunctionCallItem):
        return len(turn.get("tool_calls", ())) < MAX_CALLS
    if isinstance(item, ReasoningItem):
        return False
    return not turn["content"] or "tool_calls" in turn


def _add_said(
    turn: Json,
    item: MessageItem | ReasoningItem | FunctionCallItem,
    names: ToolNames,
) -> None:
    if isinstance(item, MessageItem):
        turn["content"].append(item.content)
    elif isinstance(item, ReasoningItem):
        turn[REASONING_KEY] = item.content
    else:
        name = names.get((item.namespace, item.name), item.name)
        call = call_of(item.call_id, name, item.arguments)
        turn.setdefault("tool_calls", []).append(call)
