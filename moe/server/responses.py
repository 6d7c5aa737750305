"""OpenAI's ``/v1/responses``, translated to chats and back.

From top to bottom: the items of a conversation, the request, its translation to a chat, the answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, WithJsonSchema, model_validator

from moe.sampling.params import MAX_LOGPROBS
from moe.server.answers import EmittedCall
from moe.server.bodies import LabelFields, RequestBody, ResentBody
from moe.server.errors import APIError
from moe.server.fields import (
    MAX_MESSAGES,
    NEUTRAL_RESPONSES,
    Items,
    Json,
    TokenCount,
    at_most,
    by_type,
    content_of,
    text_of,
    text_or,
)
from moe.server.openai.answers import token_bytes, token_logprobs
from moe.server.openai.options import (
    MAX_CALLS,
    MAX_TOOLS,
    ArgumentsText,
    CallId,
    FunctionDefinition,
    NamedFunction,
    ReasoningEffort,
    ToolName,
    call_of,
    function_of,
    run_by_client,
)
from moe.server.translation import BlockAnswer, BlockKind, TranslatedRequest
from moe.text.chat import REASONING_KEY
from moe.text.tokenizer import TextCodec

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(max_length=256)]
_LABELS = ("annotations", "logprobs")
_LOGPROBS = "message.output_text.logprobs"
ItemText = Annotated[str, BeforeValidator(text_of("input_text", "output_text", labels=_LABELS))]
ItemContent = Annotated[
    str | list[Json],
    BeforeValidator(content_of("input_text", "output_text", labels=_LABELS)),
    WithJsonSchema({"type": "string"}),
]
Thought = Annotated[str, BeforeValidator(text_of("reasoning_text"))]


class InputItemBase(ResentBody):
    id: ItemId | None = None
    """Of no effect: the conversation is sent in full."""
    status: ItemStatus | None = None
    """Of no effect."""


class MessageItem(InputItemBase):
    type: Literal["message"] = "message"
    role: str = Field(min_length=1, max_length=64)
    """Who speaks; developer is the same as system."""
    content: ItemContent
    """Text, or parts of the type ``input_text``, ``output_text`` or ``input_image`` (with a data
    URL as its ``image_url``)."""
    phase: Literal["commentary", "final_answer"] | None = None
    """Of no effect."""


class ReasoningItem(InputItemBase):
    """The model's reasoning before the item that follows."""

    type: Literal["reasoning"]
    content: Thought = ""
    summary: list[Any] = Field(default_factory=list, max_length=0)
    """Must be empty: answers of this server have no summaries."""


class FunctionCallItem(InputItemBase):
    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: ArgumentsText


class FunctionOutputItem(InputItemBase):
    type: Literal["function_call_output"]
    call_id: CallId
    output: ItemText = ""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    by_type("message", "reasoning", "function_call", "function_call_output", default="message"),
]


