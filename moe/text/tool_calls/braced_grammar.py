"""`BracedGrammar`: a schema as a grammar of the notation of `BracedBody`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from moe.text.tool_calls.format import BracedBody
from moe.text.tool_calls.schemas import ABOUT, resolved, types_of, unsaid

_MOST_RULES = 1024
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_ITEMS = {"type", "items"}
_OF_TEXTS = {"type", "enum", "const"}
_KEY = r"/[^{}\[\],:\"'<>\s]{1,64}/"
_PLAIN = {"number", "integer", "boolean", "null"}


class BracedGrammar:
    """Rules for the arguments of one tool, each object with its keys in one order.

    Args:
        name: what names of rules begin with.
        body: how arguments are written.
        mark: the term of a quote.
        schema: of the arguments; without properties any arguments, if it allows them.
        json_of: writes the term of JSON that follows a schema.

    Attributes:
        start: the rule of the arguments.
        rules: all lines.

    Raises:
        RequestError: no grammar can express the schema.
    """

    def __init__(
        self,
        name: str,
        body: BracedBody,
        mark: str,
        schema: Mapping[str, Any],
        json_of: Callable[[Mapping[str, Any]], str],
    ) -> None:
        self._name, self._body, self._mark, self._whole = name, body, mark, schema
        self._json_of = json_of
        self.rules: list[str] = []
        text = f"{self._name}_text[suffix={json.dumps(body.quote, ensure_ascii=False)}]"
        if mark.startswith("<["):  # a quote that is a token ends a text by itself
            self._text = f"{mark} ANYTHING {mark}"
        else:
            self._text = f"{mark} {self._name}_text"
            self.rules.append(f"{text}: /(?s:.*)/")
        self.start = self._value(schema, "arguments")

    def _add(self, body: str) -> str:
        """A new rule; returns its name."""
        if len(self.rules) >= _MOST_RULES:
            raise unsaid("a schema of so many parts")
        name = f"{self._name}_v{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, given: Any, what: str) -> str:
        said, types = resolved(given, self._whole), types_of(given, self._whole)
        keys = said.keys() - ABOUT
        if types == {"string"} and keys <= _OF_TEXTS:
            return self._string(said, what)
        if types and types <= _PLAIN and not any("$ref" in key for key in keys):
            return self._json_of(said)
        if types == {"array"} and keys <= _OF_ITEMS:
            item = self._value(said.get("items", {}), f"an item of {what}")
            return self._add(f'"[" ({item} ("," {item})*)? "]"')
        if types == {"object"} and keys <= _OF_OBJECTS:
            return self._object(said, what)
        if not keys:
            return self._anything()
        raise unsaid(f"{what} of several types, or with more than a type,")

    def _string(self, said: Mapping[str, Any], what: str) -> str:
        if not said.keys() & {"enum", "const"}:
            return self._text
        values = said.get("enum", [said.get("const")])
        if not values or not all(isinstance(value, str) for value in values):
            raise unsaid(f"{what} whose enum is no list of strings")
        choices = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        return f"{self._mark} ({choices}) {self._mark}"

    def _object(self, said: Mapping[str, Any], what: str) -> str:
        properties, required = said.get("properties", {}), said.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            raise unsaid(f"{what} whose properties are none")
        if unknown := [key for key in required if key not in properties]:
            raise unsaid(f"required argument {unknown[0]!r:.80}, which is no property,")
        if not properties and said.get("additionalProperties") is True:
            return self._free()
        # What may follow a member, and what may begin: from the last one on.
        tail = head = ""
        order = sorted(properties, key=str.casefold) if self._body.is_sorted else list(properties)
        for key in reversed(order):
            inner = properties[key]
            member = f"{json.dumps(key + ':')} {self._value(inner, f'argument {key!r:.80}')}"
            first = f"{member} {tail}".strip()
            more = f'"," {first}'
            if key in required:
                head, tail = self._add(first), self._add(more)
            else:
                head = self._add(f"{first} | {head}" if head else f"({first})?")
                tail = self._add(f"({more})? {tail}" if not tail else f"{more} | {tail}")
        return self._add(f'"{{" {head} "}}"')

    def _free(self) -> str:
        """An object of any keys and values."""
        member = f'{_KEY} ":" {self._anything()}'
        return self._add(f'"{{" ({member} ("," {member})*)? "}}"')

    def _anything(self) -> str:
        value = f"{self._name}_value"
        if not any(rule.startswith(f"{value}:") for rule in self.rules):
            plain = self._json_of({"type": ["number", "boolean", "null"]})
            member = f'{_KEY} ":" {value}'
            self.rules += [
                f'{value}: {self._text} | {plain} | "[" ({value} ("," {value})*)? "]" '
                f'| "{{" ({member} ("," {member})*)? "}}"'
            ]
        return value
