"""What answers of OpenAI's chats and completions have in common, whole and streamed in chunks."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from moe.completion import Completion, StreamEvent, collect
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.server.openai.request import GenerationRequest
from moe.text.pieces import Pieces
from moe.text.prompts import TextCodec


class OpenAIAnswer(ABC):
    """The answer to a request; see `moe.server.answers.Answer`.

    Attributes:
        prefix: of ids.
        whole_object, chunk_object: what OpenAI calls the two kinds of answers.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: GenerationRequest, request_id: str, model: str) -> None:
        self._body = body
        about = {"created": int(time.time()), "model": model}
        self._common = {"id": f"{self.prefix}-{request_id}", **about}
        asked = body.stream_options
        self._with_usage = asked is not None and asked.include_usage
        self._num_prompt = self._num_new = 0
        self._known: dict[int, int] = {}  # tokens of each prompt that were read for another before

    @abstractmethod
    def choice(self, index: int, part: Completion) -> Json:
        """A finished sequence."""

    @abstractmethod
    def delta(self, index: int, part: Completion) -> Json:
        """What a new token adds to a sequence."""

    def opening(self) -> Json | None:
        """What the stream of a sequence begins with, before its first token."""
        return None

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        parts = [self._reported(completion) for completion in collect(events)]
        choices = [self._ended(self.choice, part) for part in parts]
        self._num_prompt, self._num_new = num_prompt, sum(len(part.tokens) for part in parts)
        self._known = {event.prompt: event.delta.num_known for event in events}
        about = {**self._common, "object": self.whole_object, "choices": choices}
        return about | {"usage": self._usage()}

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        self._num_prompt = num_prompt
        opening = self.opening()
        if opening is None:
            return []
        choices = [opening | {"index": i, "finish_reason": None} for i in range(num_sequences)]
        return [self._chunk([choice]) for choice in choices]

    def more(self, event: StreamEvent) -> list[Json]:
        """One chunk a token, even without new text: clients measure the time between tokens.

        Two where a call comes with the end, because clients expect the call first.
        """
        part = self._reported(*collect([event]))
        self._num_new += len(part.tokens)
        self._known[event.prompt] = event.delta.num_known
        choice = self._ended(self.delta, part)
        if choice["finish_reason"] is None or "tool_calls" not in choice.get("delta", ()):
            return [self._chunk([choice])]
        end = choice | {"delta": {}, "logprobs": None}
        return [self._chunk([choice | {"finish_reason": None}]), self._chunk([end])]

    def end(self) -> list[Json | str]:
        if not self._with_usage:
            return ["[DONE]"]
        return [self._chunk([]) | {"usage": self._usage()}, "[DONE]"]

    def failed(self, error: APIError) -> list[Json | str]:
        return [json.dumps(error.body())]

    def _reported(self, part: Completion) -> Completion:
        """Leaves out the token that was only generated to score a prompt."""
        if not self._body.scores_only:
            return part
        return replace(part, text="", tokens=[], finish_reason="length")

    def _ended(self, shape: Callable[[int, Completion], Json], part: Completion) -> Json:
        index = part.prompt * self._body.n + part.sample
        return {"index": index, "finish_reason": part.finish_reason} | shape(index, part)

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._num_prompt,
            "prompt_tokens_details": {"cached_tokens": sum(self._known.values())},
            "completion_tokens": self._num_new,
            "total_tokens": self._num_prompt + self._num_new,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._common, "object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._with_usage else chunk


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that cannot come gets the number that OpenAI uses for that."""
    return None if logprob is None else max(logprob, -9999.0)


def token_bytes(codec: TextCodec) -> Callable[[int], bytes]:
    """The bytes of a token by itself; ``token_id:N`` for a model without tokenizer."""
    if codec.tokenizer is None:
        return lambda token_id: f"token_id:{token_id}".encode()
    return lru_cache(4096)(Pieces(codec.tokenizer).of)
