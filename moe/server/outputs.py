"""Answers in OpenAI's shapes: whole ones, and the chunks of a stream."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from moe.completion import Completion
from moe.sampling import Token
from moe.sequence import Delta

Json = dict[str, Any]
TokenText = Callable[[int], str]
"""The text of one token by itself."""


class Shape(Protocol):
    """How one of the two routes writes choices.

    Attributes:
        prefix: of ids.
        whole_object, chunk_object: what OpenAI calls the two kinds of answers.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished sequence."""

    def opening(self) -> Json | None:
        """The first chunk of a sequence, if there is one before its first token."""

    def delta(self, index: int, delta: Delta) -> Json:
        """What a new token adds."""


class ChatShape:
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text

    def choice(self, index: int, completion: Completion) -> Json:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(completion.tokens)}

    def opening(self) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"delta": delta, "logprobs": None}

    def delta(self, index: int, delta: Delta) -> Json:
        content = {"content": delta.text} if delta.text else {}
        return {"delta": content, "logprobs": self._logprobs([delta.token])}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if not tokens or tokens[0].logprob is None:
            return None
        content = []
        for token in tokens:
            top = [self._entry(i, logprob) for i, logprob in token.top or ()]
            content.append(self._entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        text = self._token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


class CompletionShape:
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._offsets: Counter[int] = Counter()  # characters of each sequence's tokens so far

    def choice(self, index: int, completion: Completion) -> Json:
        return {"text": completion.text, "logprobs": self._logprobs(index, completion.tokens)}

    def opening(self) -> Json | None:
        return None

    def delta(self, index: int, delta: Delta) -> Json:
        return {"text": delta.text, "logprobs": self._logprobs(index, [delta.token])}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Json | None:
        if not tokens or tokens[0].logprob is None:
            return None
        texts = [self._token_text(token.id) for token in tokens]
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        tops = [
            {self._token_text(i): finite(logprob) for i, logprob in token.top or ()}
            for token in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class Answer:
    """One answer under construction: what all of its parts have in common."""

    def __init__(self, shape: Shape, request_id: str, model: str) -> None:
        self._shape = shape
        self._common = {
            "id": f"{shape.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, completions: Sequence[Completion], usage: Json) -> Json:
        choices = [
            self._shape.choice(index, c) | {"index": index, "finish_reason": c.finish_reason}
            for index, c in enumerate(completions)
        ]
        return {**self._common, "object": self._shape.whole_object, "choices": choices} | {
            "usage": usage
        }

    def opening(self, index: int) -> Json | None:
        choice = self._shape.opening()
        return self._chunk([choice | {"index": index, "finish_reason": None}]) if choice else None

    def delta(self, index: int, delta: Delta) -> Json:
        ending = {"index": index, "finish_reason": delta.finish_reason}
        return self._chunk([self._shape.delta(index, delta) | ending])

    def usage(self, usage: Json) -> Json:
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._common, "object": self._shape.chunk_object, "choices": choices}


def usage(num_prompt: int, num_new: int) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that cannot come gets what OpenAI uses for that."""
    return None if logprob is None else max(logprob, -9999.0)
