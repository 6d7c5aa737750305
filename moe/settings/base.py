"""What all sections have in common."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict

Off = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""


class Settings(BaseModel):
    """A section: immutable, and it knows its keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
