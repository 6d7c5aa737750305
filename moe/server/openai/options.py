"""Options of requests in OpenAI's and vLLM's shapes: structured outputs, and reasoning with tools.

Each option is a base class with its fields, and with what they mean for one model's tokenizer:
`StructuredBody` and `ToolBody` <- `ReasoningBody`, on which `ChatRequest` stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationInfo, model_validator

from moe.sampling.params import MAX_SOURCE, Structure, ThinkingBudget
from moe.server.answers import AnswerParser, EmittedCall
from moe.server.bodies import RequestBody
from moe.server.errors import APIError
from moe.server.fields import MAX_INT, NO_LIMIT, Json, at_most, wish
from moe.server.ignored import Ignored
from moe.server.openai.tools import ToolBody
from moe.text.tokenizer import TextCodec
from moe.text.tool_calls.grammar import CAN_FOLLOW, after_reasoning
from moe.text.tool_calls.reasoning import SWITCHES, ReasoningParser, ReasoningSupport
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
    """Has no effect: every schema is enforced, or refused if it cannot be."""


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


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TemplateName = Annotated[str, StringConstraints(max_length=64)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateValue = bool | int | float | Annotated[str, Field(max_length=1024)] | None


class ReasoningBody(ToolBody, StructuredBody):
    """Fields by which a chat asks for reasoning.

    Attributes:
        effort_name, thinking_name: the dialect's names of what asks how much to think, and whether.
    """

    effort_name: ClassVar[str] = "reasoning_effort"
    thinking_name: ClassVar[str] = "thinking"

    chat_template_kwargs: Annotated[dict[TemplateName, TemplateValue], at_most(16)] = Field(
        default_factory=dict, max_length=16
    )
    """Variables that the model's chat template reads. ``enable_thinking`` and ``thinking`` are
    wishes: they set whichever of the two it reads."""
    reasoning_effort: Annotated[
        ReasoningEffort | None, wish("reasoning_effort", *EFFORTS, instead="medium")
    ] = None
    """The degree of thinking: the nearest one that the chat template reads; none: not at all."""

    thinking_token_budget: int | None = Field(default=None, ge=NO_LIMIT, le=MAX_INT)
    """Most tokens of reasoning; then its end is forced. -1: any number."""
    thinking: bool | None = None
    """Switches thinking on or off; left out: the model's own default. Where unknown fields are
    taken, it may be an object, ``{"type": "enabled"}`` or ``disabled``, or have the name
    ``enable_thinking``."""
    include_reasoning: bool = True
    """false: answers are reported without their reasoning."""

    @model_validator(mode="before")
    @classmethod
    def _read_other_words(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is None or not isinstance(value, dict):
            return value
        return _in_own_words(value, info.context)

    @model_validator(mode="after")
    def _check_thinking(self, info: ValidationInfo) -> ReasoningBody:
        thinking, effort = self.thinking, self.reasoning_effort
        if thinking is False and info.context is not None:
            self.reasoning_effort = None  # how much to think does not matter then
        elif None not in (thinking, effort) and thinking != (effort != "none"):
            raise ValueError(f"{self.thinking_name} and {self.effort_name} contradict each other")
        return self

    def template_settings(self, codec: TextCodec, ignored: Ignored | None) -> dict[str, object]:
        """Variables for the chat template.

        Args:
            ignored: hears of variables that the template does not read, and of a wish about
                reasoning that it cannot grant; None: that is refused.

        Raises `APIError` 400 for what cannot be.
        """
        given: dict[str, object] = dict(self.chat_template_kwargs)
        asked: dict[str, object] = {}
        think, effort = self.thinking, self.reasoning_effort
        name = self.thinking_name if effort is None else self.effort_name
        if think is None and effort is not None:
            think = effort != "none"
        if ignored is not None:
            unread = [key for key in given if not codec.template_mentions(key)]
            wishes = [key for key in unread if key in SWITCHES]
            ignored.add(*(f"chat_template_kwargs.{key}" for key in unread if key not in wishes))
            if think is None and wishes:
                think, name = bool(given[wishes[0]]), f"chat_template_kwargs.{wishes[0]}"
        if think is not None and ignored is None:
            asked = _reasoning_variables(codec.reasoning, think, effort)
        elif think is not None and ignored is not None:
            asked = _wished_variables(codec.reasoning, think, effort)
            reasons = codec.reasoning.format is not None  # by itself
            if not asked and (reasons != think or (think and effort is not None)):
                ignored.add(name)
        for name in sorted(given.keys() & asked.keys()):
            if ignored is None or given[name] != asked[name]:
                message = f"chat_template_kwargs: another field says {name!r}; give one of them"
                raise APIError(400, message, param="chat_template_kwargs")
        return given | asked

    def thinking_budget(self, codec: TextCodec, prompt: Sequence[int]) -> ThinkingBudget | None:
        """The limit on reasoning in the answer to a prompt; None: there is none."""
        asked = self.thinking_token_budget
        if asked is None or asked == NO_LIMIT or not self._thinks:
            return None
        return codec.thinking_budget(asked, prompt, calls=self.offered_tools is not None)

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
        """Return the tokenizer's own rules for answers, if they say enough for this request."""
        template = codec.response_template
        whole = self.structure is not None and codec.reasoning.format is None
        if isinstance(template, str) or whole or not self._thinks:
            return None
        return template if template.has_calls or self.offered_tools is None else None

    @property
    def _thinks(self) -> bool:
        """Return whether answers may reason: a grammar or regular expression covers the whole
        answer."""
        return self.structure is None or self.structure.kind in CAN_FOLLOW


