"""Anthropic's ``/v1/messages``, translated to chats and back.

From top to bottom: the messages of a conversation, the request, its translation to a chat, the
answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from moe.server.answers import EmittedCall
from moe.server.bodies import RequestBody, ResentBody, ResentMessage
from moe.server.contents import document_text, image_url, result_of, text_of, unread
from moe.server.errors import APIError
from moe.server.fields import (
    MAX_INT,
    MAX_MESSAGES,
    MAX_STOPS,
    Items,
    Json,
    StopString,
    TokenLimit,
    by_type,
    text_or,
    wish,
)
from moe.server.ignored import Ignored
from moe.server.openai.options import EFFORTS, ReasoningEffort
from moe.server.openai.request import ChatRequest
from moe.server.openai.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    CallId,
    ToolName,
    call_of,
    function_of,
    run_by_client,
)
from moe.server.translation import BlockAnswer, BlockKind, TranslatedRequest
from moe.text.chat import REASONING_KEY
from moe.text.tokenizer import TextCodec

_LABELS = ("cache_control", "citations")
_TEXT_SCHEMA = WithJsonSchema({"type": "string"})
BlockText = Annotated[str, BeforeValidator(text_of("text", labels=_LABELS, between="\n"))]
"""A text, or blocks of text, which become lines."""


def _no_citations(value: list[Any], info: ValidationInfo) -> list[Any]:
    if value and info.context is None:
        raise ValueError("citations are not read here; leave them out")
    return value


class Block(ResentBody):
    place = "messages.content."
    labels = frozenset({"caller", "citations", "title", "context"})

    cache_control: dict[str, Any] | None = None
    """Has no effect: the prefix cache finds prefixes by their tokens."""


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], AfterValidator(_no_citations)] = Field(default_factory=list)
    """Has no effect."""


class ThinkingBlock(Block):
    """The model's reasoning before the block that follows."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Has no effect: nothing is signed."""


class ImageBlock(Block):
    """An image of the user."""

    type: Literal["image"]
    source: dict[str, Any]
    """``{"type": "base64", "media_type": "image/png", "data": ...}`` (png, jpeg or webp), or
    ``{"type": "url", "url": ...}`` where ``server.allow_image_urls`` is set."""

    @model_validator(mode="after")
    def _check_source(self) -> ImageBlock:
        image_url({"type": self.type, "source": self.source})
        return self


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[
        str | list[Json],
        BeforeValidator(result_of("text", labels=_LABELS, between="\n")),
        _TEXT_SCHEMA,
    ] = ""
    is_error: bool = False
    """Has no effect: the model reads the content."""


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    by_type("text", "thinking", "image", "tool_use", "tool_result"),
]
_ROLES = {
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "user": (TextBlock, ImageBlock, ToolResultBlock),
}


_KNOWN = ("text", "thinking", "image", "tool_use", "tool_result")
_UNREADABLE = ("redacted_thinking", "compaction", "fallback")
"""Blocks of answers of other servers that say nothing to this model."""


