"""Answers of ``/v1/responses``: items, and the events of a stream, each with its type."""

from __future__ import annotations

import time

from moe.server.answers import Called
from moe.server.blocks import BlockAnswer, Kind
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.server.responses.request import ResponsesRequest
from moe.text.prompts import TextCodec

_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "temperature", "tool_choice", "tools", "top_p"),
    *("truncation", "user"),
)


class ResponsesAnswer(BlockAnswer):
    def __init__(
        self, body: ResponsesRequest, codec: TextCodec, request_id: str, model: str
    ) -> None:
        super().__init__(body.chat, codec)
        self._id = request_id
        self._num_events = 0
        self._about = {
            **{"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time())},
            **body.model_dump(include=set(_ECHOED)),
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            **{"model": model, "store": False, "background": False, "previous_response_id": None},
        }

    def answer(self) -> Json:
        return self._response("incomplete" if self.ending == "length" else "completed")

    def started(self) -> list[Json]:
        about = self._response("in_progress")
        return [self._event(f"response.{word}", response=about) for word in _STARTED]

    def opened(self, kind: Kind) -> list[Json]:
        part = self._place(kind) | {"content_index": 0, "part": _part(kind, "")}
        return [
            self._item_event("added", self._item(kind, [], "in_progress")),
            self._event("response.content_part.added", **part),
        ]

    def delta(self, kind: Kind, text: str) -> Json:
        return self._text_event(kind, "delta", {"delta": text})

    def closed(self, kind: Kind, text: str) -> list[Json]:
        part = self._place(kind) | {"content_index": 0, "part": _part(kind, text)}
        status = "incomplete" if self.ending == "length" else "completed"
        return [
            self._text_event(kind, "done", {"text": text}),
            self._event("response.content_part.done", **part),
            self._item_done(self._item(kind, [_part(kind, text)], status)),
        ]

    def called(self, call: Called) -> list[Json]:
        about = {"type": "function_call", "call_id": call.id, "name": call.name}
        item = {"id": self._item_id("call"), **about}
        place, word = self._place("call"), "response.function_call_arguments"
        done = place | {"name": call.name, "arguments": call.arguments}
        return [
            self._item_event("added", item | {"arguments": "", "status": "in_progress"}),
            self._event(f"{word}.delta", **place, delta=call.arguments),
            self._event(f"{word}.done", **done),
            self._item_done(item | {"arguments": call.arguments, "status": "completed"}),
        ]

    def end(self) -> list[Json | str]:
        about = self.answer()
        return [self._event(f"response.{about['status']}", response=about)]

    def failed(self, error: APIError) -> list[Json | str]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        about = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return [self._event("response.failed", response=about)]

    def _response(self, status: str) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        over = status in ("completed", "incomplete")
        return self._about | {
            **{"status": status, "error": None, "incomplete_details": cut},
            **{"output": list(self.blocks), "usage": self._usage() if over else None},
        }

    def _usage(self) -> Json:
        return {
            "input_tokens": self.num_prompt,
            "input_tokens_details": {"cached_tokens": self.num_known, "cache_write_tokens": 0},
            "output_tokens": self.num_new,
            "output_tokens_details": {"reasoning_tokens": self.num_thought},
            "total_tokens": self.num_prompt + self.num_new,
        }

    def _item_id(self, kind: str) -> str:
        return f"{_PREFIXES[kind]}_{self._id}_{len(self.blocks)}"

    def _item(self, kind: Kind, parts: list[Json], status: str) -> Json:
        item = {"id": self._item_id(kind), "status": status, "content": parts}
        if kind == "reasoning":
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}

    def _place(self, kind: str) -> Json:
        return {"item_id": self._item_id(kind), "output_index": len(self.blocks)}

    def _text_event(self, kind: Kind, word: str, said: Json) -> Json:
        place = self._place(kind) | {"content_index": 0}
        if kind == "reasoning":
            return self._event(f"response.reasoning_text.{word}", **place, **said)
        return self._event(f"response.output_text.{word}", **place, **said, logprobs=[])

    def _item_event(self, word: str, item: Json) -> Json:
        place = {"output_index": len(self.blocks), "item": item}
        return self._event(f"response.output_item.{word}", **place)

    def _item_done(self, item: Json) -> Json:
        event = self._item_event("done", item)
        self.blocks.append(item)
        return event

    def _event(self, event: str, **said: object) -> Json:
        self._num_events += 1
        return {"type": event, "sequence_number": self._num_events - 1, **said}


_STARTED = ("created", "in_progress")
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def _part(kind: Kind, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
