"""Grammars of answers, in llguidance's version of Lark.

`CallGrammar`: answers whose tool calls follow their schemas. `after_reasoning`: answers that follow
a structure and may reason before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moe.errors import RequestError
from moe.sampling.grammar import WHITESPACE, moved, simplified
from moe.sampling.params import Structure
from moe.text.tool_calls.braced_grammar import BracedGrammar
from moe.text.tool_calls.format import (
    BracedBody,
    CallFormat,
    NamedBody,
    ObjectBody,
    TaggedBody,
)
from moe.text.tool_calls.reasoning import ReasoningFormat
from moe.text.tool_calls.schemas import ABOUT, resolved, types_of, unsaid

Schema = Mapping[str, Any]
ANY: Schema = {"type": "object"}
FREE: Schema = {"type": "object", "additionalProperties": True}
"""Schema of tools whose calls are not checked: any arguments, where `ANY` without properties has
none."""
_OPTIONS = {"x-guidance": {"lenient": False, "whitespace_pattern": WHITESPACE}}
ANY_TEXT = "/(?s:.*)/"
_OF_STRINGS = {"type", "enum", "const"} | ABOUT
_OF_TAGS = {"type", "properties", "required", "additionalProperties"} | ABOUT
_OF_TAGS |= {"$defs", "definitions"}
_WHOLE = "whole"
"""Key of a tool's schema in that of an argument."""