def _blocks(value: Any, info: ValidationInfo) -> Any:
    """Content as blocks; what others have answered is left out, or stands there as a line."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if info.context is None or not isinstance(value, list):
        return value
    said = info.data.get("role") == "assistant"
    read = (_readable(block, info.context, said=said) for block in value)
    return [block for block in read if block is not None]


def _readable(block: Any, ignored: Ignored, *, said: bool) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind in _KNOWN:
        return block
    text = document_text(block)
    if text is None and (said or kind.endswith("_tool_result")):
        ignored.add(f"messages.content.{kind}")
        if kind in _UNREADABLE:
            return None
        text = unread(kind, block)
    return block if text is None else {"type": "text", "text": text}


class InputMessage(ResentMessage):
    place = "messages."
    labels = frozenset({"id", "model", "stop_reason", "stop_sequence", "type", "usage"})

    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[ContentBlock], BeforeValidator(_blocks)] = Field(
        json_schema_extra=text_or
    )

    @model_validator(mode="after")
    def _check_blocks(self) -> InputMessage:
        for block in self.content:
            if not isinstance(block, _ROLES.get(self.role, TextBlock)):
                raise ValueError(f"a block of type {block.type} is not of role {self.role}")
        if sum(isinstance(block, ToolUseBlock) for block in self.content) > MAX_CALLS:
            raise ValueError(f"a turn may have {MAX_CALLS} calls")
        return self


class MessagesTool(RequestBody):
    """A tool that the model may call."""

    place = "tools."
    labels = frozenset({"allowed_callers", "eager_input_streaming"})

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=2**16)] | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """true: every call follows the schema."""
    cache_control: dict[str, Any] | None = None
    """Has no effect."""

    @property
    def chat(self) -> Json:
        about = {"description": self.description, "strict": self.strict}
        return function_of(name=self.name, parameters=self.input_schema, **about)


class MessagesToolChoice(RequestBody):
    place = "tool_choice."

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    """With the type tool."""
    disable_parallel_tool_use: bool = False
    """true: an answer ends with its first call."""

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("the type tool, and no other, has a name")
        return self

    @property
    def chat(self) -> str | Json:
        if self.name is not None:
            return function_of(name=self.name)
        return "required" if self.type == "any" else self.type


class Thinking(RequestBody):
    place = "thinking."

    type: Annotated[
        Literal["enabled", "adaptive", "disabled"],
        wish("thinking.type", "enabled", "adaptive", "disabled", instead="adaptive"),
    ]
    """adaptive: the model's own default."""
    budget_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    """Most tokens of reasoning; then the model has to answer."""
    display: Annotated[Literal["summarized"] | None, wish("thinking.display", "summarized")] = None
    """Has no effect: reasoning is never summarized."""


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    place = "output_config."

    effort: Annotated[
        ReasoningEffort | None, wish("output_config.effort", *EFFORTS, instead="medium")
    ] = None
    """The degree of thinking; see reasoning_effort of chats."""
    format: OutputFormat | None = None
    """The form of the answer."""


class MessagesMetadata(RequestBody):
    place = "metadata."

    user_id: str | None = Field(default=None, max_length=2048)
    """A name for the end user. Not stored, not logged."""


class MessagesChat(ChatRequest):
    effort_name = "output_config.effort"


