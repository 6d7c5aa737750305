"""Answers as a list of blocks: what OpenAI's Responses and Anthropic's Messages have in common.

A whole answer is what the events of its stream come to, so both say the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from moe.completion import StreamEvent
from moe.server.answers import AnswerParser, EmittedCall, Ending
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.server.openai.request import ChatRequest
from moe.text.tokenizer import TextCodec

BlockKind = Literal["reasoning", "text"]


class BlockAnswer(ABC):
    """The answer to a request for one sequence; see `moe.server.answers.Answer`.

    Attributes:
        blocks: what is finished of it, in the API's words.
        num_prompt, num_known, num_new, num_thought: tokens of the prompt, those of them that were
            read before, new ones, and those of them that are reasoning.
        ending, stop: how it ended, and by which stop string.
    """

    def __init__(self, chat: ChatRequest, codec: TextCodec) -> None:
        self.blocks: list[Json] = []
        self.num_prompt = self.num_known = self.num_new = 0
        self.ending: Ending | None = None
        self.stop: str | None = None
        self._codec = codec
        self._chat = chat
        self._reader: AnswerParser | None = None
        self._kind: BlockKind | None = None  # of the block that is open
        self._texts: list[str] = []

    @property
    def num_thought(self) -> int:
        return 0 if self._reader is None else self._reader.num_thought

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        self.begin(num_prompt, 1)
        for event in events:
            self.more(event)
        return self.answer()

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        assert num_sequences == 1, num_sequences
        self.num_prompt = num_prompt
        return self.started()

    def more(self, event: StreamEvent) -> list[Json]:
        delta = event.delta
        if self._reader is None:
            self._reader = self._chat.answer_reader(self._codec, event.prompt_token_ids)
        said = self._reader.take(delta.text, delta.finish_reason)
        self.num_new += 1
        self.num_known = delta.num_cached_tokens
        made = self._added("reasoning", said.thought)
        for piece in said.pieces:
            if isinstance(piece, EmittedCall):
                made += self._finished() + self.called(piece)
            else:
                made += self._added("text", piece)
        if said.ending is not None:
            self.ending, self.stop = said.ending, delta.stop
            made += self._finished()
        return made

    def _added(self, kind: BlockKind, text: str) -> list[Json]:
        if not text:
            return []
        made = []
        if self._kind != kind:
            made = self._finished() + self.opened(kind)
            self._kind = kind
        self._texts.append(text)
        return [*made, self.delta(kind, text)]

    def _finished(self) -> list[Json]:
        if self._kind is None:
            return []
        made = self.closed(self._kind, "".join(self._texts))
        self._kind = None
        self._texts.clear()
        return made

    @abstractmethod
    def answer(self) -> Json:
        """The whole of it."""

    @abstractmethod
    def started(self) -> list[Json]: ...

    @abstractmethod
    def opened(self, kind: BlockKind) -> list[Json]: ...

    @abstractmethod
    def delta(self, kind: BlockKind, text: str) -> Json: ...

    @abstractmethod
    def closed(self, kind: BlockKind, text: str) -> list[Json]:
        """A block of text is complete; adds it to `blocks`."""

    @abstractmethod
    def called(self, call: EmittedCall) -> list[Json]:
        """A call, which comes in one piece; adds it to `blocks`."""

    @abstractmethod
    def end(self) -> list[Json | str]: ...

    @abstractmethod
    def failed(self, error: APIError) -> list[Json | str]: ...
