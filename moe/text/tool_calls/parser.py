"""`CallParser`: finds tool calls in an answer while it is generated.

The result depends on the text alone, never on how it was cut up. Text that cannot be the beginning
of a call is returned at once, a call when it is complete. Text that begins like a call but is none
(damaged JSON, a tool that the request does not have) stays text. Calls are looked for inside it,
until that has taken `AGAIN` times as much work as reading the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe.text.tool_calls.format import (
    BracedBody,
    CallFormat,
    NamedBody,
    ObjectBody,
    TaggedBody,
)
from moe.text.tool_calls.notation import PYTHON, from_notation, loads
from moe.text.tool_calls.scanner import Scan, StreamScanner, overlap
from moe.text.tool_calls.schemas import resolved, types_of

AGAIN = 8
"""The most looks at the average character in failed calls. Else each opening of an answer like
``<tool_call>{<tool_call>{...`` has the rest looked at once more."""


def from_text(text: str, schema: object, whole: Mapping[str, Any]) -> Any:
    """The value of an argument written as plain text. A string if the schema says so, or if the
    text is neither JSON nor Python's. References are relative to the whole schema of the tool."""
    types = types_of(schema, whole)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        is_inside = text.startswith(("{", "["))
        value = from_notation(text, "'") if is_inside else PYTHON.get(text, text)
        if value is None and text != "None":
            return text
    if value is None:
        return None if "null" in types or not types else text
    if isinstance(value, str) or "string" in types:
        return text
    return value


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool that may be called, by the tool's name."""

CallBody = tuple[object, object, int]
"""Name and arguments, of any type, and the position where they end."""


def read_body(
    scanner: StreamScanner, format: CallFormat, at: int, tools: Schemas
) -> Scan[CallBody | None]:
    """Scan the name and the arguments of a call, in the format's shape; None: there are none."""
    body = format.body
    if isinstance(body, ObjectBody):
        read = yield from scanner.json_object(at)
        if read is None:
            return None
        value = loads(read[0])
        return _dig(value, body.name), _dig(value, body.arguments), read[1]
    named = yield from scanner.name(at)
    end = None if named is None else named[1]
    if end is not None and isinstance(body, NamedBody) and body.number:
        end = yield from scanner.literal(end, body.number)
        end = None if end is None else (yield from scanner.number(end))
    after = None if end is None else (yield from scanner.literal(end, body.middle))
    if named is None or after is None:
        return None
    if isinstance(body, TaggedBody):
        tagged = yield from _Tagged(scanner, body, format.call_close, tools.get(named[0])).read(
            after
        )
        return named[0], *tagged
    if isinstance(body, BracedBody):
        read = yield from scanner.braced(after, body.quote)
        return None if read is None else (named[0], from_notation(read[0], body.quote), read[1])
    read = yield from scanner.json_object(after)
    return None if read is None else (named[0], loads(read[0]), read[1])


class _Tagged:
    def __init__(
        self,
        scanner: StreamScanner,
        body: TaggedBody,
        call_close: str,
        schema: Mapping[str, Any] | None,
    ) -> None:
        self._scanner = scanner
        self._body = body
        self._forms = [(body.open, body.key_close), *filter(None, [body.marked])]
        self._following = (*(open for open, _ in self._forms), call_close)
        self._schema = schema or {}
        properties = resolved(self._schema, self._schema).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def read(self, at: int) -> Scan[tuple[dict[str, Any] | None, int]]:
        """Arguments and where they end; None where one is not finished."""
        scanner = self._scanner
        arguments: dict[str, Any] = {}
        while (found := (yield from self._key(at))) is not None:
            key, start, form = found
            ends = None if start is None else (yield from self._ends(start))
            if ends is None:
                return None, at
            text = scanner.text[start : ends[0]].removeprefix(_space_after(form[1]))
            text = text.removesuffix(_space_before(self._body.close))
            arguments[key] = self._value(key, text, form)
            at = ends[1]
        return arguments, at

    def _key(self, at: int) -> Scan[tuple[str, int | None, tuple[str, str]] | None]:
        """The key of an argument, where its value begins, and its form. None instead of a place: it
        is not finished; instead of all: there is none."""
        scanner, found = self._scanner, None
        for form in self._forms:
            begin = yield from scanner.literal(at, form[0])
            if begin is None:
                continue
            start = None
            key_end = yield from scanner.until(begin, form[1].split()[0])
            if key_end is not None:
                start = yield from scanner.literal(key_end, form[1])
            found = scanner.text[begin:key_end].strip(), start, form
            if start is not None:
                break
        return found

    def _value(self, key: str, text: str, form: tuple[str, str]) -> Any:
        """The value of an argument: what its tags say that it is, else what the schema says."""
        if self._body.marked is not None and form != self._body.marked:
            return text
        if self._body.marked is not None:
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                pass
        return from_text(text, self._properties.get(key), self._schema)

    def _ends(self, start: int) -> Scan[tuple[int, int] | None]:
        """Find the end of a value, and the end of its closing, one that is not part of the value.

        Behind it comes the next key, or the end of the call.
        """
        at, scanner = start, self._scanner
        while (end := (yield from scanner.until(at, self._body.close.split()[0]))) is not None:
            closed = yield from scanner.literal(end, self._body.close)
            if closed is not None:
                for following in self._following:
                    if (yield from scanner.literal(closed, following)) is not None:
                        return end, closed
                if (yield from scanner.skip(closed)) == len(scanner.text):
                    return end, closed
            at = end + 1
        return None


def _dig(value: object, path: tuple[str, ...]) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _space_before(literal: str) -> str:
    return literal[: len(literal) - len(literal.lstrip())]


def _space_after(literal: str) -> str:
    return literal[len(literal.rstrip()) :]


@dataclass(frozen=True)
class ParsedCall:
    """A call of a tool.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class CallParser:
    """Parses one answer.

    Args:
        format: how the model writes calls.
        tools: the tools of the request.
        most: drop everything after this many calls; None: drop nothing.
    """

    def __init__(self, format: CallFormat, tools: Schemas, most: int | None = None) -> None:
        self._format = format
        self._tools = tools
        self._left = most
        self._scanner = StreamScanner()
        self._at = 0  # everything before is handed out
        self._num_cut = 0  # characters before the scanner's text
        self._num_failed = 0  # characters that failed calls have looked at
        self._after_call = False
        self._out: list[str | ParsedCall] = []
        self._reading = self._read()

    def push(self, text: str) -> list[str | ParsedCall]:
        """Take in a piece of text; returns text and calls that became final, in their order."""
        self._scanner.text += text
        next(self._reading, None)
        out, self._out = self._out, []
        return out

    def finish(self) -> list[str | ParsedCall]:
        """The rest, when the answer has ended."""
        self._scanner.ended = True
        return self.push("")

    def _read(self) -> Scan[None]:
        opening = self._format.opening
        found = yield from (self._find(opening) if opening else self._scanner.skip(0))
        while found is not None:
            self._scanner.reach = found
            if not (yield from self._section(found)):
                self._emit(min(found + max(len(opening), 1), len(self._scanner.text)))
            if not opening or self._left == 0:
                break
            reach = self._scanner.reach
            if self._num_failed > AGAIN * (self._num_cut + reach):
                self._emit(reach)
            found = yield from self._find(opening)
        while True:
            if self._left != 0:
                self._emit(len(self._scanner.text))
            yield

    def _find(self, word: str) -> Scan[int | None]:
        """Find where the next call may begin; the text before it, but for space, is handed out."""
        scanner = self._scanner
        while True:
            found = end = scanner.text.find(word, self._at)
            if found < 0:
                self._num_cut += self._at
                scanner.text, self._at = scanner.text[self._at :], 0
                end = len(scanner.text) - overlap(scanner.text, word)
            self._emit(self._at + len(scanner.text[self._at : end].rstrip()))
            if found >= 0:
                return found
            if scanner.ended:
                self._emit(len(scanner.text))
                return None
            yield

    def _section(self, at: int | None) -> Scan[bool]:
        """Calls that follow each other; whether there was any."""
        assert at is not None
        format, literal = self._format, self._scanner.literal
        begin = yield from literal(at, format.section_open)
        num_calls = 0
        while begin is not None and self._left != 0:
            end = yield from self._call(begin)
            if end is None:
                break
            num_calls += 1
            self._at = end
            begin = yield from literal(end, format.separator)
        if num_calls and self._left != 0:
            closed = yield from literal(self._at, format.section_close)
            self._at = self._at if closed is None else closed
        return num_calls > 0

    def _call(self, at: int) -> Scan[int | None]:
        """Emit the call that begins here; returns where it ends, or None if there is no call."""
        self._scanner.reach = at
        begin = yield from self._scanner.literal(at, self._format.call_open)
        read = call = None
        if begin is not None:
            read = yield from read_body(self._scanner, self._format, begin, self._tools)
        if read is not None:
            call = parsed_call(read[0], read[1], self._tools)
        if read is None or call is None:
            self._num_failed += self._scanner.reach - at
            return None
        end = read[2]
        closed = yield from self._scanner.literal(end, self._format.call_close)
        self._out.append(call)
        self._after_call = True
        if self._left is not None:
            self._left -= 1
        return end if closed is None else closed

    def _emit(self, end: int) -> None:
        """Emit the text up to a position, without the space after a call."""
        text = self._scanner.text[self._at : end]
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._out.append(text)
        self._at = max(self._at, end)


def parsed_call(name: object, arguments: object, tools: Schemas) -> ParsedCall | None:
    """The call, if it is valid and its tool exists."""
    if isinstance(arguments, str):  # some templates write JSON in JSON
        arguments = loads(arguments)
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails on the escape of half a character
    except (ValueError, RecursionError):
        return None
    return ParsedCall(name, text)
