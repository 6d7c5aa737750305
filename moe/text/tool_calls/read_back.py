"""Reads what a chat template writes with the format that was found in it.

`Answers` says what a model would have generated for a message that the template writes: what
follows the prompt, up to a token that ends it, without the special tokens that an answer does not
show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from moe.errors import RequestError
from moe.helpers import HelperLimitError
from moe.text.chat import MessageDict, with_calls
from moe.text.tool_calls.channels import ChannelParser
from moe.text.tool_calls.format import CallFormat
from moe.text.tool_calls.parser import CallParser, ParsedCall
from moe.text.tool_calls.spots import departs

Render = Callable[..., str]
"""Renders messages as text; takes the options of `moe.text.chat.render`. Raises `RequestError`."""

_ASKED = {"role": "user", "content": "probe question"}
_NAME, _OTHER = "probe_first", "probe_second"
_TYPES = {"key_one": "string", "key_two": "object", "key_six": "number", "key_seven": "string"}
_SCHEMA = {"type": "object", "properties": {key: {"type": kind} for key, kind in _TYPES.items()}}
_STRING, _NUMBER, _OBJECT = (
    {"key_one": "value one"},
    {"key_six": 31337},
    {"key_two": {"in": [True]}},
)
_QUOTES = {"key_one": 'it\'s "a", \\n `b`'}
_Calls = list[tuple[str, dict[str, Any]]]
_CASES: dict[str, _Calls] = {
    "an argument that is a string": [(_NAME, _STRING)],
    "a string with quotes": [(_NAME, _QUOTES)],
    "arguments of which a number is the first": [(_NAME, _NUMBER | {"key_seven": "7"})],
    "an argument that is an object": [(_NAME, _STRING | _OBJECT)],
    "no arguments": [(_NAME, {})],
}
_SEVERAL: dict[str, _Calls] = {
    "two calls": [(_NAME, _OBJECT | _NUMBER), (_OTHER, _STRING)],
    "three calls": [(_NAME, _STRING), (_OTHER, {}), (_NAME, _NUMBER)],
}


class Answers:
    """Answers as a model generates them, in the form in which its chat template writes earlier
    ones.

    Args:
        special: texts of the tokens that an answer does not show.
        ends: texts of the tokens that end an answer.
    """

    def __init__(self, render: Render, special: Collection[str], ends: Collection[str]) -> None:
        self._render = render
        self._special = sorted(special, key=len, reverse=True)
        self._ends = ends

    def written(
        self, messages: Sequence[MessageDict], shown: Iterable[str], **options: Any
    ) -> str | None:
        """The last message as it is generated; None: the template refuses these messages.

        Args:
            shown: literals whose special tokens an answer shows.
        """
        literals = "\0".join(shown)
        try:
            text = self._render(messages, **options)
            prompt = self._render(messages[:-1], add_generation_prompt=True, **options)
        except RequestError as error:
            if isinstance(error.__cause__, HelperLimitError):
                raise error.__cause__ from None
            return None
        text = text[departs(prompt, text) :]
        text = text[: min((at for end in self._ends if (at := text.find(end)) >= 0), default=None)]
        for token in self._special:
            if token not in literals:
                text = text.replace(token, "")
        return text

    def unread(self, format: CallFormat) -> str:
        """A case of calls that the template writes and the format does not read; or ""."""
        cases = _CASES | (_SEVERAL if format.several else {})
        for case, calls in cases.items():
            if not self._reads(format, [_ASKED], calls):
                return case
        earlier: _Calls = [(_NAME, _STRING)]
        result = {"role": "tool", "tool_call_id": _id(0, 0), "name": _NAME, "content": "7"}
        history = [_ASKED, _answer(format, earlier, 0), result]
        return "" if self._reads(format, history, earlier) else "a call after another's result"

    def _reads(self, format: CallFormat, before: list[MessageDict], calls: _Calls) -> bool:
        answer = _answer(format, calls, len(before))
        text = self.written(with_calls([*before, answer], format), format.literals)
        if text is None:
            return False
        read, behind = _calls_in(text, format)
        return read == calls and behind.strip() in ("", self._turn_end(_ASKED))

    def _turn_end(self, asked: MessageDict) -> str:
        """Return the text that the template writes after an answer without calls: it may end in no
        known token."""
        said = "probe answer"
        text = self.written([asked, {"role": "assistant", "content": said}], ())
        return "" if text is None else text.rpartition(said)[2].strip()


def _answer(format: CallFormat, calls: _Calls, turn: int) -> MessageDict:
    made = [
        {
            "id": _id(turn, index),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given)},
        }
        for index, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": format.no_content, "tool_calls": made}


def _id(turn: int, index: int) -> str:
    return f"other00{turn}{index}"


def _calls_in(text: str, format: CallFormat) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """The calls in an answer, and the text behind the last one."""
    tools: Mapping[str, Mapping[str, Any]] = dict.fromkeys((_NAME, _OTHER), _SCHEMA)
    parts: list[str | ParsedCall]
    if format.channels is not None:
        channels = ChannelParser(format.channels, tools)
        parts = channels.push(text)[1] + channels.finish()[1]
    else:
        calls = CallParser(format, tools)
        parts = calls.push(text) + calls.finish()
    read, behind = [], ""
    for part in parts:
        if isinstance(part, ParsedCall):
            read.append((part.name, json.loads(part.arguments)))
            behind = ""
        else:
            behind += part
    return read, behind
