"""Answers of OpenAI's chats and completions, whole and as the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from moe.completion import Completion, StreamEvent, collect
from moe.server.errors import APIError
from moe.server.outputs import Json, Shape
from moe.server.protocol import GenerationRequest


class Answer:
    """The answer to a request; see `Words` (`moe.server.generation`)."""

    def __init__(self, shape: Shape, body: GenerationRequest, request_id: str, model: str) -> None:
        self._shape = shape
        self._body = body
        about = {"created": int(time.time()), "model": model}
        self._common = {"id": f"{shape.prefix}-{request_id}", **about}
        asked = body.stream_options
        self._with_usage = asked is not None and asked.include_usage
        self._num_prompt = self._num_new = 0

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        parts = [self._reported(completion) for completion in collect(events)]
        choices = [self._ended(self._shape.choice, part) for part in parts]
        about = {**self._common, "object": self._shape.whole_object, "choices": choices}
        return about | {"usage": usage(num_prompt, sum(len(part.tokens) for part in parts))}

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        self._num_prompt = num_prompt
        opening = self._shape.opening()
        if opening is None:
            return []
        choices = [opening | {"index": i, "finish_reason": None} for i in range(num_sequences)]
        return [self._chunk([choice]) for choice in choices]

    def more(self, event: StreamEvent) -> list[Json]:
        """One chunk a token, also where it adds no text yet: clients measure the time between them.

        Two where calls come with the end: clients hear of calls before it.
        """
        part = self._reported(*collect([event]))
        self._num_new += len(part.tokens)
        choice = self._ended(self._shape.delta, part)
        if choice["finish_reason"] is None or "tool_calls" not in choice.get("delta", ()):
            return [self._chunk([choice])]
        end = choice | {"delta": {}, "logprobs": None}
        return [self._chunk([choice | {"finish_reason": None}]), self._chunk([end])]

    def end(self) -> list[Json | str]:
        if not self._with_usage:
            return ["[DONE]"]
        return [self._chunk([]) | {"usage": usage(self._num_prompt, self._num_new)}, "[DONE]"]

    def failed(self, error: APIError) -> list[Json | str]:
        return [json.dumps(error.body())]

    def _reported(self, part: Completion) -> Completion:
        """What the client gets to see: not the token that was generated to score a prompt."""
        if not self._body.scores_only:
            return part
        return replace(part, text="", tokens=[], finish_reason="length")

    def _ended(self, shape: Callable[[int, Completion], Json], part: Completion) -> Json:
        index = part.prompt * self._body.n + part.sample
        return {"index": index, "finish_reason": part.finish_reason} | shape(index, part)

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._common, "object": self._shape.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._with_usage else chunk


def usage(num_prompt: int, num_new: int) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }
