"""The `Answer` protocol of all dialects, and the parser of generated text.

`AnswerParser` cuts the text of a sequence into reasoning, content and tool calls. Each dialect's
`Answer` writes these as its JSON.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from moe.completion import StreamEvent
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.text.tool_calls.channels import ChannelParser
from moe.text.tool_calls.parser import CallParser, ParsedCall
from moe.text.tool_calls.reasoning import ReasoningParser
from moe.text.tool_calls.response_template import TemplateParser

FinishReason = Literal["stop", "length", "tool_calls"]
_ID_LENGTH = 9  # some chat templates accept only ids of nine letters and digits


class Answer(Protocol):
    """The answer to one request, in its dialect: `whole`, or the other four for a stream."""

    @property
    def keeps_tokens(self) -> bool:
        """Return whether the end of a stream repeats the log probabilities, which are kept for
        that."""

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        """The complete answer, once all sequences have ended."""

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        """Events before the first token; `num_prompt` counts prompt tokens."""

    def more(self, event: StreamEvent) -> list[Json]:
        """Events for one new token."""

    def end(self) -> list[Json | str]:
        """Events after the last token."""

    def failed(self, error: APIError) -> list[Json | str]:
        """Events that end a stream after an error."""


@dataclass(frozen=True)
class EmittedCall:
    """A tool call as it is sent to the client.

    Attributes:
        index: its position among the calls of the answer.
        id: the client sends it back with the tool's result.
        arguments: a JSON object, as text.
    """

    index: int
    id: str
    name: str
    arguments: str


class AnswerPiece(NamedTuple):
    """The content of one piece of generated text.

    Attributes:
        reasoning: comes before the rest.
        parts: text and calls, in order.
        finish_reason: set with the last piece.
    """

    reasoning: str
    parts: Sequence[str | EmittedCall]
    finish_reason: FinishReason | None


class AnswerParser:
    """Separates the text of one sequence into reasoning, content and tool calls.

    Args:
        calls: finds tool calls, and reasoning too if both are messages on channels or the tokenizer
            has a template for answers; None: the answer cannot have any.
        reasoning: finds reasoning; None: the answer cannot have any.

    Attributes:
        num_reasoning_tokens: so far, provided that `take` is called once for each token.
    """

    def __init__(
        self,
        calls: CallParser | ChannelParser | TemplateParser | None,
        reasoning: ReasoningParser | None,
    ) -> None:
        self.num_reasoning_tokens = 0
        self._calls = calls
        self._reasoning = reasoning
        self._num_calls = 0

    def take(self, text: str, finish_reason: Literal["stop", "length"] | None) -> AnswerPiece:
        """Parse the next piece of text. A finish reason marks the last piece."""
        ended = finish_reason is not None
        if isinstance(self._calls, ChannelParser | TemplateParser):
            reasoning, found = self._read_channels(self._calls, text, ended=ended)
        else:
            reasoning, text = self._cut_reasoning(text, ended=ended)
            found = self._cut_calls(text, ended=ended)
        parts = [self._with_id(part) for part in found]
        calls = self._num_calls and finish_reason == "stop"
        return AnswerPiece(reasoning, parts, "tool_calls" if calls else finish_reason)

    def _cut_reasoning(self, text: str, *, ended: bool) -> tuple[str, str]:
        """The reasoning in a piece of text, and the text behind it."""
        parser = self._reasoning
        if parser is None:
            return "", text
        self.num_reasoning_tokens += not parser.over
        reasoning, text = parser.push(text)
        if ended:
            rest = parser.finish()
            reasoning, text = reasoning + rest[0], text + rest[1]
        if parser.over and not parser.found:
            self.num_reasoning_tokens = 0
        return reasoning, text

    def _read_channels(
        self, parser: ChannelParser | TemplateParser, text: str, *, ended: bool
    ) -> tuple[str, list[str | ParsedCall]]:
        reasoning, parts = parser.push(text)
        self.num_reasoning_tokens += parser.thinking
        if ended:
            rest = parser.finish()
            reasoning, parts = reasoning + rest[0], parts + rest[1]
        return reasoning, parts

    def _cut_calls(self, text: str, *, ended: bool) -> list[str | ParsedCall]:
        if not isinstance(self._calls, CallParser):
            return [text]
        parts = self._calls.push(text)
        return parts + self._calls.finish() if ended else parts

    def _with_id(self, part: str | ParsedCall) -> str | EmittedCall:
        if isinstance(part, str):
            return part
        self._num_calls += 1
        return EmittedCall(self._num_calls - 1, _new_id(), part.name, part.arguments)


def _new_id() -> str:
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(_ID_LENGTH))
