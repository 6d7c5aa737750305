"""Items of a conversation, as ``/v1/responses`` takes them, and the chat that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from moe.server.base import Returned
from moe.server.fields import Json, by_type, text_of
from moe.server.openai.tools import MAX_CALLS, Arguments, CallId, ToolName, call_of
from moe.tools.reasoning import KEY

Status = Literal["in_progress", "completed", "incomplete"]
Id = Annotated[str, Field(max_length=256)]
_LABELS = ("annotations", "logprobs")
Text = Annotated[str, BeforeValidator(text_of("input_text", "output_text", labels=_LABELS))]
Thought = Annotated[str, BeforeValidator(text_of("reasoning_text"))]


class Item(Returned):
    id: Id | None = None
    """Of no effect, as everything is sent."""
    status: Status | None = None
    """Of no effect."""


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: str = Field(min_length=1, max_length=64)
    """Who speaks; developer is the same as system."""
    content: Text
    """Text, or parts of the type ``input_text`` or ``output_text``."""
    phase: Literal["commentary", "final_answer"] | None = None
    """Of no effect."""


class ReasoningItem(Item):
    """What the model thought before what follows."""

    type: Literal["reasoning"]
    content: Thought = ""
    summary: list[Any] = Field(default_factory=list, max_length=0)
    """There is none in answers of this server."""


class CallItem(Item):
    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: Arguments


class OutputItem(Item):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Text = ""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    by_type("message", "reasoning", "function_call", "function_call_output", default="message"),
]


def conversation(instructions: str | None, items: Iterable[InputItem]) -> list[Json]:
    """Messages of a chat: what the model said in one go is one of them."""
    turns = [] if instructions is None else [_turn("system", instructions)]
    answering = False  # the last turn is the model's, and goes on
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            _add_message(turns, item)
        elif isinstance(item, OutputItem):
            turns.append(_turn("tool", item.output) | {"tool_call_id": item.call_id})
        else:
            if not (answering and _goes_on(turns[-1], item)):
                turns.append(_turn("assistant"))
            _add_said(turns[-1], item)
            answering = True
            continue
        answering = False
    for turn in turns:
        turn["content"] = ("\n\n" if turn["role"] == "system" else "").join(turn["content"])
    return turns


def _turn(role: str, *texts: str) -> Json:
    return {"role": role, "content": list(texts)}


def _add_message(turns: list[Json], item: MessageItem) -> None:
    """What leads a conversation is one message: most chat templates take no more of the kind."""
    role = "system" if item.role == "developer" else item.role
    if role == "system" and len(turns) == 1 and turns[0]["role"] == "system":
        turns[0]["content"].append(item.content)
    else:
        turns.append(_turn(role, item.content))


def _goes_on(turn: Json, item: MessageItem | ReasoningItem | CallItem) -> bool:
    if isinstance(item, CallItem):
        return len(turn.get("tool_calls", ())) < MAX_CALLS
    if isinstance(item, ReasoningItem):
        return False
    return not turn["content"] or "tool_calls" in turn


def _add_said(turn: Json, item: MessageItem | ReasoningItem | CallItem) -> None:
    if isinstance(item, MessageItem):
        turn["content"].append(item.content)
    elif isinstance(item, ReasoningItem):
        turn[KEY] = item.content
    else:
        call = call_of(item.call_id, item.name, item.arguments)
        turn.setdefault("tool_calls", []).append(call)
