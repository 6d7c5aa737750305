"""From a checked request to its HTTP answer.

`answer` queues the sequence groups that `make_groups` builds, and returns their tokens, as the
dialect's `Answer` writes them, in one piece or as a stream of events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from moe.completion import StreamEvent
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RequestError
from moe.model import MoE
from moe.server.answers import Answer
from moe.server.bodies import is_heavy
from moe.server.engine_queue import EngineQueue
from moe.server.engine_thread import GenerationJob
from moe.server.errors import APIError
from moe.server.event_stream import EventStream, while_connected
from moe.server.fields import NO_LIMIT, Json
from moe.server.ignored import Ignored
from moe.server.image_links import fetch_images
from moe.server.json_answer import JSONAnswer
from moe.server.keys import caller_of
from moe.server.openai.request import ChatRequest, GenerationRequest
from moe.server.request_memory import RequestMemory, bytes_of
from moe.text.tokenizer import Prompt, TextCodec

MAX_ECHO_LOGPROBS = 2**20
ANY_MODEL = "*"
"""Among the served names: every name is one."""
_NO_IMAGE = "[image: this model reads text only]"


def check_model(served: Sequence[str], asked: str | None) -> str:
    """The model name that a request means; the first one if it names none.

    Args:
        served: with `ANY_MODEL` among them, every name is one.

    Raises `APIError` 404 for a name that is not served.
    """
    if asked is None or (not asked and ANY_MODEL in served):
        return served[0]
    if asked not in served and ANY_MODEL not in served:
        names = " and ".join(map(repr, served))
        raise APIError(
            404, f"no such model; this server has {names}", param="model", code="model_not_found"
        )
    return asked


async def answer(
    request: Request, body: GenerationRequest, make: Callable[[TextCodec, str, str], Answer]
) -> Response:
    """Run a request and answer it, whole or as a stream.

    Args:
        make: makes the `Answer` from the tokenizer, the request's id and the model's name.
    """
    name = check_model(request.app.state.model_names, body.model)
    queue: EngineQueue = request.app.state.queue
    build = partial(make_groups, body=body, tenant=tenant_of(request))
    heavy = is_heavy(request) or body.structure is not None or bool(_tools_of(body))
    limit_s = request.app.state.settings.request_timeout_s
    timeout_s = min(filter(None, (body.timeout, limit_s)), default=None)
    trace = None
    if queue.telemetry is not None:
        route, request_id = request.url.path, request.scope["request_id"]
        trace = queue.telemetry.begin(request.headers, route, name, request_id)

    async def fetch() -> None:
        if isinstance(body, ChatRequest):
            await fetch_images(request, body.messages)

    submitted = queue.submit(
        build, caller_of(request), heavy=heavy, timeout_s=timeout_s, trace=trace, before=fetch
    )
    job = request.scope["job"] = await while_connected(request.receive, submitted)
    spend = spending(request)
    spend(job.num_prompt_tokens)
    assert queue.model is not None
    made = make(queue.model.codec, request.scope["request_id"], name)
    if body.stream:
        close = partial(queue.close, job)
        timeout_s = request.app.state.settings.send_timeout_s
        events = _events(made, job, queue.memory, spend)
        stream = EventStream(events, made.failed, close, timeout_s)
        return name_ignored(request, stream)
    try:
        tokens = await while_connected(request.receive, _all(job, spend))
        # Decoding the tokens of a long prompt takes too long for the event loop.
        whole = partial(made.whole, job.num_prompt_tokens, tokens)
        return name_ignored(request, await run_in_threadpool(lambda: JSONAnswer(whole())))
    finally:
        queue.close(job)


def name_ignored(request: Request, response: Response) -> Response:
    """The response to a request, which names the fields of its body that had no effect."""
    ignored: Ignored | None = request.state.ignored
    if ignored is not None:
        ignored.name_in(response.headers, request.url.path)
    return response


def tenant_of(request: Request) -> str:
    """The name of the client's key; empty where the server asks for none."""
    key = request.scope["api_key"]
    return "" if key is None else str(key.name)


