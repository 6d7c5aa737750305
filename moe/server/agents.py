"""``/v1/responses`` and ``/v1/messages``: what agents send, answered as chats are."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from moe.model import MoE
from moe.server.anthropic.answer import MessagesAnswer
from moe.server.anthropic.request import CountRequest, MessagesRequest
from moe.server.bodies import json_body, schema_of
from moe.server.generation import STREAMS, Words, answer, chat_prompt, check_model
from moe.server.messages import conversation
from moe.server.responses.answer import ResponsesAnswer
from moe.server.responses.request import ResponsesRequest
from moe.server.runner import Runner

router = APIRouter()


@router.post("/v1/responses", openapi_extra=schema_of(ResponsesRequest), responses=STREAMS)
async def responses(
    request: Request, body: Annotated[ResponsesRequest, Depends(json_body(ResponsesRequest))]
) -> Response:
    """Answer a conversation, in OpenAI's newer words."""
    messages = conversation(body.chat.messages)
    return await answer(request, body.chat, [messages], partial(_response, body))


@router.post("/v1/messages", openapi_extra=schema_of(MessagesRequest), responses=STREAMS)
async def messages(
    request: Request, body: Annotated[MessagesRequest, Depends(json_body(MessagesRequest))]
) -> Response:
    """Answer a conversation, in Anthropic's words."""
    turns = conversation(body.chat.messages)
    return await answer(request, body.chat, [turns], partial(_message, body))


@router.post("/v1/messages/count_tokens", openapi_extra=schema_of(CountRequest))
async def count_tokens(
    request: Request, body: Annotated[CountRequest, Depends(json_body(CountRequest))]
) -> dict[str, int]:
    """Tokens of the prompt that such a request to ``/v1/messages`` has."""
    check_model(request, body.model)

    def work(model: MoE) -> dict[str, int]:
        prompt = chat_prompt(model, body.chat, conversation(body.chat.messages))
        return {"input_tokens": len(prompt)}

    runner: Runner = request.app.state.runner
    return await runner.text(work)


def _response(body: ResponsesRequest, model: MoE, request_id: str, name: str) -> Words:
    return ResponsesAnswer(model.codec, body, request_id, name)


def _message(body: MessagesRequest, model: MoE, request_id: str, name: str) -> Words:
    return MessagesAnswer(model.codec, body, request_id, name)
