"""``/v1/chat/completions`` and ``/v1/completions``: from a checked request to an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moe.completion import StreamEvent, collect
from moe.model import MoE
from moe.scheduler import Group
from moe.server.bodies import json_body, schema_of
from moe.server.errors import APIError
from moe.server.job import Job
from moe.server.outputs import Answer, ChatShape, CompletionShape, Json, Shape, TokenText, usage
from moe.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from moe.server.runner import Runner
from moe.server.streams import EventStream, while_connected
from moe.text import Prompt, TextCodec

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest))
async def chat(
    request: Request, body: Annotated[ChatRequest, Depends(json_body(ChatRequest))]
) -> Response:
    """Answer a conversation."""
    messages = [message.model_dump() for message in body.messages]
    return await _generate(request, body, [messages], ChatShape)


@router.post("/v1/completions", openapi_extra=schema_of(CompletionRequest))
async def completions(
    request: Request, body: Annotated[CompletionRequest, Depends(json_body(CompletionRequest))]
) -> Response:
    """Continue one prompt or several."""
    return await _generate(request, body, body.prompt, CompletionShape)


def check_model(request: Request, name: str | None) -> None:
    """Raises `APIError` 404 unless this is the model that is served, or none was named."""
    served: str = request.app.state.model_name
    if name not in (None, served):
        raise APIError(
            404,
            f"no such model; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


async def _generate(
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    shape: Callable[[TokenText], Shape],
) -> Response:
    check_model(request, body.model)
    runner: Runner = request.app.state.runner
    work = runner.submit(partial(_groups, body=body, prompts=prompts))
    job = await while_connected(request.receive, work)
    assert runner.model is not None
    text = token_text(runner.model.codec)
    answer = Answer(shape(text), request.scope["request_id"], request.app.state.model_name)
    if body.stream:
        close = partial(runner.close, job)
        timeout_s = request.app.state.settings.send_timeout_s
        return EventStream(_chunks(answer, job, body), close, timeout_s)
    try:
        events = await while_connected(request.receive, _all(job))
    finally:
        runner.close(job)
    done = collect(events)
    num_new = sum(len(completion.tokens) for completion in done)
    return JSONResponse(answer.whole(done, usage(job.num_prompt_tokens, num_new)))


def _groups(model: MoE, body: GenerationRequest, prompts: Sequence[Prompt]) -> list[Group]:
    """Runs beside the event loop. Without a number of new tokens the default is cut to fit."""
    defaults = model.profile.profile.generation
    groups = []
    for prompt in prompts:
        token_ids = model.codec.encode(prompt)
        num_new = body.max_new_tokens
        if num_new is None:
            room = (model.context_length or len(token_ids) + defaults.max_new_tokens) - len(
                token_ids
            )
            num_new = max(min(defaults.max_new_tokens, room), 1)
        groups.append(model.request(token_ids, body.sampling(defaults, num_new)))
    return groups


async def _all(job: Job) -> list[StreamEvent]:
    return [event async for event in job.events()]


async def _chunks(answer: Answer, job: Job, body: GenerationRequest) -> AsyncIterator[Json]:
    """One chunk a token, also where it adds no text yet: clients measure the time between them."""
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    more: Json = {"usage": None} if with_usage else {}
    num_new = 0
    for index in range(len(job.places)):
        if (opening := answer.opening(index)) is not None:
            yield opening | more
    async for event in job.events():
        num_new += 1
        yield answer.delta(event.prompt * body.n + event.sample, event.delta) | more
    if with_usage:
        yield answer.usage(usage(job.num_prompt_tokens, num_new))


def token_text(codec: TextCodec) -> TokenText:
    """The text of a token by itself; ``token_id:N`` for a model without tokenizer."""
    tokenizer = codec.tokenizer
    if tokenizer is None:
        return lambda token_id: f"token_id:{token_id}"
    decode = partial(cast(Any, tokenizer).decode, clean_up_tokenization_spaces=False)
    return lambda token_id: str(decode([token_id]))
