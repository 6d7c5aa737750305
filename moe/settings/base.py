"""What all sections have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

Off = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""

DAY_S = 86_400.0
"""The longest wait: more overflows what sockets, threads and torch count it in."""


class Settings(BaseModel):
    """A section: immutable, and it knows its keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*")
    @classmethod
    def _check_width(cls, value: Any) -> Any:
        """Counts are compared with what torch and the system count in 64 bits."""
        if type(value) is int and value >= 1 << 63:
            raise PydanticCustomError("width", "must be less than 9223372036854775808")
        return value