def _items(value: Any) -> Any:
    """A text counts as one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesTool(FunctionDefinition):
    """A tool that the model may call."""

    type: Literal["function"]

    @property
    def chat(self) -> Json:
        return function_of(**self.model_dump(exclude={"type"}, exclude_none=True))


class ResponsesToolChoice(NamedFunction):
    type: Literal["function"]


class ResponsesFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """A name for the schema; for the client's own use, as the description."""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON schema of the answer; it is always enforced."""
    strict: bool | None = None
    """Of no effect."""

    @model_validator(mode="after")
    def _check_type(self) -> ResponsesFormat:
        named = self.name is not None and self.schema_ is not None
        if (self.type == "json_schema") != named:
            raise ValueError("the type json_schema, and no other, has a name and a schema")
        return self

    @property
    def chat(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(RequestBody):
    format: ResponsesFormat = Field(default_factory=ResponsesFormat)
    verbosity: Literal["medium"] | None = None
    """Of no effect; other values are refused."""


class ReasoningConfig(RequestBody):
    effort: ReasoningEffort | None = None
    """How much to think, if the chat template reads it; none: not at all."""
    summary: Literal["auto"] | None = None
    """Of no effect: answers contain the reasoning itself, not a summary."""


class ResponsesStreamOptions(RequestBody):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(LabelFields, TranslatedRequest):
    neutral = NEUTRAL_RESPONSES

    model: str | None = None
    """One of the names in ``/v1/models``; left out: the first of them."""
    input: Annotated[list[InputItem], BeforeValidator(_items)] = Field(
        min_length=1, max_length=MAX_MESSAGES, json_schema_extra=text_or
    )
    """A question, or the conversation so far."""
    instructions: str | None = None
    """A system message in front of the conversation."""
    max_output_tokens: TokenCount | None = None
    """Most tokens to generate, reasoning included."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    tools: list[Annotated[ResponsesTool, run_by_client("function")]] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    """Tools that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""
    text: TextConfig = Field(default_factory=TextConfig)
    """The form of the answer."""
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    include: Items[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = Field(
        default_factory=list
    )
    """Log probabilities of the tokens of messages. ``reasoning.encrypted_content`` has no effect:
    reasoning is not encrypted, and can be sent back as it is."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    """Report this many likeliest tokens with each; only with those log probabilities."""
    truncation: Literal["disabled"] = "disabled"
    store: bool = True
    """Of no effect: nothing is stored, and every answer has store: false."""
    client_metadata: Annotated[dict[str, str], at_most(64)] = Field(
        default_factory=dict, max_length=64
    )
    """Labels. Not stored, not logged."""

    def _chat_fields(self) -> Json:
        choice = self.tool_choice
        logprobs = _LOGPROBS in self.include
        if self.top_logprobs and not logprobs:
            raise ValueError(f"top_logprobs may be given only with include: [{_LOGPROBS!r}]")
        same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
        return {
            name: getattr(self, name) for name in (*same, "cache_salt", "priority", "timeout")
        } | {
            "messages": _chat_messages(self.instructions, self.input),
            "max_tokens": self.max_output_tokens,
            "tools": [tool.chat for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else function_of(name=choice.name),
            "response_format": self.text.format.chat,
            "reasoning_effort": self.reasoning.effort,
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs if logprobs else None,
        }


def _chat_messages(instructions: str | None, items: Iterable[InputItem]) -> list[Json]:
    """Messages of a chat. Consecutive items of the model become one message."""
    turns = [] if instructions is None else [_turn("system", instructions)]
    answering = False  # whether the last turn is the model's, and still open
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            _add_message(turns, item)
        elif isinstance(item, FunctionOutputItem):
            turns.append(_turn("tool", item.output) | {"tool_call_id": item.call_id})
        else:
            if not (answering and _goes_on(turns[-1], item)):
                turns.append(_turn("assistant"))
            _add_said(turns[-1], item)
            answering = True
            continue
        answering = False
    for turn in turns:
        if not any(isinstance(content, list) for content in turn["content"]):
            turn["content"] = ("\n\n" if turn["role"] == "system" else "").join(turn["content"])
        else:
            turn["content"] = [part for content in turn["content"] for part in _parts(content)]
    return turns


def _parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _turn(role: str, *contents: str | list[Json]) -> Json:
    return {"role": role, "content": list(contents)}


def _add_message(turns: list[Json], item: MessageItem) -> None:
    """Add a message. Leading system messages become one: most chat templates accept only one."""
    role = "system" if item.role == "developer" else item.role
    if role == "system" and len(turns) == 1 and turns[0]["role"] == "system":
        turns[0]["content"].append(item.content)
    else:
        turns.append(_turn(role, item.content))


def _goes_on(turn: Json, item: MessageItem | ReasoningItem | FunctionCallItem) -> bool:
    if isinstance(item, FunctionCallItem):
        return len(turn.get("tool_calls", ())) < MAX_CALLS
    if isinstance(item, ReasoningItem):
        return False
    return not turn["content"] or "tool_calls" in turn


def _add_said(turn: Json, item: MessageItem | ReasoningItem | FunctionCallItem) -> None:
    if isinstance(item, MessageItem):
        turn["content"].append(item.content)
    elif isinstance(item, ReasoningItem):
        turn[REASONING_KEY] = item.content
    else:
        call = call_of(item.call_id, item.name, item.arguments)
        turn.setdefault("tool_calls", []).append(call)


_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "temperature", "tool_choice", "tools"),
    *("top_logprobs", "top_p", "truncation", "user"),
)


class ResponsesAnswer(BlockAnswer):
    """A list of items; a stream has events with types and sequence numbers."""

    def __init__(
        self, body: ResponsesRequest, codec: TextCodec, request_id: str, model: str
    ) -> None:
        super().__init__(body.chat, codec)
        self._id = request_id
        self._num_events = 0
        self._token_bytes = token_bytes(codec) if body.chat.logprobs else None
        self._logprobs: list[Json] = []  # of the open text
        self._about = {
            **{"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time())},
            **body.model_dump(include=set(_ECHOED)),
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            **{"model": model, "store": False, "background": False, "previous_response_id": None},
        }

    def answer(self) -> Json:
        return self._response("incomplete" if self.finish_reason == "length" else "completed")

    def started(self) -> list[Json]:
        about = self._response("in_progress")
        return [self._event(f"response.{word}", response=about) for word in _STARTED]

    def opened(self, kind: BlockKind) -> list[Json]:
        part = self._place(kind) | {"content_index": 0, "part": _part(kind, "", [])}
        return [
            self._item_event("added", self._item(kind, [], "in_progress")),
            self._event("response.content_part.added", **part),
        ]

    def delta(self, kind: BlockKind, text: str) -> Json:
        logprobs: list[Json] = []
        if kind == "text" and self._token_bytes is not None:
            logprobs = [token_logprobs(token, self._token_bytes) for token in self.take_tokens()]
            self._logprobs += logprobs
        return self._text_event(kind, "delta", {"delta": text}, logprobs)

    def closed(self, kind: BlockKind, text: str) -> list[Json]:
        logprobs, self._logprobs = self._logprobs, []
        made = _part(kind, text, logprobs)
        part = self._place(kind) | {"content_index": 0, "part": made}
        status = "incomplete" if self.finish_reason == "length" else "completed"
        return [
            self._text_event(kind, "done", {"text": text}, logprobs),
            self._event("response.content_part.done", **part),
            self._item_done(self._item(kind, [made], status)),
        ]

    def called(self, call: EmittedCall) -> list[Json]:
        about = {"type": "function_call", "call_id": call.id, "name": call.name}
        item = {"id": self._item_id("call"), **about}
        place, word = self._place("call"), "response.function_call_arguments"
        done = place | {"name": call.name, "arguments": call.arguments}
        return [
            self._item_event("added", item | {"arguments": "", "status": "in_progress"}),
            self._event(f"{word}.delta", **place, delta=call.arguments),
            self._event(f"{word}.done", **done),
            self._item_done(item | {"arguments": call.arguments, "status": "completed"}),
        ]

    def end(self) -> list[Json | str]:
        about = self.answer()
        return [self._event(f"response.{about['status']}", response=about)]

    def failed(self, error: APIError) -> list[Json | str]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        about = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return [self._event("response.failed", response=about)]

    def _response(self, status: str) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        over = status in ("completed", "incomplete")
        return self._about | {
            **{"status": status, "error": None, "incomplete_details": cut},
            **{"output": list(self.blocks), "usage": self._usage() if over else None},
        }

    def _usage(self) -> Json:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.num_new_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.num_new_tokens,
        }

    def _item_id(self, kind: str) -> str:
        return f"{_PREFIXES[kind]}_{self._id}_{len(self.blocks)}"

    def _item(self, kind: BlockKind, parts: list[Json], status: str) -> Json:
        item = {"id": self._item_id(kind), "status": status, "content": parts}
        if kind == "reasoning":
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}

    def _place(self, kind: str) -> Json:
        return {"item_id": self._item_id(kind), "output_index": len(self.blocks)}

    def _text_event(self, kind: BlockKind, word: str, said: Json, logprobs: list[Json]) -> Json:
        place = self._place(kind) | {"content_index": 0}
        if kind == "reasoning":
            return self._event(f"response.reasoning_text.{word}", **place, **said)
        return self._event(f"response.output_text.{word}", **place, **said, logprobs=logprobs)

    def _item_event(self, word: str, item: Json) -> Json:
        place = {"output_index": len(self.blocks), "item": item}
        return self._event(f"response.output_item.{word}", **place)

    def _item_done(self, item: Json) -> Json:
        event = self._item_event("done", item)
        self.blocks.append(item)
        return event

    def _event(self, event: str, **said: object) -> Json:
        self._num_events += 1
        return {"type": event, "sequence_number": self._num_events - 1, **said}


_STARTED = ("created", "in_progress")
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def _part(kind: BlockKind, text: str, logprobs: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
