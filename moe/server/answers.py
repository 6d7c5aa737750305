"""What the answers of all APIs have in common: what makes one up, and what each has to say."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from moe.completion import StreamEvent
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.text.tool_calls.parser import CallParser, ParsedCall
from moe.text.tool_calls.reasoning import ReasoningParser

Ending = Literal["stop", "length", "tool_calls"]
_ID_LENGTH = 9  # some chat templates take ids of nine letters and digits, and no others


class Answer(Protocol):
    """The answer to one request, in the words of its API."""

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        """The answer when all of its sequences have ended."""

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        """What a stream begins with, before the first token."""

    def more(self, event: StreamEvent) -> list[Json]:
        """What a token adds to the stream."""

    def end(self) -> list[Json | str]:
        """What the stream ends with."""

    def failed(self, error: APIError) -> list[Json | str]:
        """What the stream ends with where an error cuts it off."""


@dataclass(frozen=True)
class EmittedCall:
    """A call of a tool.

    Attributes:
        index: its place among the calls of the answer.
        id: what its result will be known by.
        arguments: a JSON object, as text.
    """

    index: int
    id: str
    name: str
    arguments: str


class AnswerPiece(NamedTuple):
    """What a piece of an answer comes to.

    Attributes:
        thought: reasoning, which comes before all else.
        pieces: text and calls, in their order.
        ending: set with the last piece.
    """

    thought: str
    pieces: Sequence[str | EmittedCall]
    ending: Ending | None


class AnswerParser:
    """Takes one answer apart.

    Args:
        calls: reads calls out of it; None: there can be none.
        thinking: reads reasoning out of it; None: there can be none.

    Attributes:
        num_thought: tokens of reasoning so far, if `take` was called once a token.
    """

    def __init__(self, calls: CallParser | None, thinking: ReasoningParser | None) -> None:
        self.num_thought = 0
        self._calls = calls
        self._thinking = thinking
        self._num_calls = 0

    def take(self, text: str, ending: Literal["stop", "length"] | None) -> AnswerPiece:
        """The next piece of the answer; with an ending, the last."""
        ended = ending is not None
        thought, text = self._thought(text, ended=ended)
        pieces = [self._numbered(piece) for piece in self._called(text, ended=ended)]
        calls = self._num_calls and ending == "stop"
        return AnswerPiece(thought, pieces, "tool_calls" if calls else ending)

    def _thought(self, text: str, *, ended: bool) -> tuple[str, str]:
        thinking = self._thinking
        if thinking is None:
            return "", text
        self.num_thought += not thinking.over
        thought, text = thinking.push(text)
        if ended:
            rest = thinking.finish()
            thought, text = thought + rest[0], text + rest[1]
        if thinking.over and not thinking.found:
            self.num_thought = 0
        return thought, text

    def _called(self, text: str, *, ended: bool) -> list[str | ParsedCall]:
        if self._calls is None:
            return [text]
        pieces = self._calls.push(text)
        return pieces + self._calls.finish() if ended else pieces

    def _numbered(self, piece: str | ParsedCall) -> str | EmittedCall:
        if isinstance(piece, str):
            return piece
        self._num_calls += 1
        return EmittedCall(self._num_calls - 1, _new_id(), piece.name, piece.arguments)


def _new_id() -> str:
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(_ID_LENGTH))
