"""The routes that generate: OpenAI's chats, completions and responses, Anthropic's messages."""

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
from moe.server.fields import Json
from moe.server.generation import answer, chat_prompt, check_model
from moe.server.openai.chat import ChatAnswer
from moe.server.openai.completion import CompletionAnswer
from moe.server.openai.request import ChatRequest, CompletionRequest
from moe.server.responses.answer import ResponsesAnswer
from moe.server.responses.request import ResponsesRequest
from moe.server.runner import Runner

_STREAMS: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}
router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest), responses=_STREAMS)
async def chat(
    request: Request, body: Annotated[ChatRequest, Depends(json_body(ChatRequest))]
) -> Response:
    """Answer a conversation."""
    return await answer(request, body, partial(ChatAnswer, body))


@router.post("/v1/completions", openapi_extra=schema_of(CompletionRequest), responses=_STREAMS)
async def completions(
    request: Request, body: Annotated[CompletionRequest, Depends(json_body(CompletionRequest))]
) -> Response:
    """Continue one prompt or several."""
    return await answer(request, body, partial(CompletionAnswer, body))


@router.post("/v1/responses", openapi_extra=schema_of(ResponsesRequest), responses=_STREAMS)
async def responses(
    request: Request, body: Annotated[ResponsesRequest, Depends(json_body(ResponsesRequest))]
) -> Response:
    """Answer a conversation, in OpenAI's newer words."""
    return await answer(request, body.chat, partial(ResponsesAnswer, body))


@router.post("/v1/messages", openapi_extra=schema_of(MessagesRequest), responses=_STREAMS)
async def messages(
    request: Request, body: Annotated[MessagesRequest, Depends(json_body(MessagesRequest))]
) -> Response:
    """Answer a conversation, in Anthropic's words."""
    return await answer(request, body.chat, partial(MessagesAnswer, body))


@router.post("/v1/messages/count_tokens", openapi_extra=schema_of(CountRequest))
async def count_tokens(
    request: Request, body: Annotated[CountRequest, Depends(json_body(CountRequest))]
) -> dict[str, int]:
    """Tokens of the prompt that such a request to ``/v1/messages`` has."""
    check_model(request.app.state.model_names, body.model)

    def work(model: MoE) -> dict[str, int]:
        return {"input_tokens": len(chat_prompt(model, body.chat))}

    runner: Runner = request.app.state.runner
    return await runner.text(work)
