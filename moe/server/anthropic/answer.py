"""Answers of ``/v1/messages``: content in blocks, and the events of a stream."""

from __future__ import annotations

import json

from moe.server.answers import Called
from moe.server.anthropic.request import MessagesRequest
from moe.server.blocks import BlockAnswer, Kind
from moe.server.errors import APIError
from moe.server.fields import Json
from moe.text.prompts import TextCodec

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# the type of a block, and the field that its text is in
_NAMES = {"reasoning": ("thinking", "thinking"), "text": ("text", "text")}


class MessagesAnswer(BlockAnswer):
    def __init__(
        self, body: MessagesRequest, codec: TextCodec, request_id: str, model: str
    ) -> None:
        super().__init__(body.chat, codec)
        about = {"id": f"msg_{request_id}", "type": "message", "role": "assistant"}
        self._about = about | {"model": model}

    def answer(self) -> Json:
        return (
            self._about | {"content": list(self.blocks)} | self._ending() | {"usage": self._usage()}
        )

    def started(self) -> list[Json]:
        return [{"type": "message_start", "message": self.answer()}, {"type": "ping"}]

    def opened(self, kind: Kind) -> list[Json]:
        return [self._event("content_block_start", content_block=_block(kind, ""))]

    def delta(self, kind: Kind, text: str) -> Json:
        name, field = _NAMES[kind]
        return self._event("content_block_delta", delta={"type": f"{name}_delta", field: text})

    def closed(self, kind: Kind, text: str) -> list[Json]:
        return [self._stopped(_block(kind, text))]

    def called(self, call: Called) -> list[Json]:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [
            self._event("content_block_start", content_block=block | {"input": {}}),
            self._event("content_block_delta", delta=delta),
            self._stopped(block | {"input": json.loads(call.arguments)}),
        ]

    def end(self) -> list[Json | str]:
        about = {"delta": self._ending(), "usage": self._usage()}
        return [{"type": "message_delta", **about}, {"type": "message_stop"}]

    def failed(self, error: APIError) -> list[Json | str]:
        return [error.anthropic_body()]

    def _ending(self) -> Json:
        reason = _REASONS.get(self.ending or "")
        if self.ending == "stop" and self.stop is not None:
            reason = "stop_sequence"
        stopped = self.stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self) -> Json:
        known = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": self.num_known}
        return {
            **{"input_tokens": self.num_prompt - self.num_known, **known},
            "output_tokens": self.num_new,
            "output_tokens_details": {"thinking_tokens": self.num_thought},
        }

    def _event(self, name: str, **said: object) -> Json:
        return {"type": name, "index": len(self.blocks), **said}

    def _stopped(self, block: Json) -> Json:
        event = self._event("content_block_stop")
        self.blocks.append(block)
        return event


def _block(kind: Kind, text: str) -> Json:
    name, field = _NAMES[kind]
    signed = {"signature": ""} if kind == "reasoning" else {}
    return {"type": name, field: text} | signed
