"""The middleware in front of every route.

It checks the API key and the host name, gives each request an id, counts and logs answers, and
turns an exception that escapes a route into status 500. Routes need the key unless listed as
public. The files of the page at ``/`` are public, as every installation has the same; what they
show is not. ``/v1/prefill``, on prefill servers, wants a secret of the servers instead. HEAD is
answered at public routes, as monitors ask by it.
"""

from __future__ import annotations

import logging
import re
import traceback
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe.server import page
from moe.server.errors import GENERIC, APIError
from moe.server.keys import ApiKey, ApiKeys
from moe.server.log import RequestLog
from moe.server.metrics import Metrics
from moe.server.request_memory import RequestMemory

PUBLIC_PATHS = frozenset({"/health", "/ready", "/v1/prefill"}) | page.PATHS
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
logger = logging.getLogger("moe.server")


class Guard:
    """ASGI middleware.

    Args:
        app: the routes.
        metrics: counts requests by route and status.
        memory: counts the bytes of bodies.
        keys: clients must send one of them as ``Authorization: Bearer KEY`` or as ``x-api-key``;
            None: no key is needed.
        host_names: names, without port, that the Host header may have; None: any. On a loopback
            address without a key this stops web pages that point their own name at this address
            (DNS rebinding).
        origins: web pages that may ask from a browser; "*": all.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        memory: RequestMemory,
        keys: ApiKeys | None,
        host_names: Collection[str] | None,
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._memory = memory
        self._keys = keys
        self._host_names = host_names
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        if scope["method"] == "HEAD" and scope["path"] in PUBLIC_PATHS:
            scope = {**scope, "method": "GET"}  # uvicorn knows, and sends no body
        request_id = scope["request_id"] = uuid.uuid4().hex
        scope["job"] = scope["error"] = None  # routes note what the log shows
        noted, status = RequestLog(), 0
        key: ApiKey | None = None

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            app = self._app
            try:
                key = scope["api_key"] = self._admit(scope)
            except APIError as refusal:
                scope["error"] = refusal
                app = refusal.response(scope["path"])
            await app(scope, self._memory.counted(request_id, receive), send_marked)
        except Exception as error:
            log_failure(f"{request_id} of {key.name}" if key else request_id, error)
            if not status:
                response = APIError(500, GENERIC).response(scope["path"])
                await response(scope, receive, send_marked)
        finally:
            self._memory.give_back(request_id)
            if key is not None:
                key.end()
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(route, str(status or 499)).inc()
            looks = scope["method"] == "GET" and (scope["path"] in PUBLIC_PATHS or status < 400)
            noted.end(scope, status or 499, key.name if key else None, looks=looks)

    def _admit(self, scope: Scope) -> ApiKey | None:
        """The key of a request, which has begun with it; None where none is needed.

        Raises `APIError` if the request may not go on.
        """
        headers = Headers(scope=scope)
        if self._host_names is not None:
            name = re.sub(r":\d+$", "", headers.get("host", "")).lower()
            if name not in self._host_names:
                raise APIError(
                    400,
                    "the Host header names another host; use localhost, or start with --api-key",
                    code="wrong_host",
                )
        if "content-length" in headers and "transfer-encoding" in headers:
            # Two servers that believe different ones see different requests (smuggling).
            raise APIError(
                400,
                "Content-Length and Transfer-Encoding exclude each other; send one of them",
                headers={"connection": "close"},
            )
        if scope["path"] in PUBLIC_PATHS:
            return None
        # CORS hides answers from other pages; what asking costs it does not spare.
        asks = headers.get("sec-fetch-site", "none")
        if asks not in ("none", "same-origin") and not self._origins & {"*", headers.get("origin")}:
            raise APIError(
                403,
                "web pages of other origins may not ask; name theirs in server.allowed_origins",
                code="cross_site",
            )
        if self._keys is None:
            return None
        sent = dict(scope["headers"])
        scheme, _, bearer = sent.get(b"authorization", b"").partition(b" ")
        key = self._keys.find(bearer) if scheme.lower() == b"bearer" else None
        key = key or self._keys.find(sent.get(b"x-api-key", b""))
        if key is None:
            raise APIError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY or "
                "x-api-key",
                code="invalid_api_key",
            )
        key.begin()
        return key


def log_failure(request_id: str, error: BaseException) -> None:
    """Log where a request failed. Not the message of the error: it may quote the client's text."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", request_id, type(error).__name__, frames)
