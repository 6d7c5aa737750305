"""Types of request fields, which bring every accepted spelling into one form.

At the end: fields of the dialects that this server can only accept with a neutral value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from moe.sampling.params import MAX_SEQUENCES

Json = dict[str, Any]
Item = TypeVar("Item")
Items = Annotated[list[Item], FailFast()]
"""A list of any length; only its first fault is reported, as a body has room for two million."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_INT = 2**31 - 1
MAX_MESSAGES = 4096


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """One prompt or several, as a list of prompts."""
    rule = "a prompt must be a string, token ids, a list of strings or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(rule)
    if not value:
        raise ValueError("the prompt is empty")
    if all(type(item) is int for item in value):
        return [value]
    if all(isinstance(item, str) for item in value) or all(isinstance(i, list) for i in value):
        if any(type(item) is not int for ids in value if isinstance(ids, list) for item in ids):
            raise ValueError(rule)
        return value
    raise ValueError(rule)


def text_of(*kinds: str, labels: Collection[str] = (), between: str = "") -> Callable[[Any], Any]:
    """A validator that joins content given in parts into one text.

    Args:
        kinds: types that parts may have.
        labels: further fields that parts may have; they are ignored.
        between: the separator of two parts.
    """

    def text(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            named = part.keys() - labels if isinstance(part, dict) else set()
            if named != {"type", "text"} or part["type"] not in kinds:
                raise ValueError(
                    f'only text is supported: parts must be {{"type": "{kinds[0]}", "text": ...}}'
                )
            texts.append(part["text"])
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("the text of a part must be a string")
        return between.join(texts)

    return text


def content_of(*kinds: str, labels: Collection[str] = ()) -> Callable[[Any], Any]:
    """As `text_of`, but content with images stays a list of parts, in the shape of OpenAI's chats.

    Images may have the shape of any dialect: ``image_url``, ``input_image`` or ``image``.
    """
    text = text_of(*kinds, labels=labels)

    def content(value: Any) -> Any:
        if not isinstance(value, list) or not any(_is_image(part) for part in value):
            return text(value)
        return [
            {"type": "image_url", "image_url": {"url": image_url(part)}}
            if _is_image(part)
            else {"type": "text", "text": text([part])}
            for part in value
        ]

    return content


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image_url", "input_image", "image")


def image_url(part: Json) -> str:
    """The URL of a part with an image; bytes in base64 become a data URL."""
    known = {"type", "image_url", "source", "detail", "cache_control"}
    if unknown := part.keys() - known:
        raise ValueError(f"an image has no field {min(unknown)!r:.80}; remove it")
    url = part.get("image_url")
    if part["type"] == "image_url" and isinstance(url, dict):
        url = url.get("url")
    if part["type"] == "image":
        source = part.get("source")
        about = source if isinstance(source, dict) else {}
        url = about.get("url")
        if about.get("type") == "base64":
            url = f"data:{about.get('media_type')};base64,{about.get('data')}"
    if not isinstance(url, str):
        raise ValueError(
            "an image must be a data URL, or a link where server.allow_image_urls allows it: in "
            "image_url.url of a chat, in image_url of a part input_image, or as the base64 or url "
            "source of a part image"
        )
    return url


def by_type(*kinds: str, default: str | None = None) -> Discriminator:
    """The discriminator of a union of models with these tags, by the field ``type``."""

    def kind(part: Any) -> str | None:
        named = part.get("type", default) if isinstance(part, dict) else None
        return named if named in kinds else None

    rule = f"the type may be {', '.join(kinds)}"
    return Discriminator(kind, custom_error_type="part_type", custom_error_message=rule)


def text_or(schema: dict[str, Any]) -> None:
    """Change the JSON schema of a list into that of a text or such a list."""
    names = [name for name in ("type", "items", "minItems", "maxItems") if name in schema]
    schema["anyOf"] = [{"type": "string"}, {name: schema.pop(name) for name in names}]


def at_most(count: int) -> BeforeValidator:
    """A limit on an object's entries, checked before them; ``max_length`` is checked after them."""
    return BeforeValidator(lambda value: check_size(value, count))


def check_size(value: Any, most: int) -> Any:
    """Refuse an object with more entries. (Each invalid entry would make a problem of its own.)"""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"this object may have {most} entries, and has {len(value)}; send fewer")
    return value


def _token_keys(value: Any) -> Any:
    """Convert a JSON object's keys, which are strings, to token ids."""
    if not isinstance(check_size(value, MAX_BIASES), dict):
        return value
    for key in value:
        if type(key) is not int and not re.fullmatch(r"0|[1-9][0-9]{0,9}", str(key)):
            raise ValueError("the keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


PromptList = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts),
    Field(max_length=MAX_SEQUENCES),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS},
            ]
        }
    ),
]
Text = Annotated[str, BeforeValidator(text_of("text"))]
Content = Annotated[
    str | list[Json], BeforeValidator(content_of("text")), WithJsonSchema({"type": "string"})
]
"""A text, or parts with images."""
TokenCount = Annotated[int, Field(ge=1, le=MAX_INT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_SEQUENCES)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_token_keys),
    Field(max_length=MAX_BIASES),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        }
    ),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    at_most(16),
]


Neutral = dict[str, tuple[object, ...]]
"""Fields that this server does not support -> their values that ask for nothing, which pass."""

NEUTRAL_CHAT: Neutral = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
}
NEUTRAL_COMPLETIONS: Neutral = {"best_of": (1,), "suffix": ("",)}
NEUTRAL_RESPONSES: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
}
NEUTRAL_MESSAGES: Neutral = {
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}
_STATELESS = ": the server keeps no answers, so send the whole conversation"
_REASONS = {
    "background": ": the server keeps no answers; leave it out, or stream",
    "conversation": _STATELESS,
    "mcp_servers": ": the client runs all tools",
    "max_tool_calls": ": it is of tools that a server runs, and this one runs none",
    "previous_response_id": _STATELESS,
    "thread": _STATELESS,
}
# With this code, Anthropic's client continues without the field.
CODES = {"thread": "thread_unsupported_request"}


def supported(body: Mapping[str, Any], neutral: Neutral) -> dict[str, Any]:
    """The body without the fields of `neutral`. Raises if one of them has another value."""
    for name in body.keys() & neutral.keys():
        value = body[name]
        if not any(type(value) is type(n) and value == n for n in neutral[name]):
            about = {"name": name, "why": _REASONS.get(name, "")}
            raise PydanticCustomError("not_supported", "{name} is not supported{why}", about)
    return {name: value for name, value in body.items() if name not in neutral}
