"""``/v1/chat/completions`` and ``/v1/completions``; from a checked request to its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moe.completion import StreamEvent
from moe.engine.wave import Group
from moe.errors import RequestError
from moe.model import MoE
from moe.server.bodies import json_body, schema_of
from moe.server.chunks import Answer
from moe.server.errors import APIError
from moe.server.job import Job
from moe.server.messages import conversation
from moe.server.outputs import ChatShape, CompletionShape, Json
from moe.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from moe.server.runner import Runner
from moe.server.streams import EventStream, while_connected
from moe.text.prompts import Prompt

MAX_ECHO_LOGPROBS = 2**20
STREAMS: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}
router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest), responses=STREAMS)
async def chat(
    request: Request, body: Annotated[ChatRequest, Depends(json_body(ChatRequest))]
) -> Response:
    """Answer a conversation."""
    return await answer(request, body, [conversation(body.messages)], partial(_chat, body))


@router.post("/v1/completions", openapi_extra=schema_of(CompletionRequest), responses=STREAMS)
async def completions(
    request: Request, body: Annotated[CompletionRequest, Depends(json_body(CompletionRequest))]
) -> Response:
    """Continue one prompt or several."""
    return await answer(request, body, body.prompt, partial(_completion, body))


def _chat(body: ChatRequest, model: MoE, request_id: str, name: str) -> Words:
    return Answer(ChatShape(model.codec, body), body, request_id, name)


def _completion(body: CompletionRequest, model: MoE, request_id: str, name: str) -> Words:
    return Answer(CompletionShape(model.codec, body), body, request_id, name)


def check_model(request: Request, name: str | None) -> None:
    """Raises `APIError` 404 unless this is the model that is served, or none was named."""
    check_name(request.app.state.model_name, name)


def check_name(served: str, name: str | None) -> None:
    """Raises `APIError` 404 unless this is the model that is served, or none was named."""
    if name not in (None, served):
        raise APIError(
            404,
            f"no such model; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


class Words(Protocol):
    """How a route words the answer to one request, of which it is a part."""

    def whole(self, num_prompt: int, events: Sequence[StreamEvent]) -> Json:
        """The answer when all of its sequences have ended."""

    def begin(self, num_prompt: int, num_sequences: int) -> list[Json]:
        """What a stream begins with, before the first token."""

    def more(self, event: StreamEvent) -> list[Json]:
        """What a token adds to it."""

    def end(self) -> list[Json | str]:
        """What comes last."""

    def failed(self, error: APIError) -> list[Json | str]:
        """What comes last where there is no end."""


async def answer(
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    wording: Callable[[MoE, str, str], Words],
) -> Response:
    """What a request asks for, whole or as a stream.

    Args:
        wording: made of the model, the id of the request and the name of the model.
    """
    check_model(request, body.model)
    runner: Runner = request.app.state.runner
    work = runner.submit(partial(make_groups, body=body, prompts=prompts))
    job = await while_connected(request.receive, work)
    assert runner.model is not None
    words = wording(runner.model, request.scope["request_id"], request.app.state.model_name)
    if body.stream:
        close = partial(runner.close, job)
        timeout_s = request.app.state.settings.send_timeout_s
        return EventStream(_events(words, job), words.failed, close, timeout_s)
    try:
        events = await while_connected(request.receive, _all(job))
    finally:
        runner.close(job)
    # The texts of a long prompt's tokens take a while.
    whole = partial(words.whole, job.num_prompt_tokens, events)
    return await run_in_threadpool(lambda: JSONResponse(whole()))


def make_groups(model: MoE, body: GenerationRequest, prompts: Sequence[Prompt]) -> list[Group]:
    """Runs beside the event loop."""
    codec, said = model.codec, body.sampling()
    shown: Collection[int] = ()
    if isinstance(body, ChatRequest):
        batch = [chat_prompt(model, body, prompts[0])]
        said["structure"] = body.structure_for(codec, batch[0])
        shown = body.shown_tokens(codec)
    else:
        batch = [codec.encode(prompt, model.context_length) for prompt in prompts]
    _check_echo(body, sum(map(len, batch)))
    groups = []
    for token_ids in batch:
        chat, salt = body.is_chat, body.cache_salt
        params = model.params(len(token_ids), chat=chat, **said)
        groups.append(model.request(token_ids, params, salt, body.priority, shown, chat=chat))
    return groups


def chat_prompt(model: MoE, body: ChatRequest, messages: Prompt) -> list[int]:
    """Token ids of a conversation. Raises `APIError` 400 and `RequestError`."""
    tools = model.codec.tools
    if body.needs_tools and tools.format is None:
        message = f"this model cannot be given tools: {tools.reason}"
        raise APIError(400, message, param="tools", code="tools_not_supported")
    settings = body.template_settings(model.codec)
    return model.codec.encode(messages, model.context_length, body.offered_tools, settings)


def _check_echo(body: GenerationRequest, num_tokens: int) -> None:
    if body.num_prompt_logprobs is None:
        return
    num_logprobs = num_tokens * body.n * (body.num_prompt_logprobs + 1)
    if num_logprobs > MAX_ECHO_LOGPROBS:
        raise RequestError(
            f"echo of {num_tokens} prompt tokens with n = {body.n} and logprobs = "
            f"{body.num_prompt_logprobs} asks for {num_logprobs} log probabilities, more than "
            f"{MAX_ECHO_LOGPROBS}; send several requests"
        )


async def _all(job: Job) -> list[StreamEvent]:
    return [event async for event in job.events()]


async def _events(words: Words, job: Job) -> AsyncIterator[Json | str]:
    for event in words.begin(job.num_prompt_tokens, len(job.places)):
        yield event
    async for token in job.events():
        if token.delta.prompt_logprobs is None:
            added = words.more(token)
        else:
            added = await run_in_threadpool(words.more, token)
        for event in added:
            yield event
    for last in words.end():
        yield last
