"""Strings that end a text, found however tokens cut them up."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Ends a text before the first of some strings that comes up in it, however it is cut up.

    First is what ends first; of strings that end together, the longest counts. Text that could
    be the beginning of a stop string is held back until it is known not to be one.

    Attributes:
        matched: the string that was found, else None; nothing may be pushed after that.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._patterns = [(string, _borders(string)) for string in stop]
        # How much of each string the text so far ends with (Knuth-Morris-Pratt).
        self._progress = [0] * len(self._patterns)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take in a piece of text; returns what can be handed out."""
        assert self.matched is None, "text after a stop string"
        if not self._patterns:
            return text
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            if match := self._advance(character):
                self.matched, self._held = match, ""
                return buffer[: end - len(match)]
        keep = max(self._progress)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The text still held back, when generation ends without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str:
        """The longest string that ends with this character, else ""."""
        match = ""
        for index, (string, borders) in enumerate(self._patterns):
            length = self._progress[index]
            while length and string[length] != character:
                length = borders[length - 1]
            length += string[length] == character
            self._progress[index] = length
            if length == len(string) > len(match):
                match = string
        return match


def _borders(string: str) -> list[int]:
    """For each prefix of `string`, the length of its longest proper prefix that is its suffix."""
    borders = [0] * len(string)
    for end in range(1, len(string)):
        length = borders[end - 1]
        while length and string[length] != string[end]:
            length = borders[length - 1]
        borders[end] = length + (string[length] == string[end])
    return borders
