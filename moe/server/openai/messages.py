"""The turns of a chat, as clients send them and as a chat template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field, model_validator

from moe.server.base import RequestBody, Returned
from moe.server.fields import Text
from moe.server.openai.tools import MAX_CALLS, CallId, ToolCall
from moe.tools.reasoning import KEY


class Message(Returned):
    """One turn of a chat. Its other fields in OpenAI's API are refused unless null or empty."""

    role: str = Field(min_length=1, max_length=64)
    """Who speaks; the model's chat template decides which roles there are."""
    content: Text | None = None
    """Text, or a list of ``{"type": "text", "text": ...}``; null only beside tool_calls."""
    reasoning_content: Text | None = None
    """What the model thought before this answer; for the chat template, if it reads it."""
    reasoning: Text | None = None
    """Another name of the same."""
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Which of several speakers of the role; for the chat template, if it writes names."""
    tool_calls: list[ToolCall] | None = Field(default=None, min_length=1, max_length=MAX_CALLS)
    """What the model called in this answer."""
    tool_call_id: CallId | None = None
    """Of role tool: which call this answers."""

    @model_validator(mode="after")
    def _check_fields(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls are of role assistant; got role {self.role!r:.80}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id is of role tool; got role {self.role!r:.80}")
        for thought in (self.reasoning_content, self.reasoning):
            if thought is not None and self.role != "assistant":
                raise ValueError(f"reasoning is of role assistant; got role {self.role!r:.80}")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing or has nothing in it")
        return self


class ChatEnding(RequestBody):
    """Where the text of a conversation ends, named as in vLLM."""

    add_generation_prompt: bool | None = None
    """Open the assistant's turn; left out: true, unless the last message is continued."""
    continue_final_message: bool = False
    """Leave the last message open, for the model to go on with."""

    @model_validator(mode="after")
    def _check_ending(self) -> ChatEnding:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message and add_generation_prompt cannot both be true: a message "
                "is continued, or a turn is opened behind it"
            )
        return self

    @property
    def ending(self) -> Mapping[str, bool]:
        """For `TextCodec.encode`."""
        continues, opens = self.continue_final_message, self.add_generation_prompt
        return {
            "add_generation_prompt": not continues if opens is None else opens,
            "continue_final_message": continues,
        }


def conversation(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages for `TextCodec.encode`."""
    made: list[dict[str, object]] = []
    for message in messages:
        turn = {"content": None, **message.model_dump(exclude_none=True, exclude={"reasoning"})}
        if message.reasoning:
            turn.setdefault(KEY, message.reasoning)
        made.append(turn)
    return made
