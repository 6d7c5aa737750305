"""`ChannelParser`: answers that are messages on channels, while they are generated.

Such an answer has messages of reasoning, of calls and of text, in any order. Special tokens stay in
the text that is parsed; the first message's header is continued from the prompt. As with
`CallParser`, the result depends on the text alone, and what begins like a call but is none stays
text.
"""

from __future__ import annotations

import re

from moe.text.tool_calls.format import Channels
from moe.text.tool_calls.notation import loads
from moe.text.tool_calls.parser import ParsedCall, Schemas, parsed_call
from moe.text.tool_calls.scanner import overlap

_MOST_HEADER = 256
"""Characters of a header; a longer text without an end is no header."""

Parts = list[str | ParsedCall]


class ChannelParser:
    """Parses one answer.

    Args:
        channels: how the model writes messages.
        tools: the tools of the request.
        most: drop everything after this many calls; None: drop nothing.

    Attributes:
        thinking: the last text was reasoning, or belongs to no message yet.
    """

    def __init__(self, channels: Channels, tools: Schemas, most: int | None = None) -> None:
        self.thinking = False
        self._channels, self._tools, self._left = channels, tools, most
        self._text, self._looked = "", 0
        self._in_header = True
        self._channel = ""
        self._called: str | None = None
        self._reasoning: list[str] = []
        self._parts: Parts = []
        self._to = re.compile(rf"{re.escape(channels.recipient)}([\w.-]+)")
        self._named = re.compile(rf"{re.escape(channels.channel)}\s*(\w+)")

    def push(self, text: str) -> tuple[str, Parts]:
        """Take in a piece of text; returns reasoning, and text and calls that became final."""
        self._text += text
        while self._step(ended=False):
            pass
        return self._taken()

    def finish(self) -> tuple[str, Parts]:
        """The rest, when the answer has ended."""
        while self._step(ended=True):
            pass
        return self._taken()

    def _taken(self) -> tuple[str, Parts]:
        reasoning, parts = "".join(self._reasoning), self._parts
        self._reasoning, self._parts = [], []
        self.thinking = self._in_header or self._is_thought
        return reasoning, parts

    @property
    def _is_thought(self) -> bool:
        return self._called is None and self._channel == self._channels.thought != ""

    def _step(self, *, ended: bool) -> bool:
        """Read one header or content; False: more text is needed, or there is none."""
        return self._header(ended=ended) if self._in_header else self._content(ended=ended)

    def _header(self, *, ended: bool) -> bool:
        before, found, behind = self._text.partition(self._channels.message)
        if not found:
            if (ended or len(before) > _MOST_HEADER) and before:
                self._in_header, self._channel, self._called = False, "", None
                return True
            return False
        to, named = self._to.search(before), self._named.search(before)
        self._channel = "" if named is None else named[1]
        self._called = to[1] if to is not None and to[1] in self._tools else None
        self._text, self._in_header, self._looked = behind, False, 0
        return True

    def _content(self, *, ended: bool) -> bool:
        marks = (*self._channels.ends, self._channels.start)
        places = [(at, mark) for mark in marks if (at := self._text.find(mark, self._looked)) >= 0]
        self._looked = 0 if places else max(len(self._text) - max(map(len, marks)), 0)
        if places:
            at, mark = min(places)
            self._emit(self._text[:at], whole=True)
            self._text, self._in_header = self._text[at + len(mark) :], True
            return True
        if ended:
            self._emit(self._text, whole=True)
            self._text = ""
        elif self._called is None:
            end = len(self._text) - max(overlap(self._text, mark) for mark in marks)
            self._emit(self._text[:end], whole=False)
            self._text, self._looked = self._text[end:], 0
        return False

    def _emit(self, text: str, *, whole: bool) -> None:
        """Emit content of the message; ``whole``: it ends here."""
        if self._is_thought:
            self._reasoning.append(text)
            return
        if self._left == 0:
            return
        if self._called is not None and whole:
            call = parsed_call(self._called, loads(text), self._tools)
            self._called = None
            if call is not None:
                self._parts.append(call)
                if self._left is not None:
                    self._left -= 1
                return
        if text:
            self._parts.append(text)
