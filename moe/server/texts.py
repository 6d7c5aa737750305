"""``/tokenize`` and ``/detokenize``: prompts to token ids and back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field, model_validator
from starlette.requests import Request

from moe.model import MoE
from moe.server.base import RequestBody
from moe.server.bodies import json_body, schema_of
from moe.server.fields import MAX_MESSAGES, Items
from moe.server.generation import check_model
from moe.server.openai.messages import ChatEnding, Message, conversation
from moe.server.runner import Runner

router = APIRouter()


class TokenizeRequest(ChatEnding):
    """A prompt or messages, as one of the two routes above would read them."""

    model: str | None = None
    prompt: str | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        if self.messages is None and (self.add_generation_prompt or self.continue_final_message):
            raise ValueError("add_generation_prompt, continue_final_message: only with messages")
        return self


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Items[int]


@router.post("/tokenize", openapi_extra=schema_of(TokenizeRequest))
async def tokenize(
    request: Request, body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))]
) -> dict[str, Any]:
    """Token ids of a text, or of messages put through the chat template."""
    check_model(request.app.state.model_names, body.model)

    def work(model: MoE) -> dict[str, Any]:
        prompt = conversation(body.messages or ()) if body.prompt is None else body.prompt
        ids = model.codec.encode(prompt, ending=body.ending)
        return {"tokens": ids, "count": len(ids), "max_model_len": model.context_length}

    runner: Runner = request.app.state.runner
    return await runner.text(work)


@router.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
async def detokenize(
    request: Request, body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]
) -> dict[str, Any]:
    """Text of token ids, special tokens included."""
    check_model(request.app.state.model_names, body.model)

    def work(model: MoE) -> dict[str, Any]:
        return {"prompt": model.codec.decode(model.codec.encode(body.tokens))}

    runner: Runner = request.app.state.runner
    return await runner.text(work)