class CallGrammar:
    """Writes the grammar of answers in one format.

    Args:
        format: how the model writes calls.
        special: ids of the special tokens that calls are written with, by their texts.
    """

    def __init__(self, format: CallFormat, special: Mapping[str, int]) -> None:
        self._format = format
        self._special = special

    def calls(self, tools: Mapping[str, Schema], *, several: bool) -> str:
        """An answer that is a call of one of the tools, or several calls.

        Raises:
            RequestError: no grammar can express a tool's arguments.
        """
        format = self._format
        start = [self._text(format.section_open), *self._calls(several)]
        start.append(self._text(format.section_close))
        return self._grammar([_rule("start", start)], tools)

    def text_or_calls(self, tools: Mapping[str, Schema], *, several: bool) -> str:
        """An answer of any text that may end with valid calls.

        Raises:
            RequestError: as `calls`, or the format has no delimiters that show where calls begin.
        """
        format = self._format
        if format.channels is not None:
            raise RequestError(
                "strict tools cannot be enforced while the model may also answer: it writes calls "
                "among messages on channels; leave strict out, or use a tool_choice that makes it "
                "call"
            )
        opening = format.opening
        if not opening:
            raise RequestError(
                "strict tools need delimiters around calls, and this model writes none; leave "
                "strict out, or use a tool_choice that makes the model call"
            )
        lead = format.section_open + format.call_open
        rest = [self._text(format.section_open), *self._calls(several)]
        rest.append(self._text(format.section_close))
        if any(lead.startswith(text) for text in self._special):
            return self._grammar([_rule("start", ["ANYTHING", f"({' '.join(rest)})?"])], tools)
        # Text that contains the opening must continue as a call.
        behind = lead[len(opening) :]
        first = [self._text(behind), "body", self._text(format.call_close)]
        more = [f"({' '.join(self._more())})*"] if several and format.several else []
        start = [*first, *more, self._text(format.section_close)]
        avoided = re.escape(opening).replace("/", r"\/")
        rules = [
            f"start: FREE | before {' '.join(filter(None, start))}",
            f"before[suffix={quoted(opening)}]: {ANY_TEXT}",
            f"FREE: {ANY_TEXT} & ~/(?s:.*){avoided}(?s:.*)/",
        ]
        return self._grammar(rules, tools)

    def answer_or_calls(
        self, answer: Structure, lead: str, tools: Mapping[str, Schema], *, several: bool
    ) -> str:
        """An answer of a form of its own, or calls in its place.

        Args:
            answer: one of the kinds in `CAN_FOLLOW`.
            lead: what `ReasoningFormat.lead` says; on channels it begins the answer's message.

        Raises:
            RequestError: no grammar can express a tool's arguments.
        """
        format = self._format
        calls = [self._text(format.section_open), *self._calls(several)]
        calls.append(self._text(format.section_close))
        begin = "" if format.channels is None else self._text(lead)
        final = [_rule("final", [begin, "form"]), f"form: {_term(answer)}"]
        return self._grammar([_rule("start", ["final |", *calls]), *final], tools)

    def _calls(self, several: bool) -> list[str]:
        more = several and self._format.several
        return ["call", f"({' '.join(self._more())})*"] if more else ["call"]

    def _more(self) -> list[str]:
        return [*filter(None, [self._text(self._format.separator)]), "call"]

    def _grammar(self, start: Sequence[str], tools: Mapping[str, Schema]) -> str:
        bodies = [
            self._body(name, _of_object(name, schema), index)
            for index, (name, schema) in enumerate(tools.items())
        ]
        call = [self._text(self._format.call_open), "body", self._text(self._format.call_close)]
        rules = [*start, _rule("call", call), _rule("body", [" | ".join(b[0] for b in bodies)])]
        lines = [*rules, *(line for _, lines in bodies for line in lines)]
        if any("ANYTHING" in line for line in lines):
            lines.append(f"ANYTHING: {ANY_TEXT}")
        if isinstance(self._format.body, ObjectBody):
            lines.append(f"SPACE: /{WHITESPACE}/")
        return "\n".join(lines) + "\n"

    def _body(self, name: str, schema: Schema, index: int) -> tuple[str, list[str]]:
        """The name of the rule for a call's body, and all rules that it needs."""
        body, rule = self._format.body, f"tool{index}"
        if isinstance(body, ObjectBody):
            return rule, [_rule(rule, self._object(json.loads(body.sample), (), name, schema))]
        begin = [quoted(name), self._text(body.middle)]
        if isinstance(body, NamedBody):
            if body.number:
                begin.insert(1, f"{quoted(body.number)} /[0-9]{{1,4}}/")
            return rule, [_rule(rule, [*begin, json_of(schema)])]
        if isinstance(body, BracedBody):
            values = BracedGrammar(rule, body, self._text(body.quote), schema, json_of)
            return rule, [_rule(rule, [*begin, values.start]), *values.rules]
        return rule, self._tagged(rule, begin, body, schema)

    def _object(self, sample: Any, path: tuple[str, ...], name: str, schema: Schema) -> list[str]:
        """JSON that equals a sample except for name, arguments and ids. The arguments are a
        document of their own, as their schema's references are relative to it."""
        body = self._format.body
        assert isinstance(body, ObjectBody)
        if path == body.name:
            return [quoted(quoted(name))]
        if path == body.arguments:
            if isinstance(sample, str):
                raise unsaid("arguments that are JSON in JSON")
            return [json_of(schema)]
        if isinstance(sample, Mapping):
            members = []
            for key, value in sample.items():
                inner = self._object(value, (*path, key), name, schema)
                members.append(f'SPACE? {quoted(quoted(key))} SPACE? ":" SPACE? {" ".join(inner)}')
            return ['"{"', ' SPACE? "," '.join(members), 'SPACE? "}"']
        if path in body.varying and path[-1] != "id":
            return ['/"[a-zA-Z0-9_.:-]{1,16}"/' if isinstance(sample, str) else "/[0-9]{1,4}/"]
        if path[-1] == "id":
            return ['/"[a-zA-Z0-9]{9}"/']
        return [quoted(quoted(sample)) if isinstance(sample, str) else json_of({"const": sample})]

    def _tagged(self, rule: str, begin: list[str], body: TaggedBody, schema: Schema) -> list[str]:
        if schema == FREE:
            return self._free_arguments(rule, begin, body)
        outer = resolved(schema, schema)
        properties, required = outer.get("properties", {}), outer.get("required", [])
        if not isinstance(properties, Mapping) or outer.keys() - _OF_TAGS:
            raise unsaid("more than properties")
        if not _texts(required):
            raise unsaid("a required that is no list of names")
        if unknown := [key for key in required if key not in properties]:
            raise unsaid(f"required argument {unknown[0]!r:.80}, which is no property,")
        rules, parts = [], list(begin)
        for index, (key, given) in enumerate(properties.items()):
            name = f"{rule}_{index}"
            rules += self._argument(name, key, given, body, schema)
            parts.append(name if key in required else f"{name}?")
        return [_rule(rule, parts), *rules]

    def _argument(
        self, rule: str, key: str, given: Any, body: TaggedBody, schema: Schema
    ) -> list[str]:
        types, said = types_of(given, schema), resolved(given, schema)
        opened = (body.open, body.key_close)
        if "string" not in types:
            opened = body.marked or opened
        begin = [self._text(opened[0]), quoted(key), self._text(opened[1])]
        close = body.close
        if not types or ("string" in types and len(types) > 1):
            raise unsaid(f"argument {key!r:.80} of several types, or of none that is said,")
        if "string" not in types:
            return [_rule(rule, [*begin, _json_inside(given, schema), self._text(close)])]
        if said.keys() - _OF_STRINGS:
            raise unsaid(f"argument {key!r:.80} that is not any string")
        if "enum" in said or "const" in said:
            values = said.get("enum", [said.get("const")])
            if not _texts(values) or not values or said.get("const", values[0]) not in values:
                raise unsaid(f"argument {key!r:.80} whose enum is no list of strings")
            choices = " | ".join(map(quoted, [said["const"]] if "const" in said else values))
            return [_rule(rule, [*begin, f"({choices})", self._text(close)])]
        end = close.rstrip()
        return [
            _rule(rule, [*begin, f"{rule}_text", self._text(close[len(end) :])]),
            f"{rule}_text[suffix={quoted(end)}]: {ANY_TEXT}",
        ]

    def _free_arguments(self, rule: str, begin: list[str], body: TaggedBody) -> list[str]:
        """Arguments of any names, with any texts as values."""
        end = body.close.rstrip()
        tail = self._text(body.close[len(end) :])
        texts = [self._text(body.open), f"{rule}_key", self._text(body.key_close), f"{rule}_text"]
        lines = [_rule(rule, [*begin, f"{rule}_any*"]), _rule(f"{rule}_any", [*texts, tail])]
        if body.marked is not None:
            opened, key_close = map(self._text, body.marked)
            marked = [opened, f"{rule}_key", key_close, "%json {}", self._text(body.close)]
            lines += [_rule(f"{rule}_json", marked)]
            lines[0] = _rule(rule, [*begin, f"({rule}_any | {rule}_json)*"])
        return [
            *lines,
            rf'{rule}_key: /[^<>"=\[\]\s]{{1,64}}/',
            f"{rule}_text[suffix={quoted(end)}]: {ANY_TEXT}",
        ]

    def _text(self, literal: str) -> str:
        return written(literal, self._special)


