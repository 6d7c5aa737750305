"""The middleware in front of every route.

It checks the API key and the host name, gives each request an id, counts answers, and turns an
exception that escapes a route into status 500. Routes need the key unless listed as public. The
files of the page at ``/`` are public, as every installation has the same; what they show is not.
"""

from __future__ import annotations

import hmac
import logging
import re
import traceback
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe.server import page
from moe.server.errors import GENERIC, APIError
from moe.server.metrics import Metrics

PUBLIC_PATHS = frozenset({"/health", "/ready"}) | page.PATHS
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
logger = logging.getLogger("moe.server")


class Guard:
    """ASGI middleware.

    Args:
        app: the routes.
        metrics: counts requests by route and status.
        api_key: clients must send it as ``Authorization: Bearer KEY`` or as ``x-api-key``; None:
            no key is needed.
        host_names: names, without port, that the Host header may have; None: any. On a loopback
            address without a key this stops web pages that point their own name at this address
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
    """Log where a request failed. Not the message of the error: it may quote the client's text."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", request_id, type(error).__name__, frames)
