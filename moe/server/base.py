"""What the models of request bodies have in common, and fields that several of them have."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe.engine.sequence import MAX_PRIORITY
from moe.server.fields import Metadata, check_size

MAX_FIELDS = 128


class RequestBody(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        return check_size(value, MAX_FIELDS)


class Returned(RequestBody):
    """What clients send back as they got it, with fields that are null or empty."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nothing(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: v for key, v in value.items() if v is not None and (v or v != [])}
        return value


class StreamOptions(RequestBody):
    include_usage: bool = False
    """End the stream with a chunk that has the token counts."""


class Labels(RequestBody):
    """Fields that change nothing about the answer."""

    user: str | None = Field(default=None, max_length=512)
    """A name for the end user. Not stored, not logged."""
    metadata: Metadata = Field(default_factory=dict)
    """Labels. Not stored, not logged."""
    safety_identifier: str | None = Field(default=None, max_length=512)
    """Another name for the end user. Not stored, not logged."""
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    """A hint. Known prefixes are found by their tokens; `cache_salt` keeps tenants apart."""


class Sharing(RequestBody):
    """How a request shares the server with others; additions, named as in vLLM."""

    cache_salt: str = Field(default="", max_length=512)
    """Requests share known prefixes of their prompts only with requests of the same salt."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Of the requests that wait, lower numbers go first."""
