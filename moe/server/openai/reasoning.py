"""Reasoning in requests, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from moe.sampling.structure import Structure
from moe.server.answers import AnswerReader
from moe.server.errors import APIError
from moe.server.fields import at_most
from moe.server.openai.structured import StructuredBody
from moe.server.openai.tools import ToolBody
from moe.text.prompts import TextCodec
from moe.tools.reasoning import ReasoningSupport
from moe.tools.reasoning_grammar import CAN_FOLLOW, after_reasoning
from moe.tools.reasoning_parser import ReasoningParser

TemplateName = Annotated[str, StringConstraints(max_length=64)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateValue = bool | int | float | Annotated[str, Field(max_length=1024)] | None


class ReasoningBody(ToolBody, StructuredBody):
    chat_template_kwargs: Annotated[dict[TemplateName, TemplateValue], at_most(16)] = Field(
        default_factory=dict, max_length=16
    )
    """Variables that the model's chat template reads, such as ``enable_thinking``."""
    reasoning_effort: Effort | None = None
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

    def answer_reader(self, codec: TextCodec, prompt: Sequence[int]) -> AnswerReader:
        """Takes one answer to a prompt apart."""
        format, thinking = codec.reasoning.format, None
        if format is not None and self._thinks:
            thinking = ReasoningParser(format, inside=codec.opens_reasoning(prompt))
        return AnswerReader(self.call_parser(codec), thinking)

    @property
    def _thinks(self) -> bool:
        """A grammar or a regular expression is of the whole answer."""
        return self.structure is None or self.structure.kind in CAN_FOLLOW


def _settings(support: ReasoningSupport, think: bool, effort: Effort | None) -> dict[str, object]:
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
