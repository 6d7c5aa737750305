"""Tools in requests, in the shape of OpenAI's chats: `ToolBody`, and what the other dialects share.

Tools are functions that the client runs. One with a text as its input (``custom``) is shown to the
model as a function with one string.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationInfo, model_validator

from moe.errors import RequestError
from moe.sampling.params import Structure
from moe.server.bodies import RequestBody
from moe.server.fields import Json
from moe.text.tokenizer import TextCodec
from moe.text.tool_calls.channels import ChannelParser
from moe.text.tool_calls.grammar import ANY, FREE, CallGrammar, Schema
from moe.text.tool_calls.parser import CallParser

MAX_TOOLS = 2048
MAX_CALLS = 128

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=128)]
ArgumentsText = Annotated[str, Field(max_length=2**20)]
"""A JSON object, as text."""
Description = Annotated[str, Field(max_length=2**16)]
CUSTOM_INPUT: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of the function that stands for a tool whose input is one text."""


def function_of(**about: object) -> Json:
    """The object that chats put around a tool, a choice of tool or a call."""
    return {"type": "function", "function": about}


def call_of(id: str, name: str, arguments: str) -> Json:
    """A tool call in a message of a chat."""
    return {"id": id, **function_of(name=name, arguments=arguments)}


def custom_input(arguments: str) -> str:
    """The text that a call of a tool with one text gives it."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a tool with one text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def run_by_client(*kinds: str) -> BeforeValidator:
    """A validator of a list of tools that leaves out those of other types than `kinds`, which are
    run by servers; where unknown fields are refused, it refuses them. The first type is the usual
    one."""

    def check(tools: Any, info: ValidationInfo) -> Any:
        if not isinstance(tools, list):
            return tools
        kept = []
        for tool in tools:
            kind = (tool.get("type") if isinstance(tool, dict) else None) or kinds[0]
            if not isinstance(kind, str) or kind in kinds:
                kept.append(tool)
            elif info.context is not None:
                info.context.add(f"tools.{kind}")
            else:
                raise ValueError(
                    f"tools must have the type {kinds[0]}, and the client runs them; this server "
                    "runs none"
                )
        return kept

    return BeforeValidator(check)


def narrowed(body: Json, allowed: Any, names_of: Callable[[Any], Collection[object]]) -> Json:
    """The body with the tools that a `tool_choice` of the type ``allowed_tools`` names.

    Args:
        allowed: the object with the mode and the tools.
        names_of: the names of a tool of this dialect.

    Raises `ValueError` if that is not valid.
    """
    about = allowed if isinstance(allowed, dict) else {}
    mode, tools, given = about.get("mode"), about.get("tools"), body.get("tools") or []
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise ValueError("tool_choice: allowed_tools must have a mode, auto or required, and tools")
    if not isinstance(given, list) or max(len(tools), len(given)) > MAX_TOOLS:
        raise ValueError(f"tools must be a list of at most {MAX_TOOLS}, and those allowed of it")
    named = [name for tool in tools for name in names_of(tool)]
    kept = [tool for tool in given if any(name in named for name in names_of(tool))]
    known = [name for tool in given for name in names_of(tool)]
    if unknown := [name for name in named if name not in known]:
        raise ValueError(f"tool_choice: there is no tool {unknown[0]!r:.80}")
    return body | {"tools": kept, "tool_choice": mode}


def with_plain_choice(body: Any, names_of: Callable[[Any], Collection[object]]) -> Any:
    """The body with a `tool_choice` that is a word or a function: one of the type ``allowed_tools``
    narrows the tools, and a custom tool is chosen as the function that stands for it.

    Args:
        names_of: the names of a tool of this dialect.

    Raises `ValueError` if it asks for a tool that servers run.
    """
    choice = body.get("tool_choice") if isinstance(body, dict) else None
    if not isinstance(choice, dict):
        return body
    kind = choice.get("type")
    if not isinstance(kind, str):
        return body
    if kind not in ("function", "custom", "allowed_tools"):
        raise ValueError(
            f"tool_choice: tools of the type {kind!r:.80} are run by servers, and this one runs "
            "none; choose a function, or leave it out"
        )
    about = choice.get(kind, choice)  # chats put an object around what Responses say directly
    if kind == "allowed_tools":
        return narrowed(body, about, names_of)
    if kind == "custom" and isinstance(about, dict):
        plain = choice | {"type": "function"} if about is choice else function_of(**about)
        return body | {"tool_choice": plain}
    return body


class FunctionDefinition(RequestBody):
    place = "tools."
    labels = frozenset({"allowed_callers", "cache_control", "output_schema"})

    name: ToolName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """true: every call follows the schema. A tool_choice that forces a call implies it."""


class CustomDefinition(RequestBody):
    """A tool whose input is one text; the model sees a function with one string."""

    place = "tools."
    labels = FunctionDefinition.labels

    name: ToolName
    description: Description | None = None
    format: dict[str, Any] | None = None
    """Describes a text, or a grammar, which the model reads and is not held to."""

    @model_validator(mode="after")
    def _check_format(self, info: ValidationInfo) -> CustomDefinition:
        if self.format is None or self.format.get("type") == "text":
            return self
        if info.context is None:
            raise ValueError("the format of a custom tool may be text; a grammar is not enforced")
        info.context.add("tools.format")
        return self

    @property
    def function(self) -> Json:
        """The function that stands for it."""
        about = self.description or ""
        grammar = self.format or {}
        grammar = grammar.get("grammar", grammar) if isinstance(grammar, dict) else {}
        if isinstance(grammar, dict) and isinstance(definition := grammar.get("definition"), str):
            about += f"\n\nThe input follows this {grammar.get('syntax')} grammar:\n{definition}"
        return {
            "name": self.name,
            "description": about.strip() or None,
            "parameters": CUSTOM_INPUT,
        }


class ChatTool(RequestBody):
    """A tool that the model may call."""

    place = "tools."
    labels = FunctionDefinition.labels

    type: Literal["function", "custom"]
    function: FunctionDefinition
    """For the type custom: made of ``custom``, a ``name`` and perhaps a ``description``."""

    @model_validator(mode="before")
    @classmethod
    def _read_custom(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict) or value.get("type") != "custom":
            return value
        if "custom" not in value or "function" in value:
            raise ValueError("a tool of the type custom has custom with its name")
        custom = CustomDefinition.model_validate(value["custom"], context=info.context)
        rest = {key: v for key, v in value.items() if key != "custom"}
        return rest | {"function": custom.function}


class NamedFunction(RequestBody):
    name: ToolName


class NamedToolChoice(RequestBody):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(RequestBody):
    place = "messages.tool_calls."

    name: ToolName
    arguments: ArgumentsText


class ToolCall(RequestBody):
    """A call in an earlier answer, which the client sends back."""

    place = "messages.tool_calls."
    labels = frozenset({"index"})

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _read_custom(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") != "custom":
            return value
        custom = value.get("custom")
        if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
            raise ValueError("a call of the type custom has custom with name and input")
        rest = {key: v for key, v in value.items() if key not in ("custom", "type")}
        return rest | function_of(
            name=custom.get("name"), arguments=custom_arguments(custom["input"])
        )


def _chat_names(tool: Any) -> Collection[object]:
    about = tool if isinstance(tool, dict) else {}
    inner = about.get(about["type"]) if isinstance(about.get("type"), str) else None
    return [inner.get("name")] if isinstance(inner, dict) else []


class ToolBody(RequestBody):
    tools: Annotated[
        list[ChatTool], Field(max_length=MAX_TOOLS), run_by_client("function", "custom")
    ] = Field(default_factory=list)
    """Tools that the model may call. Others than functions and custom ones are left out."""
    tool_choice: ToolChoice = "auto"
    """none: the model does not see the tools. required, or a function: it must call. Of the type
    allowed_tools: the model sees only those."""
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""

    @model_validator(mode="before")
    @classmethod
    def _read_choice(cls, value: Any) -> Any:
        return with_plain_choice(value, _chat_names)

    @model_validator(mode="after")
    def _check_tools(self) -> ToolBody:
        names = [tool.function.name for tool in self.tools]
        twice = (name for name, count in Counter(names).items() if count > 1)
        if (name := next(twice, None)) is not None:
            raise ValueError(f"tools: {name!r} is there twice")
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {choice.function.name!r}")
        if choice == "required" and not names:
            raise ValueError("tool_choice may be required only with tools that the client runs")
        return self

    @property
    def custom_names(self) -> set[str]:
        """The names of the tools whose input is one text."""
        return {tool.function.name for tool in self.tools if tool.type == "custom"}

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model sees and may call; None if there are none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [
            function_of(**tool.function.model_dump(exclude_none=True, exclude={"strict"}))
            for tool in self.tools
        ]

    def call_structure(self, codec: TextCodec, answer: Structure | None = None) -> Structure | None:
        """The grammar of answers that must call, or whose calls of strict tools must be valid.

        Args:
            answer: the form of answers that do not call; None: any text.

        Raises `RequestError` if it cannot be enforced.
        """
        if self.offered_tools is None:
            return None
        if codec.tools.format is None:  # calls are read by the tokenizer's response_template
            strict = any(tool.function.strict for tool in self.tools)
            if answer is not None or self.tool_choice != "auto" or strict:
                raise RequestError(
                    "this model's calls can be read, not enforced: its chat template does not show "
                    "their form; leave out tool_choice and strict, or send either tools or a "
                    "structure"
                )
            return None
        functions = [tool.function for tool in self.tools]
        grammar = CallGrammar(codec.tools.format, codec.call_tokens)
        several = self.parallel_tool_calls
        if self.tool_choice == "auto":
            schemas = {f.name: (f.parameters or ANY) if f.strict else FREE for f in functions}
            if answer is not None:
                lead = "" if codec.reasoning.format is None else codec.reasoning.format.lead
                text = grammar.answer_or_calls(answer, lead, schemas, several=several)
                return Structure.grammar(text, [(answer.name, answer), *_parts(schemas)])
            if not any(function.strict for function in functions):
                return None
            text = grammar.text_or_calls(schemas, several=several)
            return Structure.grammar(text, _parts(schemas))
        if isinstance(self.tool_choice, NamedToolChoice):
            functions = [f for f in functions if f.name == self.tool_choice.function.name]
            several = False
        schemas = {function.name: function.parameters or ANY for function in functions}
        return Structure.grammar(grammar.calls(schemas, several=several), _parts(schemas))

    def call_parser(self, codec: TextCodec) -> CallParser | ChannelParser | None:
        """A parser of one answer's calls; None if it cannot have any."""
        format = codec.tools.format
        if self.offered_tools is None or format is None:
            return None
        if format.channels is not None:
            return ChannelParser(format.channels, self._schemas, self._most_calls)
        return CallParser(format, self._schemas, self._most_calls)

    @property
    def _schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of the tools that may be called."""
        if self.offered_tools is None:
            return {}
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def _most_calls(self) -> int | None:
        return None if self.parallel_tool_calls else 1


def _parts(schemas: Mapping[str, Schema]) -> list[tuple[str, Structure]]:
    """The schemas by names that error messages use: clients wrote the schemas, not the grammar."""
    return [
        (f"tools: the schema of {name!r}", Structure.json_schema(schema))
        for name, schema in schemas.items()
    ]
