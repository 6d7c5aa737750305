"""Options of requests in OpenAI's and vLLM's shapes: structured outputs, tools and reasoning.

Each option is a base class with its fields, and with what they mean for one model's tokenizer:
`StructuredBody` <- `ToolBody` and `ReasoningBody`, on which `ChatRequest` stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from moe.errors import RequestError
from moe.sampling.params import MAX_SOURCE, Structure
from moe.server.answers import AnswerParser, EmittedCall
from moe.server.bodies import RequestBody
from moe.server.errors import APIError
from moe.server.fields import Json, at_most
from moe.text.tokenizer import TextCodec
from moe.text.tool_calls.channels import ChannelParser
from moe.text.tool_calls.grammar import (
    ANY,
    CAN_FOLLOW,
    FREE,
    CallGrammar,
    Schema,
    after_reasoning,
)
from moe.text.tool_calls.parser import CallParser
from moe.text.tool_calls.reasoning import ReasoningParser, ReasoningSupport
from moe.text.tool_calls.response_template import PREFIX_TOKENS, ResponseTemplate

SourceText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SOURCE)]


class NamedSchema(RequestBody):
    name: str = Field(min_length=1, max_length=64)
    """For the client's own use."""
    description: str | None = None
    """For the client's own use: the model does not see it."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """A JSON schema; any JSON object where it is left out."""
    strict: bool | None = None
    """Of no effect: every schema is enforced, or refused if it cannot be."""


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    """Only with the type json_schema."""

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
    """Exactly one of these, named as in vLLM."""

    json_: dict[str, Any] | SourceText | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: SourceText | None = None
    """The whole answer matches it; in the syntax of Rust's ``regex``."""
    choice: list[SourceText] | None = Field(default=None, min_length=1, max_length=MAX_SOURCE)
    """The answer is one of these texts."""
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
    """The form of the answer; text by default."""
    structured_outputs: StructuredOutputs | None = None
    """More forms; give at most one of the two."""

    @model_validator(mode="after")
    def _check_structures(self) -> StructuredBody:
        format = self.response_format
        if self.structured_outputs is not None and format is not None and format.type != "text":
            raise ValueError("response_format and structured_outputs: give one of them")
        return self

    @property
    def structure(self) -> Structure | None:
        """The form that the answer must have. Raises `RequestError` if it is not valid."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.structure


MAX_TOOLS = 128
MAX_CALLS = 128

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=128)]
ArgumentsText = Annotated[str, Field(max_length=2**20)]
"""A JSON object, as text."""


def function_of(**about: object) -> Json:
    """The object that chats put around a tool, a choice of tool or a call."""
    return {"type": "function", "function": about}


def call_of(id: str, name: str, arguments: str) -> Json:
    """A tool call in a message of a chat."""
    return {"id": id, **function_of(name=name, arguments=arguments)}


def run_by_client(kind: str) -> BeforeValidator:
    """A validator of tools: refuses types other than `kind`, the type of tools that clients run."""

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
    """true: every call follows the schema. A tool_choice that forces a call implies it."""


class ChatTool(RequestBody):
    """A tool that the model may call."""

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
    """A call in an earlier answer, which the client sends back."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolBody(RequestBody):
    tools: list[ChatTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    """Tools that the model may call."""
    tool_choice: ToolChoice = "auto"
    """none: the model does not see the tools. required, or a function: it must call."""
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
        """The tools that the model sees and may call; None if there are none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
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


TemplateName = Annotated[str, StringConstraints(max_length=64)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateValue = bool | int | float | Annotated[str, Field(max_length=1024)] | None


class ReasoningBody(ToolBody, StructuredBody):
    chat_template_kwargs: Annotated[dict[TemplateName, TemplateValue], at_most(16)] = Field(
        default_factory=dict, max_length=16
    )
    """Variables that the model's chat template reads, such as ``enable_thinking``."""
    reasoning_effort: ReasoningEffort | None = None
    """How much to think, if the chat template reads it; none: not at all."""

    @property
    def asked_to_think(self) -> bool | None:
        """None: the model's own default."""
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    def template_settings(self, codec: TextCodec) -> dict[str, object]:
        """Variables for the chat template. Raises `APIError` 400 if it has none for reasoning."""
        given: dict[str, object] = dict(self.chat_template_kwargs)
        asked: dict[str, object] = {}
        if self.asked_to_think is not None:
            effort = self.reasoning_effort
            asked = _reasoning_variables(codec.reasoning, self.asked_to_think, effort)
        if twice := sorted(given.keys() & asked.keys()):
            message = f"chat_template_kwargs: another field says {twice[0]!r}; give one of them"
            raise APIError(400, message, param="chat_template_kwargs")
        return given | asked

    def structure_for(self, codec: TextCodec, prompt: Sequence[int]) -> Structure | None:
        """The form that the answer to a prompt must have; reasoning may come before it.

        Raises `RequestError` if it cannot be enforced.
        """
        structure = self.call_structure(codec, self.structure) or self.structure
        format = codec.reasoning.format
        if structure is None or format is None or not self._thinks:
            return structure
        if codec.closes_reasoning(prompt):  # reasoning is off, or a continued message has done it
            return structure
        inside = codec.opens_reasoning(prompt)
        calls = codec.tools.format
        if structure is not self.structure and calls is not None and calls.channels is not None:
            # A call is a message of its own, behind the reasoning's or alone.
            format = replace(format, close=format.close.removesuffix(format.lead), lead="")
        return after_reasoning(structure, format, codec.reasoning_tokens, inside=inside)

    def shown_tokens(self, codec: TextCodec) -> Collection[int]:
        """Ids of special tokens that stay in the answer's text, for its parser."""
        if self._response_template(codec) is not None:
            return codec.template_tokens
        calls = {} if self.offered_tools is None else codec.call_tokens
        return {*codec.reasoning_tokens.values(), *calls.values()}

    def ending_with_call(
        self, codec: TextCodec, prompt: Sequence[int]
    ) -> Callable[[], Callable[[str], bool]] | None:
        """Makes a function for each answer to a prompt that is told each new text, and says whether
        the answer's only call is complete with it; None: an answer may have several, or none."""
        if self.parallel_tool_calls or self.offered_tools is None:
            return None

        def watch() -> Callable[[str], bool]:
            take = self.answer_parser(codec, prompt).take
            return lambda text: any(isinstance(p, EmittedCall) for p in take(text, None).parts)

        return watch

    def answer_parser(self, codec: TextCodec, prompt: Sequence[int]) -> AnswerParser:
        """A parser of one answer to a prompt."""
        if (template := self._response_template(codec)) is not None:
            begun = codec.decode(prompt[-PREFIX_TOKENS:])
            return AnswerParser(template.parser(begun, self._schemas, self._most_calls), None)
        format, thinking = codec.reasoning.format, None
        if format is not None and self._thinks:
            thinking = ReasoningParser(format, inside=codec.opens_reasoning(prompt))
        return AnswerParser(self.call_parser(codec), thinking)

    def _response_template(self, codec: TextCodec) -> ResponseTemplate | None:
        """What the tokenizer itself says about answers, if it says enough for this request."""
        template = codec.response_template
        whole = self.structure is not None and codec.reasoning.format is None
        if isinstance(template, str) or whole or not self._thinks:
            return None
        return template if template.has_calls or self.offered_tools is None else None

    @property
    def _thinks(self) -> bool:
        """Whether answers may reason: a grammar or regular expression covers the whole answer."""
        return self.structure is None or self.structure.kind in CAN_FOLLOW


def _reasoning_variables(
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