def written(literal: str, special: Mapping[str, int]) -> str:
    """A literal: special tokens by their ids, everything else as text."""
    parts = cut(literal, special)
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts)


def cut(literal: str, special: Mapping[str, int]) -> list[str]:
    """A literal in pieces: special tokens, and the text between them."""
    texts = map(re.escape, sorted(special, key=len, reverse=True))
    parts = re.split(f"({'|'.join(texts)})", literal) if special else [literal]
    return [part for part in parts if part]


def _rule(name: str, parts: Sequence[str]) -> str:
    return f"{name}: {' '.join(filter(None, parts))}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_of(schema: Schema) -> str:
    """JSON that follows a schema, which is `simplified`."""
    return f"%json {json.dumps({**schema, **_OPTIONS})}"


def _of_object(name: str, schema: Schema) -> Schema:
    """A tool's schema, `simplified`, with the type object even if it leaves the type open."""
    said = schema.get("type", "object")
    if "object" not in (said if isinstance(said, list) else [said]):
        raise RequestError(
            f"tools: the arguments of {name!r} must be an object, and its parameters say type "
            f"{said!r:.100}; send a schema of type object"
        )
    return _plain(f"tools: the parameters of {name!r}", {**schema, "type": "object"})


def _plain(about: str, schema: Schema) -> Schema:
    """A schema, `simplified`. Raises RequestError where that is nested too deeply."""
    try:
        plain: Schema = simplified(schema)
    except ValueError as error:
        raise RequestError(f"{about}: {error}; send a schema with fewer levels") from error
    return plain


def _json_inside(schema: Schema, whole: Schema) -> str:
    """JSON that follows a part of a tool's schema, which may refer to others."""
    if '"$ref"' not in json.dumps(schema):
        return json_of(schema)
    to = f"#/$defs/{_WHOLE}"
    outer = {key: value for key, value in moved(whole, to).items() if key != "$id"}
    return json_of(moved(schema, to) | {"$defs": {_WHOLE: outer}})


def _texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


CAN_FOLLOW = ("json_schema", "choice")
"""Kinds of requested structures that can follow reasoning."""


def after_reasoning(
    structure: Structure, format: ReasoningFormat, special: Mapping[str, int], *, inside: bool
) -> Structure:
    """A structure that follows reasoning: free text up to the closing literal.

    Args:
        structure: one of the kinds above, or a grammar of `CallGrammar`.
        special: ids of the special tokens that reasoning is written with, by their texts.
        inside: the prompt has opened the reasoning; else the answer may open it, or not reason.
    """
    first, *rest = cut(format.close, special)
    closed = written("".join(rest), special)
    thought = (
        f"thought: THOUGHT {written(first, special)} {closed}\nTHOUGHT: {ANY_TEXT}"
        if first in special
        else f"thought: closed {closed}\nclosed[suffix={quoted(first)}]: {ANY_TEXT}"
    )
    opened = "" if inside else f"BLANK? {written(format.open, special)} "
    lead = "" if format.close.endswith(format.lead) else f"({written(format.lead, special)})? "
    start = f"start: {opened}thought BLANK? {lead}answer"
    if not inside:
        start += f" | {written(format.lead, special)} answer"
    blank = r"BLANK: /[ \n]{1,4}/"
    text = "\n".join([start, thought, blank, _answer(structure)]) + "\n"
    return Structure.grammar(text, structure.parts or [(structure.name, structure)])


def _answer(structure: Structure) -> str:
    if structure.kind in CAN_FOLLOW:
        return f"answer: {_term(structure)}"
    assert structure.source.startswith("start:")
    return structure.source.replace("start:", "answer:", 1)


def _term(structure: Structure) -> str:
    """A requested structure as the right side of a rule."""
    if structure.kind == "json_schema":
        return json_of(_plain("the JSON schema", json.loads(structure.source)))
    assert structure.kind == "choice"
    return " | ".join(map(quoted, json.loads(structure.source)))
