"""Choices as OpenAI's chats and completions have them: whole ones, and what a token adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from moe.completion import Completion
from moe.sampling.sampler import Token
from moe.server.answers import AnswerReader, Called
from moe.server.protocol import ChatRequest, CompletionRequest
from moe.text.pieces import Pieces
from moe.text.prompts import TextCodec

Json = dict[str, Any]


class Shape(Protocol):
    """How one of the two routes writes choices.

    Attributes:
        prefix: of ids.
        whole_object, chunk_object: what OpenAI calls the two kinds of answers.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def choice(self, index: int, whole: Completion) -> Json:
        """A finished sequence."""

    def opening(self) -> Json | None:
        """The first chunk of a sequence, if there is one before its first token."""

    def delta(self, index: int, part: Completion) -> Json:
        """What a new token adds."""


class ChatShape:
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: TextCodec, body: ChatRequest) -> None:
        self._token_bytes = token_bytes(codec)
        self._with_logprobs = body.logprobs
        self._codec = codec
        self._body = body
        self._readers: dict[int, AnswerReader] = {}  # of each sequence

    def choice(self, index: int, whole: Completion) -> Json:
        content, calls, thought, ending = self._said(index, whole)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        logprobs = self._logprobs(whole.tokens)
        return {"message": message | thought, "logprobs": logprobs} | ending

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}

    def delta(self, index: int, part: Completion) -> Json:
        content, calls, thought, ending = self._said(index, part)
        delta: Json = {"content": content} if content else {}
        if calls:  # clients put them together by index
            delta["tool_calls"] = [{"index": call.index} | _call(call) for call in calls]
        return {"delta": delta | thought, "logprobs": self._logprobs(part.tokens)} | ending

    def _said(self, index: int, part: Completion) -> tuple[str, list[Called], Json, Json]:
        """Text, calls, reasoning by the two names that clients know, and how it ends."""
        if index not in self._readers:
            self._readers[index] = self._body.answer_reader(self._codec, part.prompt_token_ids)
        said = self._readers[index].take(part.text, part.finish_reason)
        text = "".join(piece for piece in said.pieces if isinstance(piece, str))
        calls = [piece for piece in said.pieces if isinstance(piece, Called)]
        names = ("reasoning_content", "reasoning") if said.thought else ()
        return text, calls, dict.fromkeys(names, said.thought), {"finish_reason": said.ending}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if not self._with_logprobs:
            return None
        content = []
        for token in tokens:
            top = [self._entry(i, logprob) for i, logprob in token.top or ()]
            content.append(self._entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        piece = self._token_bytes(token_id)
        return {"token": _text(piece), "logprob": finite(logprob), "bytes": list(piece)}


class CompletionShape:
    """Whole choices and deltas look alike. With ``echo`` the prompt comes before the first part."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, codec: TextCodec, body: CompletionRequest) -> None:
        self._codec = codec
        self._body = body
        self._token_bytes = token_bytes(codec)
        self._offsets: dict[int, int] = {}  # characters of each sequence's tokens so far

    def choice(self, index: int, whole: Completion) -> Json:
        is_first = index not in self._offsets
        text = whole.text
        tokens: list[tuple[int, Token | None]] = [(token.id, token) for token in whole.tokens]
        if self._body.echo and is_first:
            text = self._prompt_text(whole) + text
            prompt = whole.prompt_logprobs or ()
            tokens = [*zip(whole.prompt_token_ids, prompt, strict=False), *tokens]
        self._offsets.setdefault(index, 0)
        with_logprobs = self._body.logprobs is not None
        return {"text": text, "logprobs": self._logprobs(index, tokens) if with_logprobs else None}

    delta = choice

    def opening(self) -> Json | None:
        return None

    def _prompt_text(self, part: Completion) -> str:
        prompt = self._body.prompt[part.prompt]
        if isinstance(prompt, str):
            return prompt
        return self._codec.decode(prompt) if self._codec.tokenizer is not None else ""

    def _logprobs(self, index: int, tokens: Iterable[tuple[int, Token | None]]) -> Json:
        """Of token ids, with None for the first one of a prompt: nothing predicts it."""
        ids, scores = zip(*tokens, strict=True) if tokens else ((), ())
        texts = [_text(self._token_bytes(token_id)) for token_id in ids]
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        return {
            "tokens": texts,
            "token_logprobs": [score and finite(score.logprob) for score in scores],
            "top_logprobs": [score and self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        top: dict[str, float | None] = {}
        for token_id, logprob in token.top or ():  # of tokens with the same text, the likeliest
            top.setdefault(_text(self._token_bytes(token_id)), finite(logprob))
        return top


def _call(call: Called) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that cannot come gets what OpenAI uses for that."""
    return None if logprob is None else max(logprob, -9999.0)


def token_bytes(codec: TextCodec) -> Callable[[int], bytes]:
    """The bytes of a token by itself; ``token_id:N`` for a model without tokenizer."""
    if codec.tokenizer is None:
        return lambda token_id: f"token_id:{token_id}".encode()
    return lru_cache(4096)(Pieces(codec.tokenizer).of)


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
