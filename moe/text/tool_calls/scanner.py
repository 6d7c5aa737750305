"""`StreamScanner`: reads text that arrives in pieces as if all of it were there.

Every method is a generator, which yields when it needs more text to decide. Positions are indices
into `StreamScanner.text`. A waiting method remembers how far it has looked, so that one scan takes
time proportional to the text, however small the pieces are. Who scans the same text from several
positions bounds their work by `StreamScanner.reach`.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Scan = Generator[None, None, Result]

MAX_NAME = 64
MAX_DIGITS = 9
_NAME = re.compile(r"[\w.-]*")
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class StreamScanner:
    """Attributes: `text` so far, whether it has `ended`, and how far `json_object` and `until` have
    looked (`reach`, a position that callers may set back)."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.reach = 0

    def skip(self, at: int) -> Scan[int]:
        """Past white space; at the end of the text if there is nothing else."""
        while True:
            while at < len(self.text) and self.text[at].isspace():
                at += 1
            if at < len(self.text) or self.ended:
                return at
            yield

    def literal(self, at: int, literal: str) -> Scan[int | None]:
        """Past the words of a literal, with any white space between them; None: it is not there."""
        for word in literal.split():
            at = yield from self.skip(at)
            while len(self.text) - at < len(word) and word.startswith(self.text[at:]):
                if self.ended:
                    return None
                yield
            if not self.text.startswith(word, at):
                return None
            at += len(word)
        return at

    def name(self, at: int) -> Scan[tuple[str, int] | None]:
        """The name of a tool, and where it ends."""
        at = yield from self.skip(at)
        while True:
            found = _NAME.match(self.text, at)
            assert found is not None
            if found.end() - at > MAX_NAME:
                return None
            if found.end() < len(self.text) or self.ended:
                return (found.group(), found.end()) if found.group() else None
            yield

    def number(self, at: int) -> Scan[int | None]:
        """Past the digits of a whole number; None: there are none, or more than `MAX_DIGITS`."""
        end = at
        while True:
            while end < len(self.text) and self.text[end].isdecimal():
                end += 1
            if end - at > MAX_DIGITS:
                return None
            if end < len(self.text) or self.ended:
                return end if end > at else None
            yield

    def json_object(self, at: int) -> Scan[tuple[str, int] | None]:
        """The text of a JSON object by its brackets and strings, and where it ends."""
        start = yield from self.skip(at)
        if not self.text.startswith("{", start):
            return None
        at, depth, inside = start, 0, False
        while True:
            found = (_INSIDE if inside else _OUTSIDE).search(self.text, at)
            if found is None:
                at = max(at, len(self.text))
                if self.ended:
                    self.reach = max(self.reach, len(self.text))
                    return None
                yield
                continue
            at = found.end()
            if found.group() == "\\":
                at += 1  # whatever comes next is not the end of the string
            elif found.group() == '"':
                inside = not inside
            else:
                depth += 1 if found.group() in "{[" else -1
            if depth == 0:
                self.reach = max(self.reach, at)
                return self.text[start:at], at

    def braced(self, at: int, quote: str) -> Scan[tuple[str, int] | None]:
        """The text of an object by its brackets and by strings between quotes that have no escapes,
        and where it ends."""
        start = yield from self.skip(at)
        if not self.text.startswith("{", start):
            return None
        marks, at, depth = re.compile(rf"{re.escape(quote)}|[{{}}\[\]]"), start, 0
        while True:
            found = marks.search(self.text, at)
            begun = len(self.text) - overlap(self.text, quote)
            cut_off = found is not None and begun <= found.start() and found.group() != quote
            if found is None or (cut_off and not self.ended):
                at = max(at, begun)
                if self.ended:
                    self.reach = max(self.reach, len(self.text))
                    return None
                yield
                continue
            at = found.end()
            if found.group() == quote:
                closed = yield from self.until(at, quote)
                if closed is None:
                    return None
                at = closed + len(quote)
                continue
            depth += 1 if found.group() in "{[" else -1
            if depth == 0:
                self.reach = max(self.reach, at)
                return self.text[start:at], at

    def until(self, at: int, word: str) -> Scan[int | None]:
        """Find the next place of a word; None: it does not come."""
        while True:
            found = self.text.find(word, at)
            if found >= 0:
                self.reach = max(self.reach, found)
                return found
            at = max(at, len(self.text) - len(word) + 1)
            if self.ended:
                self.reach = max(self.reach, len(self.text))
                return None
            yield


def overlap(text: str, word: str) -> int:
    """Most characters at the end of a text that a word begins with."""
    most = min(len(text), len(word) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(word[:size])), 0)
