"""OpenAI's ``/v1/responses``, translated to chats and back.

The request, its translation to a chat, and the answer. `response_items.py` has the conversation,
`response_tools.py` the tools.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from moe.sampling.params import MAX_LOGPROBS
from moe.server.answers import EmittedCall
from moe.server.bodies import LabelFields, RequestBody
from moe.server.errors import APIError
from moe.server.fields import (
    MAX_MESSAGES,
    Items,
    Json,
    TokenLimit,
    at_most,
    text_or,
    wish,
)
from moe.server.openai.answers import token_bytes, token_logprobs
from moe.server.openai.options import EFFORTS, ReasoningEffort
from moe.server.openai.request import ChatRequest
from moe.server.openai.tools import (
    MAX_TOOLS,
    NamedFunction,
    custom_input,
    function_of,
    run_by_client,
    with_plain_choice,
)
from moe.server.response_items import InputItem, chat_messages, read_items
from moe.server.response_tools import AnyTool, NamedTool, names_of, tools_by_name
from moe.server.translation import BlockAnswer, BlockKind, TranslatedRequest
from moe.text.tokenizer import TextCodec


class ResponsesToolChoice(NamedFunction):
    type: Literal["function"]


class ResponsesFormat(RequestBody):
    place = "text.format."

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """A name for the schema; for the client's own use, as the description."""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON schema of the answer; it is always enforced."""
    strict: bool | None = None
    """Has no effect."""

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
    place = "text."

    format: ResponsesFormat = Field(default_factory=ResponsesFormat)
    verbosity: Annotated[Literal["medium"] | None, wish("text.verbosity", "medium")] = None
    """Has no effect."""


class ReasoningConfig(RequestBody):
    place = "reasoning."

    effort: Annotated[
        ReasoningEffort | None, wish("reasoning.effort", *EFFORTS, instead="medium")
    ] = None
    """The degree of thinking; see reasoning_effort of chats."""
    summary: Annotated[Literal["auto"] | None, wish("reasoning.summary", "auto")] = None
    """Has no effect: answers contain the reasoning itself, not a summary."""


class ResponsesStreamOptions(RequestBody):
    place = "stream_options."
    labels = frozenset({"include_usage"})

    include_obfuscation: Literal[False] | None = None


_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")


def _includes(value: Any, info: ValidationInfo) -> Any:
    """Without what is of tools that this server does not run."""
    if info.context is None or not isinstance(value, list):
        return value
    kept = [each for each in value if not isinstance(each, str) or each in _INCLUDES]
    if len(kept) < len(value):
        info.context.add("include")
    return kept


class ResponsesChat(ChatRequest):
    effort_name = thinking_name = "reasoning.effort"


class InputTokensRequest(TranslatedRequest):
    """The body of ``/v1/responses/input_tokens``."""

    dialect = "responses"
    chat_class = ResponsesChat

    model: str | None = None
    """One of the names in ``/v1/models``; left out: the first of them."""
    input: Annotated[list[InputItem], BeforeValidator(read_items)] = Field(
        min_length=1, max_length=MAX_MESSAGES, json_schema_extra=text_or
    )
    """A question, or the conversation so far."""
    instructions: str | None = None
    """A system message in front of the conversation."""
    tools: Annotated[
        list[AnyTool], Field(max_length=MAX_TOOLS), run_by_client("function", "custom", "namespace")
    ] = Field(default_factory=list)
    """Tools that the model may call. Others than functions, custom ones and namespaces of them are
    left out."""
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""
    text: TextConfig = Field(default_factory=TextConfig)
    """The form of the answer."""
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    truncation: Annotated[
        Literal["disabled"], wish("truncation", "disabled", instead="disabled")
    ] = "disabled"
    """A conversation that is too long is refused."""

    @model_validator(mode="before")
    @classmethod
    def _read_choice(cls, value: Any) -> Any:
        return with_plain_choice(value, names_of)

    @property
    def named_tools(self) -> dict[str, NamedTool]:
        """The tools by the names that the model calls them by."""
        return tools_by_name(self.tools)[0]

    def _chat_fields(self) -> Json:
        named, names = tools_by_name(self.tools)
        asked: str | Json
        if isinstance(self.tool_choice, str):
            asked = self.tool_choice
        else:
            own = self.tool_choice.name
            chosen = (flat for (_, name), flat in names.items() if name == own)
            asked = function_of(name=next(chosen, own))
        return {
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls,
            "messages": chat_messages(self.instructions, self.input, names),
            "tools": [tool.chat for tool in named.values()],
            "tool_choice": asked,
            "response_format": self.text.format.chat,
            "reasoning_effort": self.reasoning.effort,
        }


class ResponsesRequest(LabelFields, InputTokensRequest):
    max_output_tokens: TokenLimit | None = None
    """Most tokens to generate, reasoning included."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    include: Annotated[
        Items[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]],
        BeforeValidator(_includes),
    ] = Field(default_factory=list)
    """Log probabilities of the tokens of messages. ``reasoning.encrypted_content`` has no effect:
    reasoning is not encrypted, and can be sent back as it is."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    """Report this many likeliest tokens with each; only with those log probabilities."""
    store: bool = True
    """Has no effect: nothing is stored, and every answer has store: false."""
    client_metadata: Annotated[dict[str, str], at_most(64)] = Field(
        default_factory=dict, max_length=64
    )
    """Labels. Not stored, not logged."""

    def _chat_fields(self) -> Json:
        logprobs = _LOGPROBS in self.include
        if self.top_logprobs and not logprobs:
            raise ValueError(f"top_logprobs may be given only with include: [{_LOGPROBS!r}]")
        same = ("temperature", "top_p", "stream", "cache_salt", "priority", "timeout")
        return (
            super()._chat_fields()
            | {name: getattr(self, name) for name in same}
            | {
                "max_tokens": self.max_output_tokens,
                "logprobs": logprobs,
                "top_logprobs": self.top_logprobs if logprobs else None,
            }
        )


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
        self._tools = body.named_tools
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
        named = self._tools.get(call.name)
        name = call.name if named is None else named.tool.name
        space = {} if named is None or named.namespace is None else {"namespace": named.namespace}
        if named is not None and named.is_custom:
            about = {"id": self._item_id("custom"), "type": "custom_tool_call"}
            kind, word, field = "custom", "response.custom_tool_call_input", "input"
            said, done = custom_input(call.arguments), {}
        else:
            about = {"id": self._item_id("call"), "type": "function_call"}
            kind, word, field = "call", "response.function_call_arguments", "arguments"
            said, done = call.arguments, {"name": name}
        item = about | {"call_id": call.id, "name": name, **space}
        place = self._place(kind)
        return [
            self._item_event("added", item | {field: "", "status": "in_progress"}),
            self._event(f"{word}.delta", **place, delta=said),
            self._event(f"{word}.done", **place, **done, **{field: said}),
            self._item_done(item | {field: said, "status": "completed"}),
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
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}


def _part(kind: BlockKind, text: str, logprobs: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
