"""Tools in requests, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from moe.sampling.structure import Structure
from moe.server.base import RequestBody
from moe.server.fields import Json
from moe.text.prompts import TextCodec
from moe.tools.call_grammar import ANY, CallGrammar, Schema
from moe.tools.call_parser import CallParser

MAX_TOOLS = 128
MAX_CALLS = 128

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=128)]
Arguments = Annotated[str, Field(max_length=2**20)]
"""A JSON object, as text."""


def function_of(**about: object) -> Json:
    """What a tool, the choice of one and a call have around them in chats."""
    return {"type": "function", "function": about}


def call_of(id: str, name: str, arguments: str) -> Json:
    """A call in a message of a chat."""
    return {"id": id, **function_of(name=name, arguments=arguments)}


def run_by_client(kind: str) -> BeforeValidator:
    """Of a tool: it must have the type that says that the client runs it."""

    def check(tool: Any) -> Any:
        if isinstance(tool, dict) and (tool.get("type") or kind) != kind:
            raise ValueError(
                f"tools must have the type {kind}, and the client runs them; this server runs none"
            )
        return tool

    return BeforeValidator(check)


class FunctionDefinition(RequestBody):
    name: ToolName
    description: Annotated[str, Field(max_length=2**16)] | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """true: every call keeps to the schema. A tool_choice that makes the model call implies it."""


class Tool(RequestBody):
    """What the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestBody):
    name: ToolName


class NamedChoice(RequestBody):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(RequestBody):
    name: ToolName
    arguments: Arguments


class ToolCall(RequestBody):
    """A call in an answer that is sent back."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolBody(RequestBody):
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    """What the model may call."""
    tool_choice: ToolChoice = "auto"
    """none: the model is told of no tools. required, or a function: it has to call."""
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""

    @model_validator(mode="after")
    def _check_tools(self) -> ToolBody:
        names = [tool.function.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools: {twice[0]!r} is there twice")
        choice = self.tool_choice
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {choice.function.name!r}")
        if choice == "required" and not names:
            raise ValueError("tool_choice may be required only with tools")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the model is told of, and may call."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in self.tools
        ]

    def called(self, codec: TextCodec) -> Structure | None:
        """What an answer has to be if it must call, or must call strict tools as they say.

        Raises `RequestError` where that cannot be enforced.
        """
        if self.offered_tools is None or codec.tools.format is None:
            return None
        functions = [tool.function for tool in self.tools]
        grammar = CallGrammar(codec.tools.format, codec.call_tokens)
        several = self.parallel_tool_calls
        if self.tool_choice == "auto":
            if not any(function.strict for function in functions):
                return None
            strict = {f.name: (f.strict and f.parameters) or ANY for f in functions}
            text = grammar.text_or_calls(strict, several=several)
            return Structure.grammar(text, _parts(strict))
        if isinstance(self.tool_choice, NamedChoice):
            functions = [f for f in functions if f.name == self.tool_choice.function.name]
            several = False
        schemas = {function.name: function.parameters or ANY for function in functions}
        return Structure.grammar(grammar.calls(schemas, several=several), _parts(schemas))

    def call_parser(self, codec: TextCodec) -> CallParser | None:
        """Reads calls out of one answer; None where there can be none."""
        if self.offered_tools is None or codec.tools.format is None:
            return None
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        most = None if self.parallel_tool_calls else 1
        return CallParser(codec.tools.format, schemas, most)


def _parts(schemas: Mapping[str, Schema]) -> list[tuple[str, Structure]]:
    """What is said of the grammar of calls, to people who wrote schemas."""
    return [
        (f"tools: the schema of {name!r}", Structure.json_schema(schema))
        for name, schema in schemas.items()
    ]