class CountTokensRequest(TranslatedRequest):
    """The body of ``/v1/messages/count_tokens``."""

    dialect = "messages"
    chat_class = MessagesChat

    model: str
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    """The conversation so far. If it ends with an assistant's message, the model continues it."""
    system: BlockText | None = None
    """A system message in front of the conversation."""
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS), run_by_client("custom")] = (
        Field(default_factory=list)
    )
    """Tools that the model may call."""
    tool_choice: MessagesToolChoice = Field(default_factory=lambda: MessagesToolChoice(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    cache_control: dict[str, Any] | None = None
    """Has no effect: the prefix cache finds prefixes by their tokens."""

    def _chat_fields(self) -> Json:
        asked, thinking = self.output_config, self.thinking
        switch = None if thinking is None or thinking.type == "adaptive" else thinking.type
        format = {"name": "answer", "schema": asked.format.schema_} if asked.format else None
        return {
            name: getattr(self, name) for name in ("model", "cache_salt", "priority", "timeout")
        } | {
            "messages": _chat_messages(self.system, self.messages),
            "continue_final_message": self.messages[-1].role == "assistant",
            "tools": [tool.chat for tool in self.tools],
            "tool_choice": self.tool_choice.chat,
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "response_format": format and {"type": "json_schema", "json_schema": format},
            "reasoning_effort": asked.effort,
            "thinking": None if switch is None else switch == "enabled",
            "thinking_token_budget": thinking and thinking.budget_tokens,
        }


class MessagesRequest(CountTokensRequest):
    max_tokens: TokenLimit
    """Most tokens to generate, reasoning included."""
    stop_sequences: list[StopString] = Field(default_factory=list, max_length=MAX_STOPS)
    """Text ends before the first of them."""
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    metadata: MessagesMetadata = Field(default_factory=MessagesMetadata)

    def _chat_fields(self) -> Json:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        more = {name: getattr(self, name) for name in same}
        return super()._chat_fields() | more | {"stop": self.stop_sequences}


def _chat_messages(system: str | None, turns: Iterable[InputMessage]) -> list[Json]:
    """Messages of a chat. Each tool result becomes a message of its own, in its place."""
    made = [] if system is None else [_message("system", [system])]
    for turn in turns:
        if turn.role == "assistant":
            made.append(_from_assistant(turn))
        else:
            made += _from_user(turn)
    return made


def _from_user(turn: InputMessage) -> list[Json]:
    made: list[Json] = []
    parts: list[TextBlock | ImageBlock] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            made += [_spoken(turn.role, parts)] if parts else []
            about = {"role": "tool", "tool_call_id": block.tool_use_id}
            made.append(about | {"content": block.content})
            parts = []
        elif isinstance(block, TextBlock | ImageBlock):
            parts.append(block)
    return [*made, _spoken(turn.role, parts)] if parts or not made else made


def _spoken(role: str, parts: Sequence[TextBlock | ImageBlock]) -> Json:
    """A message of text and images; in text alone, blocks become lines."""
    if any(isinstance(part, ImageBlock) for part in parts):
        blocks = [part.model_dump(include={"type", "text", "source"}) for part in parts]
        return {"role": role, "content": blocks}
    return _message(role, [part.text for part in parts if isinstance(part, TextBlock)])


def _from_assistant(turn: InputMessage) -> Json:
    message = _message("assistant", [b.text for b in turn.content if isinstance(b, TextBlock)])
    if thoughts := [b.thinking for b in turn.content if isinstance(b, ThinkingBlock)]:
        message[REASONING_KEY] = "\n".join(thoughts)
    if calls := [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
    return message


def _message(role: str, texts: Iterable[str]) -> Json:
    return {"role": role, "content": "\n".join(texts)}


def _call(block: ToolUseBlock) -> Json:
    return call_of(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Kind of block -> its type, and the field of its text.
_NAMES = {"reasoning": ("thinking", "thinking"), "text": ("text", "text")}


class MessagesAnswer(BlockAnswer):
    """A list of content blocks; a stream has an event for each change of a block."""

    def __init__(
        self, body: MessagesRequest, codec: TextCodec, request_id: str, model: str
    ) -> None:
        super().__init__(body.chat, codec)
        about = {"id": f"msg_{request_id}", "type": "message", "role": "assistant"}
        self._about = about | {"model": model}

    def answer(self) -> Json:
        return (
            self._about | {"content": list(self.blocks)} | self._ending() | {"usage": self._usage()}
        )

    def started(self) -> list[Json]:
        return [{"type": "message_start", "message": self.answer()}, {"type": "ping"}]

    def opened(self, kind: BlockKind) -> list[Json]:
        return [self._event("content_block_start", content_block=_block(kind, ""))]

    def delta(self, kind: BlockKind, text: str) -> Json:
        name, field = _NAMES[kind]
        return self._event("content_block_delta", delta={"type": f"{name}_delta", field: text})

    def closed(self, kind: BlockKind, text: str) -> list[Json]:
        return [self._stopped(_block(kind, text))]

    def called(self, call: EmittedCall) -> list[Json]:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [
            self._event("content_block_start", content_block=block | {"input": {}}),
            self._event("content_block_delta", delta=delta),
            self._stopped(block | {"input": json.loads(call.arguments)}),
        ]

    def end(self) -> list[Json | str]:
        about = {"delta": self._ending(), "usage": self._usage()}
        return [{"type": "message_delta", **about}, {"type": "message_stop"}]

    def failed(self, error: APIError) -> list[Json | str]:
        return [error.anthropic_body()]

    def _ending(self) -> Json:
        reason = _REASONS.get(self.finish_reason or "")
        if self.finish_reason == "stop" and self.stop is not None:
            reason = "stop_sequence"
        stopped = self.stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self) -> Json:
        known = {
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached_tokens,
        }
        return {
            **{"input_tokens": self.num_prompt_tokens - self.num_cached_tokens, **known},
            "output_tokens": self.num_new_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
        }

    def _event(self, name: str, **said: object) -> Json:
        return {"type": name, "index": len(self.blocks), **said}

    def _stopped(self, block: Json) -> Json:
        event = self._event("content_block_stop")
        self.blocks.append(block)
        return event


def _block(kind: BlockKind, text: str) -> Json:
    name, field = _NAMES[kind]
    signed = {"signature": ""} if kind == "reasoning" else {}
    return {"type": name, field: text} | signed