def _tools_of(body: GenerationRequest) -> object:
    return body.offered_tools if isinstance(body, ChatRequest) else None


def make_groups(model: MoE, body: GenerationRequest, tenant: str = "") -> list[SequenceGroup]:
    """One sequence group for each prompt. Slow: call it outside of the event loop.

    Args:
        tenant: shares known prefixes with no other.

    Raises `APIError` 400 and `RequestError` for what this model cannot do.
    """
    sampling, chat = body.sampling(), isinstance(body, ChatRequest)
    shown: Collection[int] = ()
    answers = False  # the text does not continue the prompt's
    ending = None
    if isinstance(body, ChatRequest):
        batch = [chat_prompt(model, body)]
        sampling["structure"] = body.structure_for(model.codec, batch[0])
        sampling["thinking"] = body.thinking_budget(model.codec, batch[0])
        shown = body.shown_tokens(model.codec)
        answers = not body.continue_final_message
        ending = body.ending_with_call(model.codec, batch[0])
    else:
        batch = [model.codec.encode(prompt, model.context_length) for prompt in body.prompts]
    _check_echo(body, sum(map(len, batch)))
    groups = []
    for token_ids in batch:
        if body.max_new_tokens == NO_LIMIT:
            sampling["max_new_tokens"] = model.room_for(len(token_ids))
        params = model.params(len(token_ids), chat=chat, **sampling)
        salt = f"{tenant}\0{body.cache_salt}" if tenant else body.cache_salt
        priority = body.priority
        about = (token_ids, params, salt, priority, shown)
        groups.append(model.request(*about, chat=answers, ending=ending))
    return groups


def chat_prompt(model: MoE, body: ChatRequest) -> list[int]:
    """Token ids of a conversation. Raises `APIError` 400 and `RequestError` if it has none."""
    tools = model.codec.tools
    template = model.codec.response_template
    readable = not isinstance(template, str) and template.has_calls
    if body.needs_tools and tools.format is None and not readable:
        message = f"this model cannot be given tools: {tools.reason}"
        raise APIError(400, message, param="tools", code="tools_not_supported")
    settings = body.template_settings(model.codec, body.ignored)
    (conversation,) = body.prompts
    limit, offered = model.context_length, body.offered_tools
    if body.ignored is not None and isinstance(model.codec.images, str):
        conversation = _without_images_of_tools(conversation, body.ignored)
    return model.codec.encode(conversation, limit, offered, settings, body.ending)


def _without_images_of_tools(conversation: Prompt, ignored: Ignored) -> Prompt:
    """Messages with a line of text for each image that a tool has returned: a client cannot take
    its history back."""
    made: list[Any] = []
    for message in conversation:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(message, dict) and message["role"] == "tool" and isinstance(content, list):
            texts = [part["text"] if part["type"] == "text" else _NO_IMAGE for part in content]
            message = message | {"content": "\n".join(texts)}
            ignored.add("messages.content.image")
        made.append(message)
    return made


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


def spending(request: Request) -> Callable[[int], object]:
    """Counts tokens for the request's API key, if it has one."""
    key = request.scope["api_key"]
    return (lambda _: None) if key is None else key.spend


async def _all(job: GenerationJob, spend: Callable[[int], object]) -> list[StreamEvent]:
    events = []
    async for event in job.events():
        spend(1)
        events.append(event)
    return events


async def _events(
    answer: Answer,
    job: GenerationJob,
    memory: RequestMemory,
    spend: Callable[[int], object],
) -> AsyncIterator[Json | str]:
    for event in answer.begin(job.num_prompt_tokens, len(job.places)):
        yield event
    async for token in job.events():
        spend(1)
        if token.delta.prompt_logprobs is None:
            added = answer.more(token)
        else:
            added = await run_in_threadpool(answer.more, token)
        for event in added:
            yield event
        if not answer.keeps_tokens:
            memory.give_back(job, bytes_of(token))
    for last in answer.end():
        yield last
