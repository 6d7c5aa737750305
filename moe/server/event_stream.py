"""Answers that go on for a while: events as they come, and work that ends with its client.

`EventStream` sends events to a client that reads them in time. `while_connected` cancels the work
for a client that has gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe.server.errors import GENERIC, APIError, ClientGone
from moe.server.guard import log_failure

ServerEvent = Mapping[str, Any] | str
Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work. Cancels it and raises `ClientGone` if the client disconnects first.

    Call it only after the request's body has been read.
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
        events: the events. One that has a ``type`` is also sent under that name.
        failed: the last events of a stream that an exception ends.
        close: called once, however the stream ends.
        send_timeout_s: if the client accepts no data for this many seconds, the stream ends.
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
