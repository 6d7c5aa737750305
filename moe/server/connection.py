"""Connections that send too slowly, or nothing at all, are closed.

uvicorn times only the pause between two requests: a client could hold a connection for ever with
headers that drip in, with a body that nobody reads any more, or by not reading its answer.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """uvicorn's protocol with a time limit on everything that is not an answer being made.

    Bodies are timed where they are read, and streams where they are sent.

    Args:
        read_timeout_s: from the start of the connection, or the end of the last answer, until the
            next request's headers are complete.
    """

    def __init__(self, *args: Any, read_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout_s = read_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Time the client, unless a request of its is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
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
        if 0 < unsent < self._unsent:  # it still reads its answer
            self._unsent = unsent
            self._start_timer()
        else:
            self.transport.abort()  # closing would wait for what it does not read
