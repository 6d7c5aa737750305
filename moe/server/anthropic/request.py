"""What requests to ``/v1/messages`` may say, and the chats that they are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from moe.server.anthropic.turns import BlockText, Turn, conversation
from moe.server.base import RequestBody, Sharing
from moe.server.fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    Json,
    StopString,
    TokenCount,
)
from moe.server.openai.reasoning import Effort
from moe.server.openai.request import ChatRequest
from moe.server.openai.tools import MAX_TOOLS, ToolName, function_of, run_by_client
from moe.server.unsupported import NEUTRAL_MESSAGES, supported


class Tool(RequestBody):
    """What the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=2**16)] | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """true: every call keeps to the schema."""
    cache_control: dict[str, Any] | None = None
    """Of no effect."""

    @property
    def chat(self) -> Json:
        about = {"description": self.description, "strict": self.strict}
        return function_of(name=self.name, parameters=self.input_schema, **about)


class ToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    """With the type tool."""
    disable_parallel_tool_use: bool = False
    """true: an answer ends with its first call."""

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("the type tool, and no other, has a name")
        return self

    @property
    def chat(self) -> str | Json:
        if self.name is not None:
            return function_of(name=self.name)
        return "required" if self.type == "any" else self.type


class Thinking(RequestBody):
    type: Literal["enabled", "adaptive", "disabled"]
    """adaptive: as the model does by itself."""
    budget_tokens: int | None = Field(default=None, ge=1)
    """Of no effect: a target in Anthropic's API too; max_tokens is the limit."""
    display: Literal["summarized"] | None = None
    """Thoughts come as they are."""


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    effort: Effort | None = None
    """How much to think, where the chat template reads that."""
    format: OutputFormat | None = None
    """What the answer has to be."""


class Metadata(RequestBody):
    user_id: str | None = Field(default=None, max_length=2048)
    """A name for the end user. Not stored, not logged."""


class MessagesChat(ChatRequest):
    """A chat that may ask for reasoning without saying how much."""

    thinking: bool | None = None

    @property
    def asked_to_think(self) -> bool | None:
        return super().asked_to_think if self.thinking is None else self.thinking


class CountRequest(Sharing):
    """What is counted."""

    model: str
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    """The conversation so far; an answer that has been begun is continued."""
    system: BlockText | None = None
    """What the conversation begins with."""
    tools: list[Annotated[Tool, run_by_client("custom")]] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    """What the model may call."""
    tool_choice: ToolChoice = Field(default_factory=lambda: ToolChoice(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    cache_control: dict[str, Any] | None = None
    """Of no effect: known prefixes are found by their tokens."""

    _chat: MessagesChat = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: Any) -> Any:
        return supported(value, NEUTRAL_MESSAGES) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _translate(self) -> CountRequest:
        effort, thinks = self.output_config.effort, self._thinks
        if None not in (effort, thinks) and thinks != (effort != "none"):
            raise ValueError("thinking and output_config.effort contradict each other")
        self._chat = MessagesChat.model_validate(self._fields())
        return self

    @property
    def chat(self) -> MessagesChat:
        """The same request as a chat."""
        return self._chat

    @property
    def _thinks(self) -> bool | None:
        asked = self.thinking
        return None if asked is None or asked.type == "adaptive" else asked.type == "enabled"

    def _fields(self) -> Json:
        asked = self.output_config
        format = {"name": "answer", "schema": asked.format.schema_} if asked.format else None
        return {name: getattr(self, name) for name in ("model", "cache_salt", "priority")} | {
            "messages": conversation(self.system, self.messages),
            "continue_final_message": self.messages[-1].role == "assistant",
            "tools": [tool.chat for tool in self.tools],
            "tool_choice": self.tool_choice.chat,
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "response_format": format and {"type": "json_schema", "json_schema": format},
            "reasoning_effort": asked.effort,
            "thinking": self._thinks,
        }


class MessagesRequest(CountRequest):
    max_tokens: TokenCount
    """Most tokens to generate, thoughts included."""
    stop_sequences: list[StopString] = Field(default_factory=list, max_length=MAX_STOPS)
    """Text ends before the first of them."""
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    metadata: Metadata = Field(default_factory=Metadata)

    def _fields(self) -> Json:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        more = {name: getattr(self, name) for name in same}
        return super()._fields() | more | {"stop": self.stop_sequences}