_SWITCHED = {"enabled": True, "disabled": False}
_OTHER_WORDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "enable_thinking": ("thinking", lambda value: value),
    "thinking_budget": ("thinking_token_budget", lambda value: value),
    "thinking.type": ("thinking", lambda value: _SWITCHED.get(str(value))),
    "thinking.budget_tokens": ("thinking_token_budget", lambda value: value),
    "reasoning.effort": ("reasoning_effort", lambda value: value),
    "reasoning.enabled": ("thinking", lambda value: value),
    "reasoning.exclude": ("include_reasoning", lambda value: value is not True),
    "reasoning.max_tokens": ("thinking_token_budget", lambda value: value),
}
"""Other servers' names for a field of `ReasoningBody`: its own name, and its value from theirs."""


def _in_own_words(body: Json, ignored: Ignored) -> Json:
    """The body with what it says of reasoning as `ReasoningBody` has it.

    Raises `ValueError` if it says two things of one field.
    """
    said: Json = {}
    for field in ("enable_thinking", "thinking_budget", "thinking", "reasoning"):
        value = body.get(field)
        if isinstance(value, dict) and len(value) <= len(_OTHER_WORDS):
            said |= {f"{field}.{key}": inner for key, inner in value.items()}
        elif field in _OTHER_WORDS:
            said[field] = value
    taken = {name.partition(".")[0] for name in said}
    made = {name: value for name, value in body.items() if name not in taken}
    for other, value in said.items():
        if value is None:
            continue
        if other not in _OTHER_WORDS:
            ignored.add(other)
            continue
        name, read = _OTHER_WORDS[other]
        own = read(value)
        if own is not None and made.setdefault(name, own) != own:
            raise ValueError(f"{other} and another field say two things of {name}; give one")
    return made


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


def _wished_variables(
    support: ReasoningSupport, think: bool, effort: ReasoningEffort | None
) -> dict[str, object]:
    """The same, as near to the wish as the template can; empty: it can do nothing about it."""
    settings: dict[str, object] = {} if support.switch is None else {support.switch: think}
    level = None if effort is None else support.nearest(effort)
    if level is not None:
        settings["reasoning_effort"] = level
    return settings


def _unsupported(why: str) -> APIError:
    message = f"this model's chat template {why}"
    return APIError(400, message, code="reasoning_not_supported")
