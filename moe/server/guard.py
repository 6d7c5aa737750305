"""What stands in front of every route: the key, the host name, a request id, and a wall that no
exception passes. Routes are closed unless listed as public."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import traceback
import uuid
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe.server.errors import GENERIC, APIError
from moe.server.metrics import Metrics

PUBLIC_PATHS = frozenset({"/health", "/ready"})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
logger = logging.getLogger("moe.server")


class Guard:
    """ASGI middleware.

    Args:
        app: the routes.
        metrics: where requests are counted.
        api_key: what clients must send as ``Authorization: Bearer KEY``, or as ``x-api-key`` like
            Anthropic's; None lets everybody in.
        host_names: names that a request's Host header may have, without port; None for any. On a
            loopback address without a key this keeps web pages out that point their own name here
            (DNS rebinding).
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        api_key: str | None,
        host_names: Collection[str] | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._api_key = api_key
        self._host_names = host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        request_id = scope["request_id"] = uuid.uuid4().hex
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            refusal = self._refusal(scope)
            app = self._app if refusal is None else refusal.response(scope["path"])
            await app(scope, receive, send_marked)
        except Exception as error:
            log_failure(request_id, error)
            if not status:
                response = APIError(500, GENERIC).response(scope["path"])
                await response(scope, receive, send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(route, str(status or 499)).inc()

    def _refusal(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        if self._host_names is not None:
            name = re.sub(r":\d+$", "", headers.get("host", "")).lower()
            if name not in self._host_names:
                return APIError(
                    400,
                    "the Host header names another host; use localhost, or start with --api-key",
                    code="wrong_host",
                )
        if self._api_key is None or scope["path"] in PUBLIC_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_key(key):
            return None
        if self._is_key(headers.get("x-api-key", "")):
            return None
        return APIError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY or x-api-key",
            code="invalid_api_key",
        )

    def _is_key(self, sent: str) -> bool:
        assert self._api_key is not None
        # Headers are decoded as latin-1.
        return hmac.compare_digest(sent.strip().encode("latin-1"), self._api_key.encode())


def log_failure(request_id: str, error: BaseException) -> None:
    """The place of a failure, not its message: a message may quote what a client wrote."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", request_id, type(error).__name__, frames)


# ---- Connections that send too slowly, or nothing at all, are closed.
#
# uvicorn times only the pause between two requests: a client could hold a connection for ever
# with headers that drip in, with a body that nobody reads any more, or by not reading its answer.


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
