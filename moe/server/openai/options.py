"""Reasoning in requests, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from moe.sampling.params import MAX_SOURCE, Structure
from moe.server.answers import AnswerParser
from moe.server.bodies import RequestBody
from moe.server.errors import APIError
from moe.server.fields import Json, at_most
from moe.text.tokenizer import TextCodec
from moe.text.tool_calls.grammar import ANY, CAN_FOLLOW, CallGrammar, Schema, after_reasoning
from moe.text.tool_calls.parser import CallParser
from moe.text.tool_calls.reasoning import ReasoningParser, ReasoningSupport

# ---- Fields that say what an answer has to be: OpenAI's ``response_format``, and vLLM's own.

SourceText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SOURCE)]


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

    json_: dict[str, Any] | SourceText | None = Field(default=None, alias="json")
    """A JSON schema, as it is or as text."""
    regex: SourceText | None = None
    """What the answer matches as a whole, in the syntax of Rust's ``regex``."""
    choice: list[SourceText] | None = Field(default=None, min_length=1, max_length=MAX_SOURCE)
    """What the answer is one of."""
    grammar: SourceText | None = None
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


# ---- Tools in requests, in OpenAI's shapes.

MAX_TOOLS = 128
MAX_CALLS = 128

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=128)]
ArgumentsText = Annotated[str, Field(max_length=2**20)]
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


class ChatTool(RequestBody):
    """What the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestBody):
    name: ToolName


class NamedToolChoice(RequestBody):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(RequestBody):
    name: ToolName
    arguments: ArgumentsText


class ToolCall(RequestBody):
    """A call in an answer that is sent back."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolBody(RequestBody):
    tools: list[ChatTool] = Field(default_factory=list, max_length=MAX_TOOLS)
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
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
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
        if isinstance(self.tool_choice, NamedToolChoice):
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


# ----

TemplateName = Annotated[str, StringConstraints(max_length=64)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateValue = bool | int | float | Annotated[str, Field(max_length=1024)] | None


class ReasoningBody(ToolBody, StructuredBody):
    chat_template_kwargs: Annotated[dict[TemplateName, TemplateValue], at_most(16)] = Field(
        default_factory=dict, max_length=16
    )
    """Variables that the model's chat template reads, such as ``enable_thinking``."""
    reasoning_effort: ReasoningEffort | None = None
    """How much to think, where the chat template reads that; none: not at all."""

    @property
    def asked_to_think(self) -> bool | None:
        """None: as the model does by itself."""
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    def template_settings(self, codec: TextCodec) -> dict[str, object]:
        """Variables for the chat template. Raises `APIError` 400 where it has none to ask with."""
        said: dict[str, object] = dict(self.chat_template_kwargs)
        asked: dict[str, object] = {}
        if self.asked_to_think is not None:
            effort = self.reasoning_effort
            asked = _settings(codec.reasoning, self.asked_to_think, effort)
        if twice := sorted(said.keys() & asked.keys()):
            message = f"chat_template_kwargs: another field says {twice[0]!r}; give one of them"
            raise APIError(400, message, param="chat_template_kwargs")
        return said | asked

    def structure_for(self, codec: TextCodec, prompt: Sequence[int]) -> Structure | None:
        """What the answer to a prompt has to be, behind its reasoning if there may be any.

        Raises `RequestError` where it cannot be anything of the kind.
        """
        called = self.called(codec)
        structure = called or self.structure
        format = codec.reasoning.format
        if structure is None or format is None or not self._thinks:
            return structure
        inside = codec.opens_reasoning(prompt)
        return after_reasoning(structure, format, codec.reasoning_tokens, inside=inside)

    def shown_tokens(self, codec: TextCodec) -> Collection[int]:
        """Special tokens that are part of the answer's text."""
        calls = {} if self.offered_tools is None else codec.call_tokens
        return {*codec.reasoning_tokens.values(), *calls.values()}

    def answer_parser(self, codec: TextCodec, prompt: Sequence[int]) -> AnswerParser:
        """Takes one answer to a prompt apart."""
        format, thinking = codec.reasoning.format, None
        if format is not None and self._thinks:
            thinking = ReasoningParser(format, inside=codec.opens_reasoning(prompt))
        return AnswerParser(self.call_parser(codec), thinking)

    @property
    def _thinks(self) -> bool:
        """A grammar or a regular expression is of the whole answer."""
        return self.structure is None or self.structure.kind in CAN_FOLLOW


def _settings(
    support: ReasoningSupport, think: bool, effort: ReasoningEffort | None
) -> dict[str, object]:
    settings: dict[str, object] = {} if support.switch is None else {support.switch: think}
    if think and effort is not None:
        if not support.takes_effort:
            raise _unsupported("does not read a reasoning effort; leave it out")
        settings["reasoning_effort"] = effort
    elif think and not settings and support.format is None:
        raise _unsupported("is not known to make it think; leave out what asks for reasoning")
    elif not think and not settings and support.format is not None:
        raise _unsupported("has nothing that turns reasoning off; leave out what asks for that")
    return settings


def _unsupported(why: str) -> APIError:
    message = f"this model's chat template {why}"
    return APIError(400, message, code="reasoning_not_supported")
