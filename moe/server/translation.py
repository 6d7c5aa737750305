"""The common part of OpenAI's Responses and Anthropic's Messages.

A `TranslatedRequest` makes a `ChatRequest` of itself. A `BlockAnswer` is a list of blocks:
reasoning, text and tool calls. Its whole answer is built from the events of its stream, so both
say the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import PrivateAttr, ValidationInfo, model_validator

from moe.completion import StreamEvent
from moe.sampling.batch import Token
from moe.server.answers import AnswerParser, EmittedCall, FinishReason
from moe.server.bodies import EndpointBody
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.server.openai.request import ChatRequest
from moe.text.tokenizer import TextCodec

BlockKind = Literal["reasoning", "text"]


class TranslatedRequest(EndpointBody):
    """A request body that is a chat in other words. The chat is made, and checked, with it."""

    chat_class: ClassVar[type[ChatRequest]] = ChatRequest
    _chat: ChatRequest = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self, info: ValidationInfo) -> TranslatedRequest:
        self._chat = self.chat_class.model_validate(self._chat_fields(), context=info.context)
        return self

    @property
    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        return self._chat

    @abstractmethod
    def _chat_fields(self) -> Json:
        """Fields of the chat. Raises `ValueError` if this body contradicts itself."""


class BlockAnswer(ABC):
    """The answer to a request for one sequence; implements `moe.server.answers.Answer`.

    A dialect implements the abstract methods. Those that return events also keep `blocks`.

    Attributes:
        blocks: finished blocks, in the dialect's JSON.
        num_prompt_tokens, num_cached_tokens, num_new_tokens: cached ones are part of the prompt.
        finish_reason, stop: how the answer ended, and by which stop string; None until then.
        keeps_tokens: see `Answer`.
    """

    def __init__(self, chat: ChatRequest, codec: TextCodec) -> None:
        self.blocks: list[Json] = []
        self.num_prompt_tokens = self.num_cached_tokens = self.num_new_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None
        self.keeps_tokens = chat.logprobs
        self._codec = codec
        self._chat = chat
        self._parser: AnswerParser | None = None
        self._kind: BlockKind | None = None  # of the open block
        self._texts: list[str] = []
        # Tokens since the last text, and whether each was counted as reasoning.
        self._unsaid: list[tuple[Token, bool]] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of new tokens that are reasoning."""
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        self.begin(num_prompt, 1)
        for event in events:
            self.more(event)
        return self.answer()

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        assert num_sequences == 1, num_sequences
        self.num_prompt_tokens = num_prompt
        return self.started()

    def more(self, event: StreamEvent) -> list[Json]:
        delta = event.delta
        if self._parser is None:
            self._parser = self._chat.answer_parser(self._codec, event.prompt_token_ids)
        before = self.num_reasoning_tokens
        piece = self._parser.take(delta.text, delta.finish_reason)
        self.num_new_tokens += 1
        self.num_cached_tokens = delta.num_cached_tokens
        made = self._add("reasoning", piece.reasoning)
        if piece.reasoning:
            self._unsaid.clear()
        if self.keeps_tokens:
            self._unsaid.append((delta.token, self.num_reasoning_tokens > before))
        for part in piece.parts:
            if isinstance(part, EmittedCall):
                made += self._close() + self.called(part)
                self._unsaid.clear()
            else:
                made += self._add("text", part)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop = piece.finish_reason, delta.stop
            made += self._close()
        return made

    def take_tokens(self) -> list[Token]:
        """The tokens of new text, where log probabilities are asked for: those since the last text
        that are neither reasoning nor of a call."""
        thought = self.num_reasoning_tokens > 0  # else nothing that was counted was reasoning
        tokens = [token for token, counted in self._unsaid if not (thought and counted)]
        self._unsaid.clear()
        return tokens

    def _add(self, kind: BlockKind, text: str) -> list[Json]:
        """Add text to the open block; opens a new one if that has another kind."""
        if not text:
            return []
        made = []
        if self._kind != kind:
            made = self._close() + self.opened(kind)
            self._kind = kind
        self._texts.append(text)
        return [*made, self.delta(kind, text)]

    def _close(self) -> list[Json]:
        if self._kind is None:
            return []
        made = self.closed(self._kind, "".join(self._texts))
        self._kind = None
        self._texts.clear()
        return made

    @abstractmethod
    def answer(self) -> Json:
        """The complete answer."""

    @abstractmethod
    def started(self) -> list[Json]:
        """Events before the first token."""

    @abstractmethod
    def opened(self, kind: BlockKind) -> list[Json]:
        """Events that open a block."""

    @abstractmethod
    def delta(self, kind: BlockKind, text: str) -> Json:
        """The event for more text of the open block."""

    @abstractmethod
    def closed(self, kind: BlockKind, text: str) -> list[Json]:
        """Events that close a block; adds the block to `blocks`."""

    @abstractmethod
    def called(self, call: EmittedCall) -> list[Json]:
        """Events for a tool call, which comes in one piece; adds it to `blocks`."""

    @abstractmethod
    def end(self) -> list[Json | str]: ...

    @abstractmethod
    def failed(self, error: APIError) -> list[Json | str]: ...
