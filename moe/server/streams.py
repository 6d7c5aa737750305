"""Answers that last: stop the work when the client goes away, and do not wait for ever for one
that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe.server.errors import GENERIC, APIError, ClientGone
from moe.server.guard import log_failure

Event = Mapping[str, Any] | str
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
        events: AsyncIterator[Event],
        failed: Callable[[APIError], Iterable[Event]],
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
        last: Iterable[Event] = ()
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

    async def _send_event(self, send: Send, event: Event) -> None:
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        name = f"event: {event['type']}\n" if isinstance(event, Mapping) and "type" in event else ""
        body = f"{name}data: {text}\n\n".encode()
        message = {"type": "http.response.body", "body": body, "more_body": True}
        await asyncio.wait_for(send(message), self._send_timeout_s)
