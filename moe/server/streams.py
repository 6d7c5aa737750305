"""Answers that last: stop the work when the client goes away, and do not wait for ever for one
that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe.server.errors import GENERIC, APIError, ClientGone
from moe.server.guard import log_failure

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
    """Server-sent events, one JSON object each, then ``[DONE]``.

    Args:
        chunks: the objects. An exception in the midst becomes a last event with an error.
        close: called once, however the stream ends.
        send_timeout_s: seconds that the client may take no data before the stream is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Mapping[str, Any]],
        close: Callable[[], None],
        send_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
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
        last = "[DONE]"
        try:
            async for chunk in self._chunks:
                await self._send_event(send, json.dumps(chunk, separators=(",", ":")))
        except APIError as error:
            last = json.dumps(error.body())
        except (TimeoutError, asyncio.TimeoutError):
            raise
        except Exception as error:
            log_failure(request_id, error)
            last = json.dumps(APIError(500, GENERIC).body())
        await self._send_event(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, text: str) -> None:
        message = {
            "type": "http.response.body",
            "body": f"data: {text}\n\n".encode(),
            "more_body": True,
        }
        await asyncio.wait_for(send(message), self._send_timeout_s)
