"""`Settings`: the base of every section of a profile, those of methods included."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

__all__ = ["Settings"]


class Settings(BaseModel):
    """A section: immutable, strict about types, without unknown keys."""

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
