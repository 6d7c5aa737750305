"""Reads calls of tools out of an answer while it comes.

What a text becomes depends on the text alone, never on how it was cut up. Text that cannot be the
beginning of a call is handed out at once, a call when it is complete. What begins like a call and
is none (damaged JSON, a tool that the request does not have) is text like any other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from moe.tools.bodies import Schemas, loads, read_body
from moe.tools.format import CallFormat
from moe.tools.reader import Reader, Reading, overlap


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class CallParser:
    """Reads one answer.

    Args:
        format: how the model writes calls.
        tools: which there are.
        most: what follows so many calls is left out; None: everything counts.
    """

    def __init__(self, format: CallFormat, tools: Schemas, most: int | None = None) -> None:
        self._format = format
        self._tools = tools
        self._left = most
        self._reader = Reader()
        self._at = 0  # everything before is handed out
        self._after_call = False
        self._out: list[str | Call] = []
        self._reading = self._read()

    def push(self, text: str) -> list[str | Call]:
        """Take in a piece of text; returns text and calls that became final, in their order."""
        self._reader.text += text
        next(self._reading, None)
        out, self._out = self._out, []
        return out

    def finish(self) -> list[str | Call]:
        """The rest, when the answer has ended."""
        self._reader.ended = True
        return self.push("")

    def _read(self) -> Reading[None]:
        opening = self._format.opening
        found = yield from (self._find(opening) if opening else self._reader.skip(0))
        while found is not None:
            if not (yield from self._section(found)):
                self._emit(min(found + max(len(opening), 1), len(self._reader.text)))
            if not opening or self._left == 0:
                break
            found = yield from self._find(opening)
        while True:
            if self._left != 0:
                self._emit(len(self._reader.text))
            yield

    def _find(self, word: str) -> Reading[int | None]:
        """Where the next call may begin; the text before it, but for space, is handed out."""
        reader = self._reader
        while True:
            reader.text, self._at = reader.text[self._at :], 0
            found = reader.text.find(word)
            end = found if found >= 0 else len(reader.text) - overlap(reader.text, word)
            self._emit(len(reader.text[:end].rstrip()))
            if found >= 0:
                return found
            if reader.ended:
                self._emit(len(reader.text))
                return None
            yield

    def _section(self, at: int | None) -> Reading[bool]:
        """Calls that follow each other; whether there was any."""
        assert at is not None
        format, literal = self._format, self._reader.literal
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

    def _call(self, at: int) -> Reading[int | None]:
        """Hand out the call that begins here, and where it ends; None: there is none."""
        begin = yield from self._reader.literal(at, self._format.call_open)
        if begin is None:
            return None
        read = yield from read_body(self._reader, self._format, begin, self._tools)
        if read is None:
            return None
        name, arguments, end = read
        call = _call(name, arguments, self._tools)
        if call is None:
            return None
        closed = yield from self._reader.literal(end, self._format.call_close)
        self._out.append(call)
        self._after_call = True
        if self._left is not None:
            self._left -= 1
        return end if closed is None else closed

    def _emit(self, end: int) -> None:
        """Hand out the text up to there, but for space between a call and what follows it."""
        text = self._reader.text[self._at : end]
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._out.append(text)
        self._at = max(self._at, end)


def _call(name: object, arguments: object, tools: Schemas) -> Call | None:
    """A call if it is one, of a tool that there is."""
    if isinstance(arguments, str):  # JSON in JSON, as some templates have it
        arguments = loads(arguments)
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # there are escapes of halves of characters
    except (ValueError, RecursionError):
        return None
    return Call(name, text)
