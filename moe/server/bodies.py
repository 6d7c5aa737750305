"""Request bodies: read within limits of size and time, then checked against a pydantic model.

`json_body` replaces FastAPI's own reading, which has no limit on size or depth and accepts NaN.
The classes below are the bases of all models of bodies.
"""

from __future__ import annotations

import asyncio
import re
import reprlib
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from moe.fair_pool import FairPool
from moe.sequence import MAX_PRIORITY
from moe.server.errors import APIError, ClientGone
from moe.server.fields import Metadata, check_size
from moe.server.ignored import Ignored, nameable
from moe.server.keys import caller_of
from moe.server.unsupported import CODES, Dialect, without_unsupported
from moe.settings import ServerSettings
from moe.settings.sections import DAY_S

_REFERENCE = "#/components/schemas/{model}"
_MOST_PROBLEMS = 64  # only this many problems are looked at
_LONGEST_PLACE = 100  # characters; a client's own keys may be as long as its body
HEAVY_BYTES = 2**15
"""Bodies with more count as heavy work."""
# Each thread that runs Python holds up the engine's: large bodies are checked one after the other.
_CHECKS = FairPool(2, "moe-bodies", each=2, heavy=1)
_MOMENT_S, _LONGEST_REST_S = 0.005, 0.1
Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


def is_heavy(request: Request) -> bool:
    """Return whether the request has much text."""
    return bool(request.state.body_bytes > HEAVY_BYTES)


