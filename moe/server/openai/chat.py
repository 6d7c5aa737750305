"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence

from moe.completion import Completion
from moe.sampling.logprobs import Token
from moe.server.answers import AnswerReader, Called
from moe.server.fields import Json
from moe.server.openai.answer import OpenAIAnswer, finite, token_bytes
from moe.server.openai.request import ChatRequest
from moe.server.openai.tools import call_of
from moe.text.prompts import TextCodec


class ChatAnswer(OpenAIAnswer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, codec: TextCodec, request_id: str, model: str) -> None:
        super().__init__(body, request_id, model)
        self._chat = body
        self._codec = codec
        self._token_bytes = token_bytes(codec)
        self._readers: dict[int, AnswerReader] = {}  # of each sequence

    def choice(self, index: int, part: Completion) -> Json:
        content, calls, thought, ending = self._said(index, part)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        logprobs = self._logprobs(part.tokens)
        return {"message": message | thought, "logprobs": logprobs} | ending

    def opening(self) -> Json:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}

    def delta(self, index: int, part: Completion) -> Json:
        content, calls, thought, ending = self._said(index, part)
        delta: Json = {"content": content} if content else {}
        if calls:  # clients put them together by index
            delta["tool_calls"] = [{"index": call.index} | _call(call) for call in calls]
        return {"delta": delta | thought, "logprobs": self._logprobs(part.tokens)} | ending

    def _said(self, index: int, part: Completion) -> tuple[str, list[Called], Json, Json]:
        """Text, calls, reasoning under both names that clients know, and how it ends."""
        if index not in self._readers:
            self._readers[index] = self._chat.answer_reader(self._codec, part.prompt_token_ids)
        said = self._readers[index].take(part.text, part.finish_reason)
        text = "".join(piece for piece in said.pieces if isinstance(piece, str))
        calls = [piece for piece in said.pieces if isinstance(piece, Called)]
        names = ("reasoning_content", "reasoning") if said.thought else ()
        return text, calls, dict.fromkeys(names, said.thought), {"finish_reason": said.ending}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if not self._chat.logprobs:
            return None
        content = []
        for token in tokens:
            top = [self._entry(i, logprob) for i, logprob in token.top or ()]
            content.append(self._entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        piece = self._token_bytes(token_id)
        text = piece.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(piece)}


def _call(call: Called) -> Json:
    return call_of(call.id, call.name, call.arguments)
