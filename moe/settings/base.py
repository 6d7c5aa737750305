"""What all sections have in common."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict

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
