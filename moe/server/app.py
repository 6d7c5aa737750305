"""The ASGI application: routes about the server itself, errors in one shape, and the guard."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moe import __version__
from moe.errors import RequestError
from moe.model import MoE
from moe.profile import KEYS, value_of
from moe.server import generation
from moe.server.bodies import json_body, nested_schemas, schema_of
from moe.server.errors import GENERIC, APIError
from moe.server.guard import Guard
from moe.server.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from moe.server.runner import Runner
from moe.settings import ServerSettings

router = APIRouter()


def create_app(
    runner: Runner,
    model_name: str,
    settings: ServerSettings,
    api_key: str | None = None,
    host_names: Collection[str] | None = None,
) -> Guard:
    """The application of one model; see `Guard` for the last two."""
    app = FastAPI(title="moe", version=__version__, docs_url=None, redoc_url=None)
    app.state.runner = runner
    app.state.model_name = model_name
    app.state.settings = settings
    app.include_router(router)
    app.include_router(generation.router)
    app.add_exception_handler(APIError, _answer)
    app.add_exception_handler(RequestError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(Exception, _answer)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe()
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        schemas |= nested_schemas(ChatRequest, TokenizeRequest)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    return Guard(app, runner.metrics, api_key, host_names)


async def _answer(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        error = APIError(400, str(error))
    elif isinstance(error, HTTPException):
        error = APIError(error.status_code, str(error.detail), code="no_such_route")
    elif not isinstance(error, APIError):
        error = APIError(500, GENERIC)
    return error.response()


@router.get("/health")
async def health() -> dict[str, str]:
    """The process is alive, whatever the model does."""
    return {"status": "alive"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Requests are taken; 503 with the reason while they are not."""
    request.app.state.runner.ready_model()
    return {"status": "ready"}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(request)]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    generation.check_model(request, name)
    return _model_card(request)


def _model_card(request: Request) -> dict[str, Any]:
    runner: Runner = request.app.state.runner
    limit = runner.model.context_length if runner.model else None
    name = request.app.state.model_name
    return {
        "id": name,
        "object": "model",
        "created": runner.created,
        "owned_by": "moe",
        "max_model_len": limit,
    }


@router.post("/tokenize", openapi_extra=schema_of(TokenizeRequest))
async def tokenize(
    request: Request, body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))]
) -> dict[str, Any]:
    """Token ids of a text, or of messages put through the chat template."""
    generation.check_model(request, body.model)

    def work(model: MoE) -> dict[str, Any]:
        messages = [message.model_dump() for message in body.messages or ()]
        ids = model.codec.encode(body.prompt if body.prompt is not None else messages)
        return {"tokens": ids, "count": len(ids), "max_model_len": model.context_length}

    runner: Runner = request.app.state.runner
    return await runner.text(work)


@router.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
async def detokenize(
    request: Request, body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]
) -> dict[str, Any]:
    """Text of token ids, special tokens included."""
    generation.check_model(request, body.model)

    def work(model: MoE) -> dict[str, Any]:
        tokenizer = model.codec.require_tokenizer("texts of token ids")
        ids = model.codec.encode(body.tokens)
        return {"prompt": tokenizer.decode(ids, clean_up_tokenization_spaces=False)}

    runner: Runner = request.app.state.runner
    return await runner.text(work)


@router.get("/metrics")
def metrics(request: Request) -> Response:
    runner: Runner = request.app.state.runner
    return Response(runner.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/status")
def status(request: Request) -> Response:
    """The settings in force with their origins, what runs how, and all counters."""
    runner: Runner = request.app.state.runner
    about: dict[str, Any] = {
        "state": runner.state,
        "seconds": round(runner.seconds, 1),
        "occupancy": runner.occupancy(),
        "engine": runner.engine_status,
    }
    if runner.model is not None:
        loaded = runner.model.profile
        about["profile"] = {
            key: {"value": value_of(loaded.profile, key), "origin": loaded.origins[key]}
            for key in KEYS.leaves
        }
        about |= {"model": runner.model.status(), "stats": runner.model.stats()}
    return JSONResponse(about)
