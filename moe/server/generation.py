"""From a checked request to its answer, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from moe.completion import StreamEvent
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import RequestError
from moe.model import MoE
from moe.server.answers import Answer
from moe.server.engine_queue import EngineQueue, GenerationJob
from moe.server.errors import GENERIC, APIError, ClientGone
from moe.server.fields import Json
from moe.server.guard import log_failure
from moe.server.openai.request import ChatRequest, GenerationRequest
from moe.text.tokenizer import TextCodec

# ---- Answers that last: stop the work when the client goes away, and do not wait for ever for
# one that does not read.

ServerEvent = Mapping[str, Any] | str
Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work to its end, or cancel it and raise `ClientGone`.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one JSON object or text each.

    Args:
        events: what they say. An event with a type is sent under its name.
        failed: what to say last where an exception ends it.
        close: called once, however the stream ends.
        send_timeout_s: seconds that the client may take no data before the stream is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[ServerEvent],
        failed: Callable[[APIError], Iterable[ServerEvent]],
        close: Callable[[], None],
        send_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._failed = failed
        self._close = close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(scope["request_id"], send))
        except (ClientGone, TimeoutError, asyncio.TimeoutError):
            pass
        finally:
            self._close()

    async def _send_all(self, request_id: str, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last: Iterable[ServerEvent] = ()
        try:
            async for event in self._events:
                await self._send_event(send, event)
        except APIError as error:
            last = self._failed(error)
        except (TimeoutError, asyncio.TimeoutError):
            raise
        except Exception as error:
            log_failure(request_id, error)
            last = self._failed(APIError(500, GENERIC))
        for event in last:
            await self._send_event(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, event: ServerEvent) -> None:
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        name = f"event: {event['type']}\n" if isinstance(event, Mapping) and "type" in event else ""
        body = f"{name}data: {text}\n\n".encode()
        message = {"type": "http.response.body", "body": body, "more_body": True}
        await asyncio.wait_for(send(message), self._send_timeout_s)


# ----

MAX_ECHO_LOGPROBS = 2**20


def check_model(served: Sequence[str], asked: str | None) -> str:
    """The name that was asked for, the first one where none was; `APIError` 404 for any other."""
    if asked is None:
        return served[0]
    if asked not in served:
        names = " and ".join(map(repr, served))
        raise APIError(
            404, f"no such model; this server has {names}", param="model", code="model_not_found"
        )
    return asked


async def answer(
    request: Request, body: GenerationRequest, make: Callable[[TextCodec, str, str], Answer]
) -> Response:
    """What a request asks for, whole or as a stream.

    Args:
        make: the answer, from the tokenizer, the id of the request and the name of the model.
    """
    name = check_model(request.app.state.model_names, body.model)
    queue: EngineQueue = request.app.state.queue
    job = await while_connected(request.receive, queue.submit(partial(make_groups, body=body)))
    assert queue.model is not None
    made = make(queue.model.codec, request.scope["request_id"], name)
    if body.stream:
        close = partial(queue.close, job)
        timeout_s = request.app.state.settings.send_timeout_s
        return EventStream(_events(made, job), made.failed, close, timeout_s)
    try:
        events = await while_connected(request.receive, _all(job))
    finally:
        queue.close(job)
    # The texts of a long prompt's tokens take a while.
    whole = partial(made.whole, job.num_prompt_tokens, events)
    return await run_in_threadpool(lambda: JSONResponse(whole()))


def make_groups(model: MoE, body: GenerationRequest) -> list[SequenceGroup]:
    """What the engine is to run: a group for each prompt. Takes a while, and has no event loop."""
    said, chat = body.sampling(), isinstance(body, ChatRequest)
    shown: Collection[int] = ()
    if isinstance(body, ChatRequest):
        batch = [chat_prompt(model, body)]
        said["structure"] = body.structure_for(model.codec, batch[0])
        shown = body.shown_tokens(model.codec)
    else:
        batch = [model.codec.encode(prompt, model.context_length) for prompt in body.prompts]
    _check_echo(body, sum(map(len, batch)))
    groups = []
    for token_ids in batch:
        params = model.params(len(token_ids), chat=chat, **said)
        salt, priority = body.cache_salt, body.priority
        groups.append(model.request(token_ids, params, salt, priority, shown, chat=chat))
    return groups


def chat_prompt(model: MoE, body: ChatRequest) -> list[int]:
    """Token ids of a conversation. Raises `APIError` 400 and `RequestError`."""
    tools = model.codec.tools
    if body.needs_tools and tools.format is None:
        message = f"this model cannot be given tools: {tools.reason}"
        raise APIError(400, message, param="tools", code="tools_not_supported")
    settings = body.template_settings(model.codec)
    (conversation,) = body.prompts
    limit, offered = model.context_length, body.offered_tools
    return model.codec.encode(conversation, limit, offered, settings, body.ending)


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


async def _all(job: GenerationJob) -> list[StreamEvent]:
    return [event async for event in job.events()]


async def _events(answer: Answer, job: GenerationJob) -> AsyncIterator[Json | str]:
    for event in answer.begin(job.num_prompt_tokens, len(job.places)):
        yield event
    async for token in job.events():
        if token.delta.prompt_logprobs is None:
            added = answer.more(token)
        else:
            added = await run_in_threadpool(answer.more, token)
        for event in added:
            yield event
    for last in answer.end():
        yield last
