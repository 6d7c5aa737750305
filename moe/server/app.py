"""The ASGI application, and the routes that describe the server: health, models, metrics, status.

`create_app` puts them, the routes of `moe.server.routes` and the handlers of errors behind the
`Guard`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from moe import __version__
from moe.errors import BusyError, RequestError
from moe.fair_pool import FairPool
from moe.server import experts_stream, image_links, page, routes
from moe.server.anthropic import MessagesRequest
from moe.server.bodies import nested_schemas
from moe.server.engine_queue import EngineQueue
from moe.server.errors import (
    ANTHROPIC_ERROR_SCHEMA,
    ERROR_SCHEMA,
    APIError,
    api_error,
    speaks_anthropic,
)
from moe.server.generation import ANY_MODEL, check_model
from moe.server.guard import Guard
from moe.server.ignored import HEADER
from moe.server.json_answer import JSONAnswer
from moe.server.keys import ApiKeys, caller_of
from moe.server.openai.request import ChatRequest
from moe.server.paths import Versioned, foreign
from moe.server.responses import ResponsesRequest
from moe.settings import ServerSettings
from moe.settings.profile import KEYS, value_of

_BODIES = (ChatRequest, routes.TokenizeRequest, ResponsesRequest, MessagesRequest)
_ERRORS = {"Error": ERROR_SCHEMA, "AnthropicError": ANTHROPIC_ERROR_SCHEMA}
router = APIRouter()
# Each thread that runs Python holds up the engine's and the event loop: one works for all monitors.
_LOOKS = FairPool(1, "moe-looks", each=1)


def create_app(
    queue: EngineQueue,
    model_names: Sequence[str],
    settings: ServerSettings,
    keys: ApiKeys | None = None,
    host_names: Collection[str] | None = None,
    routers: Sequence[APIRouter] = (),
) -> ASGIApp:
    """The application of one model. `Guard` explains the keys and the host names.

    Args:
        routers: routes of the server's roles.
    """
    app = FastAPI(title="moe", version=__version__, openapi_url=None)
    app.state.queue = queue
    any_name = settings.any_model and ANY_MODEL not in model_names
    app.state.model_names = [*model_names, ANY_MODEL] if any_name else model_names
    app.state.settings = settings
    app.state.image_links = asyncio.Semaphore(image_links.AT_ONCE)
    app.include_router(router)
    app.state.feed = experts_stream.ExpertsFeed(queue)
    app.include_router(routes.router)
    app.include_router(experts_stream.router)
    for own in routers:
        app.include_router(own)
    if settings.page:
        app.include_router(page.router)
    app.add_exception_handler(APIError, _answer)
    app.add_exception_handler(RequestError, _answer)
    app.add_exception_handler(BusyError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(Exception, _answer)
    app.state.description = partial(_describe, app.openapi)
    guard = Guard(app, queue.metrics, queue.memory, keys, host_names, settings.allowed_origins)
    versioned = Versioned(guard, app.routes)
    if not settings.allowed_origins:
        return versioned
    # In front of the guard: a browser's preflight request carries no key.
    return CORSMiddleware(
        versioned,
        settings.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", HEADER),
    )


def _describe(describe: Callable[[], dict[str, Any]]) -> bytes:
    """FastAPI's description with the schemas of bodies and errors, which it does not know."""
    description = describe()
    description["components"] = {"schemas": _ERRORS | nested_schemas(*_BODIES)}
    for path, operations in description["paths"].items():
        name = "AnthropicError" if speaks_anthropic(path) else "Error"
        error = {"schema": {"$ref": f"#/components/schemas/{name}"}}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "Why there is no other answer",
                "content": {"application/json": error},
            }
    return bytes(JSONAnswer(description).body)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        why = foreign(request.url.path) if error.status_code == 404 else ""
        about = why or f"no {request.method} at this path"
        error = APIError(
            error.status_code,
            f"{error.detail}: {about}; /openapi.json lists what there is",
            code="no_such_route",
            headers=error.headers,
        )
    error = request.scope["error"] = api_error(error)
    return error.response(request.url.path)


async def _look(request: Request, work: Callable[[FastAPI], Response]) -> Response:
    """Work out an answer to somebody who watches, in turns with the others."""
    return await asyncio.wrap_future(_LOOKS.submit(caller_of(request), partial(work, request.app)))


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    return await _look(request, _description)


def _description(app: FastAPI) -> Response:
    if callable(describe := app.state.description):  # the first who asks waits a second
        app.state.description = describe()
    return Response(app.state.description, media_type="application/json")


@router.get("/health")
async def health() -> dict[str, str]:
    """The process is alive. Says nothing about the model."""
    return {"status": "alive"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 if requests are accepted; else 503 with the reason and the progress of loading."""
    queue: EngineQueue = request.app.state.queue
    try:
        queue.ready_model()
    except APIError as error:
        about: dict[str, Any] = {"status": queue.state}
        if queue.state == "loading":
            about["progress"] = queue.progress.as_dict()
        return error.response(request.url.path, about)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    names = request.app.state.model_names
    cards = [_model_card(request, name) for name in names if name != ANY_MODEL]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    return _model_card(request, check_model(request.app.state.model_names, name))


def _model_card(request: Request, name: str) -> dict[str, Any]:
    queue: EngineQueue = request.app.state.queue
    limit = queue.model.context_length if queue.model else None
    return {
        "id": name,
        "object": "model",
        "created": queue.created,
        "owned_by": "moe",
        "max_model_len": limit,
    }


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    return await _look(request, _metrics)


def _metrics(app: FastAPI) -> Response:
    queue: EngineQueue = app.state.queue
    return Response(queue.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/status")
async def status(request: Request) -> Response:
    """The profile with the origin of each value, the state of model and engine, all counters."""
    return await _look(request, _status)


def _status(app: FastAPI) -> Response:
    queue: EngineQueue = app.state.queue
    about: dict[str, Any] = {
        "state": queue.state,
        "seconds": round(queue.seconds, 1),
        "occupancy": queue.occupancy(),
        "engine": queue.engine_status,
    }
    if queue.model is not None:
        loaded = queue.model.profile
        about["profile"] = {
            key: {"value": value_of(loaded.profile, key), "origin": loaded.origins[key]}
            for key in KEYS.leaves
        }
        about |= {"model": queue.model.status(), "stats": queue.model.stats()}
        about["memory_plan"] = queue.model.memory_plan.as_dict()
    return JSONResponse(about)
