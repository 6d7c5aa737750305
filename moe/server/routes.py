"""The routes that read prompts: the four that generate, and those that count or show tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from moe.errors import ContextError
from moe.model import MoE
from moe.server.anthropic import CountTokensRequest, MessagesAnswer, MessagesRequest
from moe.server.bodies import RequestBody, is_heavy, json_body, schema_of
from moe.server.engine_queue import EngineQueue
from moe.server.event_stream import while_connected
from moe.server.fields import MAX_MESSAGES, Items, Json
from moe.server.generation import (
    answer,
    chat_prompt,
    check_model,
    name_ignored,
    spending,
)
from moe.server.image_links import fetch_images
from moe.server.json_answer import JSONAnswer
from moe.server.keys import caller_of
from moe.server.openai.answers import ChatAnswer, CompletionAnswer
from moe.server.openai.request import (
    ChatEnding,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    template_messages,
)
from moe.server.responses import InputTokensRequest, ResponsesAnswer, ResponsesRequest

_STREAMS: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}
router = APIRouter()
_CONTEXTS, _LEAST_TOKENS = 4, 2**15


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
    """Answer a conversation in the shape of OpenAI's Responses."""
    return await answer(request, body.chat, partial(ResponsesAnswer, body))


@router.post("/v1/responses/input_tokens", openapi_extra=schema_of(InputTokensRequest))
async def input_tokens(
    request: Request, body: Annotated[InputTokensRequest, Depends(json_body(InputTokensRequest))]
) -> Response:
    """Number of prompt tokens of the same request to ``/v1/responses``."""

    def count(model: MoE) -> tuple[int, Json]:
        num_tokens = len(chat_prompt(model, body.chat))
        return num_tokens, {"object": "response.input_tokens", "input_tokens": num_tokens}

    return await _with_model(request, body.model, count, body.chat.messages)


@router.post("/v1/messages", openapi_extra=schema_of(MessagesRequest), responses=_STREAMS)
async def messages(
    request: Request, body: Annotated[MessagesRequest, Depends(json_body(MessagesRequest))]
) -> Response:
    """Answer a conversation in the shape of Anthropic's Messages."""
    return await answer(request, body.chat, partial(MessagesAnswer, body))


@router.post("/v1/messages/count_tokens", openapi_extra=schema_of(CountTokensRequest))
async def count_tokens(
    request: Request, body: Annotated[CountTokensRequest, Depends(json_body(CountTokensRequest))]
) -> Response:
    """Number of prompt tokens of the same request to ``/v1/messages``."""
    return await _with_model(
        request,
        body.model,
        lambda model: (n := len(chat_prompt(model, body.chat)), {"input_tokens": n}),
        body.chat.messages,
    )


class TokenizeRequest(ChatEnding):
    """A prompt, as `/v1/completions` reads it, or messages, as `/v1/chat/completions` does."""

    model: str | None = None
    prompt: str | None = Field(default=None, min_length=1)
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)

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
) -> Response:
    """Token ids of a text, or of messages put through the chat template."""

    def work(model: MoE) -> tuple[int, Json]:
        prompt = template_messages(body.messages or ()) if body.prompt is None else body.prompt
        limit = most_tokens(model)
        ids = model.codec.encode(prompt, limit, ending=body.ending)
        if len(ids) > limit:
            raise ContextError(f"the text has {len(ids)} tokens; at most {limit} are counted here")
        counted = {"tokens": ids, "count": len(ids), "max_model_len": model.context_length}
        return len(ids), counted

    return await _with_model(request, body.model, work, body.messages or ())


@router.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
async def detokenize(
    request: Request, body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]
) -> Response:
    """Text of token ids, special tokens included."""

    def work(model: MoE) -> tuple[int, Json]:
        ids, limit = body.tokens, most_tokens(model)
        if len(ids) > limit:
            raise ContextError(f"tokens has {len(ids)} ids; at most {limit} are written as text")
        return len(ids), {"prompt": model.codec.decode(model.codec.encode(ids))}

    return await _with_model(request, body.model, work)


@router.post("/v1/experts/tokens", openapi_extra=schema_of(TokenizeRequest))
async def expert_tokens(
    request: Request, body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))]
) -> Response:
    """A text's last tokens, and for each MoE layer the experts that each of them goes to."""
    check_model(request.app.state.model_names, body.model)
    queue: EngineQueue = request.app.state.queue

    def encode(model: MoE) -> tuple[list[int], list[str]]:
        prompt = template_messages(body.messages or ()) if body.prompt is None else body.prompt
        ids = model.codec.encode(prompt, model.context_length, ending=body.ending)
        ids = ids[-model.profile.profile.prefill.chunk_tokens :]
        return ids, [model.codec.decode([token]) for token in ids]

    async def work() -> Response:
        await fetch_images(request, body.messages or ())
        caller = caller_of(request)
        ids, texts = await queue.text(encode, caller, heavy=True)
        spending(request)(len(ids))
        chosen = await queue.expert_choices(ids, caller)
        answer = await run_in_threadpool(JSONAnswer, {"tokens": texts, "experts": chosen})
        return name_ignored(request, answer)

    return await while_connected(request.receive, work())


def most_tokens(model: MoE) -> int:
    """Return the most tokens that a text may have to be counted: more than the context, to be
    shortened."""
    return _CONTEXTS * max(model.context_length or 0, _LEAST_TOKENS)


async def _with_model(
    request: Request,
    name: str | None,
    work: Callable[[MoE], tuple[int, Json]],
    messages: Sequence[ChatMessage] = (),
) -> Response:
    """The answer that the model of that name gives, worked out and written off the event loop.

    Args:
        work: how many tokens the request's key pays for, and the answer.
        messages: those whose links to images are fetched before.
    """
    check_model(request.app.state.model_names, name)
    queue: EngineQueue = request.app.state.queue

    def write(model: MoE) -> tuple[int, Response]:
        tokens, counted = work(model)
        return tokens, JSONAnswer(counted)

    async def answering() -> Response:
        await fetch_images(request, messages)
        tokens, answer = await queue.text(write, caller_of(request), heavy=is_heavy(request))
        spending(request)(tokens)
        return name_ignored(request, answer)

    return await while_connected(request.receive, answering())
