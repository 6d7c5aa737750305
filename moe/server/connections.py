"""Connections that a client drops, or keeps open without sending or reading.

uvicorn times only the pause between two requests: a client could hold a connection for ever with
headers that arrive byte by byte, with a body that the server no longer reads, or by not reading its
answer. `TimedProtocol` times headers, `moe.server.bodies` bodies, and `EventStream` streams.
`Crowd` limits how many connections there are.
`while_connected` cancels the work for a client that has gone.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

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


class Crowd:
    """All connections. Those without a request give way to new ones, those of the address that has
    most first, so that silent connections keep nobody out.

    Args:
        most: connections in all; with requests in each, uvicorn answers 503 beyond it.
        each: connections of one address (IPv6: of one network of 64 bits).
    """

    def __init__(self, most: int, each: int) -> None:
        self._most, self._each = most, each
        self._addresses: dict[TimedProtocol, str] = {}  # the oldest first
        self._counts: Counter[str] = Counter()

    def admit(self, new: TimedProtocol, address: str) -> bool:
        """Whether the connection may stay; closes another if there are too many."""
        if self._counts[address] >= self._each and not self._close_idle(address):
            return False
        if len(self._addresses) >= self._most - 1:
            self._close_idle(None)
        self._addresses[new] = address
        self._counts[address] += 1
        return True

    def leave(self, protocol: TimedProtocol) -> None:
        """Forget a connection, if it is known."""
        address = self._addresses.pop(protocol, None)
        if address is not None:
            self._counts[address] -= 1
            self._counts += Counter()  # without those of none

    def _close_idle(self, address: str | None) -> bool:
        """Close the oldest connection that has no request; False if there is none."""
        idle = [
            (-self._counts[theirs], place, protocol)
            for place, (protocol, theirs) in enumerate(self._addresses.items())
            if address in (None, theirs) and protocol.is_idle
        ]
        if not idle:
            return False
        protocol = min(idle)[2]
        self.leave(protocol)
        protocol.transport.abort()
        return True


def _address_of(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):  # none, of a socket of this machine
        return ""
    with suppress(ValueError):
        address = ipaddress.ip_address(peer[0].partition("%")[0])
        if address.version == 6 and address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return str(peer[0])


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, with a time limit whenever no request is being answered.

    Args:
        read_timeout_s: seconds from the start of the connection, or from the end of the last
            answer, until the next request's headers are complete.
        crowd: of all connections.
    """

    def __init__(self, *args: Any, read_timeout_s: float, crowd: Crowd, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout_s = read_timeout_s
        self._crowd = crowd
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._crowd.admit(self, _address_of(transport)):
            self._watch()
        else:
            transport.abort()

    @property
    def is_idle(self) -> bool:
        """No request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._crowd.leave(self)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timer, or stop it while a request is being answered."""
        if not self.is_idle:
            self._stop_timer()
        elif self._timer is None:
            self._unsent = math.inf
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._read_timeout_s, self._time_is_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:  # the client still reads its answer
            self._unsent = unsent
            self._start_timer()
        else:
            self.transport.abort()  # closing would wait until the client has read everything
