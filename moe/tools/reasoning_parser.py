"""Reads the reasoning out of an answer while it comes.

What becomes of a text depends on the text alone, never on how it was cut up. An answer that ends
before its reasoning does is reasoning only.
"""

from __future__ import annotations

from moe.tools.reader import Reader, Reading, overlap
from moe.tools.reasoning import ReasoningFormat


class ReasoningParser:
    """Cuts one answer into its reasoning and what comes behind it.

    Args:
        inside: the prompt has opened the reasoning.

    Attributes:
        found: the answer begins with reasoning.
        over: what comes now is behind it, or there is none.
    """

    def __init__(self, format: ReasoningFormat, *, inside: bool) -> None:
        self.found = self.over = False
        self._format = format
        self._inside = inside
        self._reader = Reader()
        self._at = 0  # everything before is handed out
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._reading = self._read()

    def push(self, text: str) -> tuple[str, str]:
        """Take in a piece of text; returns reasoning and content that became final."""
        self._reader.text += text
        next(self._reading, None)
        out = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return out

    def finish(self) -> tuple[str, str]:
        """The rest, when the answer has ended."""
        self._reader.ended = True
        return self.push("")

    def _read(self) -> Reading[None]:
        reader = self._reader
        opened = yield from reader.literal(0, self._format.open)
        if opened is not None or self._inside:
            self.found = True
            self._at = yield from reader.skip(opened or 0)
            closed = yield from self._think()
            self.over = True
            self._at = yield from reader.skip(closed)
        elif (lead := (yield from reader.literal(0, self._format.lead))) is not None:
            self._at = lead
        self.over = True
        while True:
            self._hand_out(len(reader.text), self._content)
            yield

    def _think(self) -> Reading[int]:
        """Hand out the reasoning; where what closes it ends, or the text does."""
        reader, close = self._reader, self._format.close
        word = close.split()[0]
        start = self._at
        while True:
            found = reader.text.find(word, start)
            end = found if found >= 0 else len(reader.text) - overlap(reader.text, word)
            keep = reader.text[self._at : end]
            start = end - self._hand_out(self._at + len(keep.rstrip()), self._reasoning)
            if found >= 0:
                closed = yield from reader.literal(start, close)
                if closed is not None:
                    return closed
                start += 1
            elif reader.ended:
                self._hand_out(len(reader.text), self._reasoning)
                return len(reader.text)
            else:
                yield

    def _hand_out(self, end: int, to: list[str]) -> int:
        """The text up to there, which is then forgotten; returns how much that was."""
        text = self._reader.text
        to.append(text[self._at : end])
        self._reader.text, self._at = text[end:], 0
        return end
