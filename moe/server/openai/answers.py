"""Answers of OpenAI's chats and completions, whole and streamed in chunks."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

from moe.completion import Completion, StreamEvent, collect
from moe.sampling.batch import Token
from moe.server.answers import AnswerParser, EmittedCall
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.server.openai.request import ChatRequest, CompletionRequest, GenerationRequest
from moe.server.openai.tools import call_of, custom_input
from moe.text.detokenize import TokenBytes
from moe.text.tokenizer import TextCodec


class OpenAIAnswer(ABC):
    """The common part of answers to chats and completions; implements `moe.server.answers.Answer`.

    Attributes:
        prefix: what the answer's id begins with.
        whole_object, chunk_object: OpenAI's names for a whole answer and for a chunk.
        prompt_ids_in_choices: where vLLM has a prompt's token ids; else beside the choices.
        keeps_tokens: see `Answer`.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_ids_in_choices: ClassVar[bool] = False
    keeps_tokens: ClassVar[bool] = False

    def __init__(self, body: GenerationRequest, request_id: str, model: str) -> None:
        self._body = body
        about = {"created": int(time.time()), "model": model}
        self._common = {"id": f"{self.prefix}-{request_id}", **about}
        asked = body.stream_options
        self._with_usage = asked is not None and asked.include_usage
        self._with_each = asked is not None and asked.continuous_usage_stats
        self._num_prompt = self._num_new = 0
        self._told = set[tuple[int, int]]()  # prompts and samples whose prompt's ids were reported
        self._cached: dict[int, int] = {}  # tokens of each prompt that the prefix cache had

    @abstractmethod
    def choice(self, index: int, part: Completion) -> Json:
        """The JSON of a finished sequence."""

    @abstractmethod
    def delta(self, index: int, part: Completion) -> Json:
        """The JSON that a new token adds to a sequence."""

    def opening(self) -> Json | None:
        """Return the chunk before the first token of each sequence; None: there is none."""
        return None

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        parts = [self._reported(completion) for completion in collect(events)]
        choices = [self._ended(self.choice, part) for part in parts]
        self._num_prompt, self._num_new = num_prompt, sum(len(part.tokens) for part in parts)
        self._cached = {event.prompt: event.delta.num_cached_tokens for event in events}
        about = {**self._common, "object": self.whole_object, "choices": choices}
        about |= self._prompt_ids(parts[0], once=not self.prompt_ids_in_choices)
        return about | {"usage": self._usage()}

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        self._num_prompt = num_prompt
        opening = self.opening()
        if opening is None:
            return []
        choices = [opening | {"index": i, "finish_reason": None} for i in range(num_sequences)]
        return [self._chunk([choice]) for choice in choices]

    def more(self, event: StreamEvent) -> list[Json]:
        """One chunk for each token, even without new text: clients measure the time between tokens.

        Two chunks if a tool call comes with the last token: clients expect the call first.
        """
        part = self._reported(*collect([event]))
        self._num_new += len(part.tokens)
        self._cached[event.prompt] = event.delta.num_cached_tokens
        choice = self._ended(self.delta, part)
        ids = self._prompt_ids(part, once=not self.prompt_ids_in_choices)
        if choice["finish_reason"] is None or "tool_calls" not in choice.get("delta", ()):
            return [self._chunk([choice]) | ids]
        end = choice | {"delta": {}, "logprobs": None}
        if self._body.return_token_ids:
            end["token_ids"] = []
        first = self._chunk([choice | {"finish_reason": None}])
        return [first | ids, self._chunk([end])]

    def end(self) -> list[Json | str]:
        if not self._with_usage:
            return ["[DONE]"]
        return [self._chunk([]) | {"usage": self._usage()}, "[DONE]"]

    def failed(self, error: APIError) -> list[Json | str]:
        return [json.dumps(error.body())]

    def _reported(self, part: Completion) -> Completion:
        """Without the token that was only generated to score a prompt."""
        if not self._body.scores_only:
            return part
        return replace(part, text="", tokens=[], finish_reason="length")

    def _ended(self, shape: Callable[[int, Completion], Json], part: Completion) -> Json:
        index = part.prompt * self._body.n + part.sample
        choice: Json = {"index": index, "finish_reason": part.finish_reason}
        choice |= shape(index, part)
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in part.tokens]
            choice |= self._prompt_ids(part, once=self.prompt_ids_in_choices)
        return choice

    def _prompt_ids(self, part: Completion, *, once: bool) -> Json:
        """The prompt's token ids where they are asked for, the first time for a sequence.

        Args:
            once: this is their place.
        """
        if not once or not self._body.return_token_ids:
            return {}
        key = (part.prompt, part.sample if self.prompt_ids_in_choices else 0)
        if key in self._told:
            return {}
        self._told.add(key)
        return {"prompt_token_ids": list(part.prompt_token_ids)}

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._num_prompt,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens": self._num_new,
            "total_tokens": self._num_prompt + self._num_new,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._common, "object": self.chunk_object, "choices": choices}
        if not self._with_usage:
            return chunk
        return chunk | {"usage": self._usage() if self._with_each else None}


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: an impossible token gets the number that OpenAI uses for it."""
    return None if logprob is None else max(logprob, -9999.0)


def token_bytes(codec: TextCodec) -> Callable[[int], bytes]:
    """The bytes of a token by itself; ``token_id:N`` for a model without tokenizer."""
    if codec.tokenizer is None:
        return lambda token_id: f"token_id:{token_id}".encode()
    return lru_cache(4096)(TokenBytes(codec.tokenizer).of)


def token_logprobs(token: Token, to_bytes: Callable[[int], bytes]) -> Json:
    """A token's log probability, and those of the likeliest in its place, as chats have them."""
    top = [_entry(to_bytes(i), logprob) for i, logprob in token.top or ()]
    return _entry(to_bytes(token.id), token.logprob) | {"top_logprobs": top}


