"""Fields that say what an answer has to be: OpenAI's ``response_format``, and vLLM's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from moe.sampling.structure import MAX_SOURCE, Structure
from moe.server.base import RequestBody

Source = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SOURCE)]


class NamedSchema(RequestBody):
    name: str = Field(min_length=1, max_length=64)
    """For the client's own use."""
    description: str | None = None
    """For the client's own use: the model is not told of it."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """A JSON schema; any JSON object where it is left out."""
    strict: bool | None = None
    """Of no effect: every schema is kept to, and one that cannot be is refused."""


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    """With the type of that name."""

    @model_validator(mode="after")
    def _check_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema has to be given with the type json_schema, and only then")
        return self

    @property
    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return Structure.json_object()
        return Structure.json_schema(self.json_schema.schema_)


class StructuredOutputs(RequestBody):
    """One of these, named as in vLLM."""

    json_: dict[str, Any] | Source | None = Field(default=None, alias="json")
    """A JSON schema, as it is or as text."""
    regex: Source | None = None
    """What the answer matches as a whole, in the syntax of Rust's ``regex``."""
    choice: list[Source] | None = Field(default=None, min_length=1, max_length=MAX_SOURCE)
    """What the answer is one of."""
    grammar: Source | None = None
    """A grammar in Lark's syntax (as llguidance has it) or GBNF."""
    json_object: bool = False
    """Any JSON object."""

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give json, regex, choice, grammar or json_object: true, one of them")
        return self

    @property
    def structure(self) -> Structure:
        if self.json_ is not None:
            return Structure.json_schema(self.json_)
        if self.regex is not None:
            return Structure.regex(self.regex)
        if self.choice is not None:
            return Structure.choice(self.choice)
        if self.grammar is not None:
            return Structure.grammar(self.grammar)
        return Structure.json_object()


class StructuredBody(RequestBody):
    response_format: ResponseFormat | None = None
    """What the answer has to be; text by default."""
    structured_outputs: StructuredOutputs | None = None
    """The same in more ways."""

    @model_validator(mode="after")
    def _check_structures(self) -> StructuredBody:
        format = self.response_format
        if self.structured_outputs is not None and format is not None and format.type != "text":
            raise ValueError("response_format and structured_outputs: give one of them")
        return self

    @property
    def structure(self) -> Structure | None:
        """Raises `RequestError` where it cannot be anything of the kind."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.structure
