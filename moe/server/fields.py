"""Types of request fields, which bring every accepted spelling into one form."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)

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
NO_LIMIT = -1
"""As many tokens as there is room for, as load generators write it for vLLM."""


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


def by_type(*kinds: str, default: str | None = None) -> Discriminator:
    """The discriminator of a union of models with these tags, by the field ``type``."""

    def kind(part: Any) -> str | None:
        told = part if isinstance(part, dict) else vars(part) if hasattr(part, "type") else {}
        named = told.get("type", default) if told or isinstance(part, dict) else None
        return named if named in kinds else None

    rule = f"the type may be {', '.join(kinds)}"
    return Discriminator(kind, custom_error_type="part_type", custom_error_message=rule)


def wish(name: str, *known: str, instead: str | None = None) -> BeforeValidator:
    """A validator of a field that asks for one of several degrees: a text that is none of the
    `known` ones counts as `instead` and is named, where unknown fields are taken."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if info.context is None or not isinstance(value, str) or value in known:
            return value
        info.context.add(name)
        return instead

    return BeforeValidator(check)


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


def _limit(value: int, info: ValidationInfo) -> int:
    if value == 0 or (value == NO_LIMIT and info.context is None):
        raise ValueError("Input should be greater than or equal to 1")
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
TokenCount = Annotated[int, Field(ge=1, le=MAX_INT)]
TokenLimit = Annotated[int, Field(ge=NO_LIMIT, le=MAX_INT), AfterValidator(_limit)]
"""As `TokenCount`, or `NO_LIMIT` where unknown fields are taken."""
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