def _entry(piece: bytes, logprob: float | None) -> Json:
    text = piece.decode(errors="replace")
    return {"token": text, "logprob": finite(logprob), "bytes": list(piece)}


class ChatAnswer(OpenAIAnswer):
    """The answer of ``/v1/chat/completions``."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, codec: TextCodec, request_id: str, model: str) -> None:
        super().__init__(body, request_id, model)
        self._chat = body
        self._codec = codec
        self._token_bytes = token_bytes(codec)
        self._parsers: dict[int, AnswerParser] = {}  # of each sequence
        self._custom = body.custom_names

    def choice(self, index: int, part: Completion) -> Json:
        content, calls, reasoning, finish = self._parsed(index, part)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            made = [self._call(call) for call in calls]
            message |= {"content": content or None, "tool_calls": made}
        logprobs = self._logprobs(part.tokens)
        return {"message": message | reasoning, "logprobs": logprobs} | finish

    def opening(self) -> Json:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}

    def delta(self, index: int, part: Completion) -> Json:
        content, calls, reasoning, finish = self._parsed(index, part)
        delta: Json = {"content": content} if content else {}
        if calls:  # clients put them together by index
            delta["tool_calls"] = [{"index": call.index} | self._call(call) for call in calls]
        return {"delta": delta | reasoning, "logprobs": self._logprobs(part.tokens)} | finish

    def _parsed(self, index: int, part: Completion) -> tuple[str, list[EmittedCall], Json, Json]:
        """Text, calls, reasoning under both names that clients know, and the finish reason."""
        if index not in self._parsers:
            self._parsers[index] = self._chat.answer_parser(self._codec, part.prompt_token_ids)
        piece = self._parsers[index].take(part.text, part.finish_reason)
        text = "".join(part for part in piece.parts if isinstance(part, str))
        calls = [part for part in piece.parts if isinstance(part, EmittedCall)]
        told = piece.reasoning and self._chat.include_reasoning
        names = ("reasoning_content", "reasoning") if told else ()
        reasoning = dict.fromkeys(names, piece.reasoning)
        return text, calls, reasoning, {"finish_reason": piece.finish_reason}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if not self._chat.logprobs:
            return None
        content = [token_logprobs(token, self._token_bytes) for token in tokens]
        return {"content": content, "refusal": None}

    def _call(self, call: EmittedCall) -> Json:
        if call.name not in self._custom:
            return call_of(call.id, call.name, call.arguments)
        custom = {"name": call.name, "input": custom_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}


class CompletionAnswer(OpenAIAnswer):
    """The answer of ``/v1/completions``, whose choices and deltas have the same shape.

    With ``echo`` the prompt comes before the first part.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    prompt_ids_in_choices = True

    def __init__(
        self, body: CompletionRequest, codec: TextCodec, request_id: str, model: str
    ) -> None:
        super().__init__(body, request_id, model)
        self._completion = body
        self._codec = codec
        self._token_bytes = token_bytes(codec)
        self._offsets: dict[int, int] = {}  # characters of each sequence's tokens so far

    def choice(self, index: int, part: Completion) -> Json:
        is_first = index not in self._offsets
        text = part.text
        tokens: list[tuple[int, Token | None]] = [(token.id, token) for token in part.tokens]
        if self._completion.echo and is_first:
            text = self._prompt_text(part) + text
            prompt = part.prompt_logprobs or ()
            tokens = [*zip(part.prompt_token_ids, prompt, strict=False), *tokens]
        self._offsets.setdefault(index, 0)
        asked = self._completion.logprobs is not None
        return {"text": text, "logprobs": self._logprobs(index, tokens) if asked else None}

    delta = choice

    def _prompt_text(self, part: Completion) -> str:
        prompt = self._completion.prompt[part.prompt]
        if isinstance(prompt, str):
            return prompt
        return self._codec.decode(prompt) if self._codec.tokenizer is not None else ""

    def _logprobs(self, index: int, tokens: Iterable[tuple[int, Token | None]]) -> Json:
        """Log probabilities of token ids; None for a prompt's first token, which has none."""
        ids, scores = zip(*tokens, strict=True) if tokens else ((), ())
        texts = [self._text(token_id) for token_id in ids]
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        return {
            "tokens": texts,
            "token_logprobs": [score and finite(score.logprob) for score in scores],
            "top_logprobs": [score and self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        """The likeliest tokens and this one, which OpenAI's API always adds."""
        top: dict[str, float | None] = {}
        # Of tokens with the same text, the likeliest.
        for token_id, logprob in (*(token.top or ()), (token.id, token.logprob)):
            top.setdefault(self._text(token_id), finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")
