"""Paths as clients write them: without ``/v1``, with it twice, and those of other servers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

_VERSION = "/v1"
_NO_EMBEDDINGS = "this server generates text, and has no embeddings"
_NOT_KEPT = "the server keeps no answers and no conversations"
_OLLAMA = "this is no Ollama server: send OpenAI's requests to /v1/chat/completions"
_LLAMA_CPP = "this is a route of llama.cpp's server"
_ADMIN = "models and adapters are chosen when the server starts"
_FOREIGN = {
    r"/v1/(embeddings|rerank|score|pooling|classify)|/(embed|rerank|score|pooling|classify)": (
        _NO_EMBEDDINGS
    ),
    r"/v1/embedding|/embeddings?": _NO_EMBEDDINGS,
    r"/v1/audio(/.*)?": "this server neither hears nor speaks",
    r"/v1/images(/.*)?": "this server makes no images; images in prompts are sent in messages",
    r"/v1/videos(/.*)?": "this server makes no films",
    r"/v1/moderations": "this server moderates nothing",
    r"/v1/(files|uploads|batches|fine_tuning|vector_stores)(/.*)?": (
        "the server keeps no files; `moe generate --batch-file` answers a file of requests"
    ),
    r"/v1/messages/batches(/.*)?": (
        "the server keeps no files; `moe generate --batch-file` answers one of OpenAI's requests"
    ),
    r"/v1/(assistants|threads|conversations|containers)(/.*)?": (
        f"{_NOT_KEPT}: send the whole conversation to /v1/responses"
    ),
    r"/v1/responses/(?!input_tokens$).+|/v1/chat/completions/.+": (
        f"{_NOT_KEPT}: an answer is sent once"
    ),
    r"/v1/realtime(/.*)?": "this server has no sockets; /v1/chat/completions streams",
    r"/api(/.*)?": _OLLAMA,
    r"/props|/slots(/.*)?|/lora-adapters": f"{_LLAMA_CPP}: /v1/status says what this one runs",
    r"/completion|/infill": f"{_LLAMA_CPP}: send OpenAI's requests to /v1/completions",
    r"/apply-template": f"{_LLAMA_CPP}: /tokenize takes messages, and /detokenize shows the text",
    r"/generate(_stream)?|/invocations": "send OpenAI's requests to /v1/completions",
    r"/(v1/)?(load|unload)_lora_adapter|/update_weights.*|/model/.*": _ADMIN,
    r"/(get_)?(model|server)_info": "/v1/models and /v1/status say that",
    r"/ping|/healthz|/livez": "/health says that the process is alive, /ready that it answers",
    r"/docs|/redoc": "/openapi.json describes the routes",
}


def foreign(path: str) -> str:
    """Why a path of another server is none here, and what is in its place; or ""."""
    for pattern, why in _FOREIGN.items():
        if re.fullmatch(pattern, path):
            return why
    return ""


class Versioned:
    """ASGI middleware that finds the routes below ``/v1`` without it, and with it twice.

    Args:
        app: everything else.
        routes: of the application.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = list(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] == "http" and not self._knows(scope, path):
            short = path.removeprefix(_VERSION)
            for meant in (short if short.startswith(f"{_VERSION}/") else "", f"{_VERSION}{path}"):
                if meant and self._knows(scope, meant):
                    scope = {**scope, "path": meant, "raw_path": meant.encode()}
                    break
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope, path: str) -> bool:
        """Return whether a route has this path, with any method."""
        asked = {**scope, "path": path}
        return any(route.matches(asked)[0] is not Match.NONE for route in self._routes)
