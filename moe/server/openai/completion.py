"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from moe.completion import Completion
from moe.sampling.logprobs import Token
from moe.server.fields import Json
from moe.server.openai.answer import OpenAIAnswer, finite, token_bytes
from moe.server.openai.request import CompletionRequest
from moe.text.prompts import TextCodec


class CompletionAnswer(OpenAIAnswer):
    """Whole choices and deltas look alike. With ``echo`` the prompt comes before the first part."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

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
        """Of token ids, with None for the first one of a prompt, which nothing predicts."""
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
        top: dict[str, float | None] = {}
        for token_id, logprob in token.top or ():  # of tokens with the same text, the likeliest
            top.setdefault(self._text(token_id), finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")