def json_body(model: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """A FastAPI dependency: the request's body as the model, or `APIError` 400, 408, 413, 415."""

    async def read(request: Request) -> Body:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise APIError(415, "the Content-Type must be application/json")
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            message = f"bodies must not be compressed (Content-Encoding is {coding!r:.40})"
            raise APIError(415, message)
        settings: ServerSettings = request.app.state.settings
        data = await read_body(request, settings.max_body_bytes, settings.read_timeout_s)
        request.state.body_bytes = len(data)
        ignored = Ignored() if settings.unknown_fields == "take" else None
        request.state.ignored = ignored
        work = partial(parse, model, data, ignored)
        return await asyncio.wrap_future(
            _CHECKS.submit(caller_of(request), work, heavy=is_heavy(request))
        )

    return read


def parse(model: type[Body], data: bytes, ignored: Ignored | None = None) -> Body:
    """JSON as the model. Refuses NaN, depth over 200, numbers out of range and lone surrogates.

    A field that is null counts as left out: OpenAI's clients mean it so.

    Args:
        ignored: hears of fields that are taken without effect; None: they are refused.
    """
    try:
        tree = _at_once(partial(from_json, data, allow_inf_nan=False))
    except ValueError as error:
        raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise APIError(400, "the body must be a JSON object", code="invalid_json")
    try:
        given = {key: v for key, v in tree.items() if v is not None}
        return _at_once(partial(model.model_validate, given, context=ignored))
    except ValidationError as error:
        raise _refusal(error, tree) from None


def _at_once(call: Callable[[], Result]) -> Result:
    """Make a call that keeps the interpreter until it returns, and then rest as long: a step needs
    the interpreter at each kernel, and would wait for one such call there after the other."""
    start = time.perf_counter()
    try:
        return call()
    finally:
        if (seconds := time.perf_counter() - start) > _MOMENT_S:
            time.sleep(min(seconds, _LONGEST_REST_S))


def _refusal(error: ValidationError, tree: Any) -> APIError:
    """The first problem, with the field's name as clients write it.

    A field that may be one of several things has a problem with each of them: the one that lies
    deepest in the body is reported.
    """
    problems = error.errors(include_url=False, include_context=False)[:_MOST_PROBLEMS]
    places = [_place(problem["loc"], problem["type"], tree) for problem in problems]
    ways = [place for place in places if place[: len(places[0])] == places[0]]
    furthest = max(ways, key=len)
    problem = problems[places.index(furthest)]
    where = ".".join(map(str, furthest))[:_LONGEST_PLACE]
    rule = _rule(p["msg"] for p, place in zip(problems, places, strict=True) if place == furthest)
    if problem["type"] == "extra_forbidden":
        return APIError(400, f"unknown field {where!r}; remove it", param=where)
    if problem["type"] == "not_supported":
        name = rule.partition(" ")[0]
        return APIError(400, rule, param=name, code=CODES.get(name))
    if problem["type"] == "missing":
        return APIError(400, f"the field {where!r} is missing", param=where)
    got = f"; got {reprlib.repr(problem['input']):.200}" if problem["loc"] else ""
    return APIError(400, f"{where}: {rule}{got}" if where else rule, param=where or None)


def _place(loc: tuple[int | str, ...], kind: str, tree: Any) -> tuple[int | str, ...]:
    """The problem's location in the body, without pydantic's names for the members of a union."""
    place: list[int | str] = []
    for depth, step in enumerate(loc):
        if isinstance(tree, dict) and (key := str(step)) in tree:
            tree = tree[key]
        elif isinstance(tree, list) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        elif kind != "missing" or depth != len(loc) - 1:
            continue
        place.append(step)
    return tuple(place) or loc


def _rule(messages: Iterable[str]) -> str:
    """One sentence of what a field may be, from a message for each member of a union."""
    first, *others = dict.fromkeys(messages)
    first = first.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    rule = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    return re.sub(r"valid dictionary( or instance of \w+)?", "JSON object", rule)


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body. Raises `APIError` 408 and 413."""
    too_large = APIError(413, f"the body may have {limit} bytes; send less (server.max_body_bytes)")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large

    async def collect() -> bytes:
        data = bytearray()
        async for chunk in request.stream():
            if len(data) + len(chunk) > limit:
                raise too_large
            data += chunk
        return bytes(data)

    try:
        return await asyncio.wait_for(collect(), timeout_s)
    except ClientDisconnect:
        raise ClientGone from None
    except (TimeoutError, asyncio.TimeoutError):
        message = f"the body did not come within {timeout_s:g} s (server.read_timeout_s)"
        raise APIError(408, message) from None


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads this model."""
    schema = model.model_json_schema(ref_template=_REFERENCE)
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def nested_schemas(*models: type[BaseModel]) -> dict[str, Any]:
    """Schemas that those of `schema_of` refer to: ``components.schemas`` of the description."""
    nested: dict[str, Any] = {}
    for model in models:
        nested |= model.model_json_schema(ref_template=_REFERENCE).get("$defs", {})
    return nested


MAX_FIELDS = 128


class RequestBody(BaseModel):
    """The base of every JSON object in a body.

    An unknown field is refused, or taken and named if the body is validated with an `Ignored` as
    its context.

    Attributes:
        place: what stands before the names of its fields.
        labels: fields that change nothing, which are taken there without being named.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    place: ClassVar[str] = ""
    labels: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _check_fields_known(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(check_size(value, MAX_FIELDS), dict) or info.context is None:
            return value
        unknown = value.keys() - _known_fields(cls)
        if not unknown:
            return value
        named = ((key, value[key]) for key in value if key in unknown - cls.labels)
        info.context.add(*(f"{cls.place}{name}" for name in nameable(named)))
        return {key: v for key, v in value.items() if key not in unknown}


@cache
def _known_fields(model: type[RequestBody]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


class ResentBody(RequestBody):
    """Part of an answer that a client sends back; null and empty fields count as left out."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nothing(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: v for key, v in value.items() if v is not None and (v or v != [])}
        return value


class ResentMessage(ResentBody):
    """A message that a client sends back: an answer, or a tool's result, may have said nothing."""

    @model_validator(mode="before")
    @classmethod
    def _allow_silence(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is None or not isinstance(value, dict):
            return value
        silent = value.get("content") in (None, []) and value.get("role") in ("assistant", "tool")
        return value | {"content": ""} if silent else value


class StreamOptions(RequestBody):
    place = "stream_options."
    labels = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """End the stream with a chunk that has the token counts."""
    continuous_usage_stats: bool = False
    """With include_usage: every chunk has them."""


class LabelFields(RequestBody):
    """Fields that change nothing about the answer."""

    user: str | None = Field(default=None, max_length=512)
    """A name for the end user. Not stored, not logged."""
    metadata: Metadata = Field(default_factory=dict)
    """Labels. Not stored, not logged."""
    safety_identifier: str | None = Field(default=None, max_length=512)
    """Another name for the end user. Not stored, not logged."""
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    """A hint. Known prefixes are found by their tokens; `cache_salt` keeps tenants apart."""


class EndpointBody(RequestBody):
    """The base of bodies that generate. The fields are additions, two named as in vLLM.

    Attributes:
        dialect: see `moe.server.unsupported`.
        ignored: hears of what has no effect; None: it is refused.
    """

    dialect: ClassVar[Dialect]
    _ignored: Ignored | None = PrivateAttr(default=None)

    cache_salt: str = Field(default="", max_length=512)
    """Requests share known prefixes of their prompts only with requests of the same salt."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Lower numbers go first among the requests that wait."""
    timeout: float | None = Field(default=None, gt=0, le=DAY_S)
    """Seconds after which the answer ends with what is there."""

    @property
    def ignored(self) -> Ignored | None:
        return self._ignored

    @model_validator(mode="before")
    @classmethod
    def _check_supported(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        return without_unsupported(value, cls.dialect, info.context)

    @model_validator(mode="after")
    def _keep_ignored(self, info: ValidationInfo) -> EndpointBody:
        self._ignored = info.context
        return self
