"""What a request to ``/v1/responses`` may say, and the chat that it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from moe.server.base import Labels, RequestBody, Sharing
from moe.server.fields import (
    MAX_MESSAGES,
    Items,
    Json,
    TokenCount,
    at_most,
    text_or,
)
from moe.server.openai.reasoning import Effort
from moe.server.openai.request import ChatRequest
from moe.server.openai.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    NamedFunction,
    function_of,
    run_by_client,
)
from moe.server.responses.items import InputItem, conversation
from moe.server.unsupported import NEUTRAL_RESPONSES, supported


def _items(value: Any) -> Any:
    """A text is what the user says."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(FunctionDefinition):
    """What the model may call."""

    type: Literal["function"]

    @property
    def chat(self) -> Json:
        return function_of(**self.model_dump(exclude={"type"}, exclude_none=True))


class NamedChoice(NamedFunction):
    type: Literal["function"]


class Format(RequestBody):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Of the schema; for the client's own use, as the description."""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """What the answer is; every schema is kept to."""
    strict: bool | None = None
    """Of no effect."""

    @model_validator(mode="after")
    def _check_type(self) -> Format:
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
    format: Format = Field(default_factory=Format)
    verbosity: Literal["medium"] | None = None
    """Of no effect; others are refused."""


class ReasoningConfig(RequestBody):
    effort: Effort | None = None
    """How much to think, where the chat template reads that; none: not at all."""
    summary: Literal["auto"] | None = None
    """There are no summaries: answers have the reasoning itself."""


class StreamOptions(RequestBody):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Labels, Sharing):
    model: str | None = None
    """One of the names in ``/v1/models``; left out: the first of them."""
    input: Annotated[list[InputItem], BeforeValidator(_items)] = Field(
        min_length=1, max_length=MAX_MESSAGES, json_schema_extra=text_or
    )
    """A question, or the conversation so far."""
    instructions: str | None = None
    """What the conversation begins with."""
    max_output_tokens: TokenCount | None = None
    """Most tokens to generate, reasoning included."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: list[Annotated[FunctionTool, run_by_client("function")]] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""
    text: TextConfig = Field(default_factory=TextConfig)
    """What the answer has to be."""
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    stream: bool = False
    stream_options: StreamOptions | None = None
    include: Items[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    """Reasoning comes in the open, so that it can be sent back without."""
    truncation: Literal["disabled"] = "disabled"
    store: bool = True
    """Nothing is stored, and every answer says so."""
    client_metadata: Annotated[dict[str, str], at_most(64)] = Field(
        default_factory=dict, max_length=64
    )
    """Labels. Not stored, not logged."""

    _chat: ChatRequest = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: Any) -> Any:
        return supported(value, NEUTRAL_RESPONSES) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _translate(self) -> ResponsesRequest:
        self._chat = ChatRequest.model_validate(self._fields())
        return self

    @property
    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        return self._chat

    def _fields(self) -> Json:
        choice = self.tool_choice
        same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
        return {name: getattr(self, name) for name in (*same, "cache_salt", "priority")} | {
            "messages": conversation(self.instructions, self.input),
            "max_tokens": self.max_output_tokens,
            "tools": [tool.chat for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else function_of(name=choice.name),
            "response_format": self.text.format.chat,
            "reasoning_effort": self.reasoning.effort,
        }
