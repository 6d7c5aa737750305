"""Finds how a model writes tool calls by probing its chat template.

The template renders an answer with calls whose names, keys and values occur nowhere else; the text
around them is what the model was taught to write. No architecture is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.errors import RequestError
from moe.text.chat import REASONING_KEY, MessageDict
from moe.text.renderer import TemplateLimitError
from moe.text.tool_calls.format import (
    CallFormat,
    Channels,
    KeyPath,
    NamedBody,
    ObjectBody,
    TaggedBody,
)

Render = Callable[..., str]
"""Renders messages as text; takes the options of `moe.text.chat.render`. Raises `RequestError`."""

_ASKED, _ANSWERED, _THOUGHT = "probe question", "probe answer", "probe thought"
_TOOL = "probe_tool"
# Ids have nine letters and digits: some templates accept nothing else.
_FIRST = ("probe_first", {"key_one": "value one", "key_two": {"in": [True]}, "key_six": 31337})
_SECOND = ("probe_second", {"key_three": "value three", "key_four": {"in": []}, "key_five": 41337})
_CALLS = (_FIRST, _SECOND)
# Ids with which models are taught that are given only those of calls (Kimi K2).
_BY_ID, _NUMBERED = "functions.", ":0"
_CLOSING = " \t\r\n>]})|\uff5c\"'`,;:"  # no opening literal begins with one of these


class _NoFormat(Exception):
    """The format of calls is unknown; the message says why."""


@dataclass(frozen=True)
class ToolSupport:
    """Whether a model can be given tools: the format of its calls, or the reason why not."""

    format: CallFormat | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        shown = None if self.format is None else self.format.as_dict()
        return {"enabled": self.format is not None, "why": self.reason, "format": shown}


def probe_tools(render: Render, special: Collection[str]) -> ToolSupport:
    """Derive the format of calls.

    Args:
        render: the model's chat template.
        special: texts of the tokens that an answer does not show, end tokens included.
    """
    try:
        return ToolSupport(_ToolProbe(render, special).run(), "found by probing the chat template")
    except _NoFormat as reason:
        return ToolSupport(None, str(reason))


class _ToolProbe:
    def __init__(self, render: Render, special: Collection[str]) -> None:
        self._render = render
        self._special = special
        self._ids = ""

    def run(self) -> CallFormat:
        self._check_tools_are_shown()
        lead, end = self._plain_answer()
        if hidden := [token for token in self._special if token in lead]:
            made = self._on_channels(lead, end)
            if made is None:
                raise _NoFormat(f"answers begin with {hidden[0]!r}: channels are not understood")
            return made
        for self._ids in ("", _BY_ID):
            for as_text in (False, True):
                for content in (_ANSWERED, None, ""):
                    spots = self._answer(content, as_text, lead)
                    if spots is not None:
                        text, begin, calls = spots
                        tail = self._tail(text[calls[-1].end :], end)
                        made = assemble(text, begin, calls, tail)
                        made = None if made is None else self._by_id(made)
                        if made is None:
                            raise _NoFormat(
                                "the chat template writes calls in a shape that is unknown"
                            )
                        return self._finished(made, as_text, lead)
        raise _NoFormat(
            "the chat template does not write calls of earlier answers, or not as JSON or as "
            "tagged values"
        )

    def _by_id(self, made: CallFormat) -> CallFormat | None:
        """The format if calls are written by their ids, which have names and numbers."""
        if not self._ids:
            return made
        body = made.body
        if not isinstance(body, NamedBody) or not body.middle.startswith(_NUMBERED):
            return None
        number, middle = _NUMBERED[:-1], body.middle.removeprefix(_NUMBERED)
        return replace(made, body=NamedBody(middle, number), ids=self._ids)

    def _check_tools_are_shown(self) -> None:
        parameters = {"type": "object", "properties": {"key_one": {"type": "string"}}}
        function = {"name": _TOOL, "description": "Probes.", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        text = self._try([_user()], tools=tools, add_generation_prompt=True)
        if text is None or _TOOL not in text:
            raise _NoFormat("the chat template does not tell the model about tools")

    def _plain_answer(self) -> tuple[str, str]:
        """The texts that the template puts before and after the text of an answer."""
        text = self._try([_user(), {"role": "assistant", "content": _ANSWERED}])
        begin = -1 if text is None else text.rfind(_ANSWERED)
        if text is None or begin < 0:
            raise _NoFormat("the chat template does not write answers")
        lead = text[self._prompt_end(text) : begin]
        return lead, text[begin + len(_ANSWERED) :]

    def _on_channels(self, lead: str, end: str) -> CallFormat | None:
        """The format of an answer of messages on channels; None if it is none.

        The model writes the recipient behind the channel, where templates may write it before.
        """
        tokens = sorted(self._special, key=len, reverse=True)
        token = "|".join(map(re.escape, tokens))
        plain = re.fullmatch(rf"({token})(\w+)({token})", lead.strip())
        if plain is None:
            return None
        channel, _, message = plain.groups()
        for as_text in (False, True):
            text = self._try([_user(), _calling(None, as_text, 1)])
            text = text or self._try([_user(), _calling("", as_text, 1)])
            spot = None if text is None else locate(text, 0, *_FIRST)
            if text is None or spot is None or not isinstance(spot.body, NamedBody):
                continue
            before = text[: spot.begin]
            found = re.search(rf"(?P<start>{token})\w*\s(?P<to>to=[\w.]*)\Z", before)
            how = re.fullmatch(
                rf"\s*{re.escape(channel)}(\w+)\s*(?:{token})?\s*(\w*){re.escape(message)}",
                spot.body.middle,
            )
            if found is None or how is None:
                continue
            asked = text[text.find(_ASKED) + len(_ASKED) :]
            ends = [re.match(token, tail.lstrip()) for tail in (text[spot.end :], end, asked)]
            channels = Channels(
                found["start"],
                channel,
                message,
                tuple(dict.fromkeys(each[0] for each in ends if each is not None)),
                found["to"],
                self._thought_channel(channel, message),
            )
            body = NamedBody(f" {how[2]}{message}")
            opened = f"{channel}{how[1]} {found['to']}"
            made = CallFormat(body, call_open=opened, several=False, channels=channels)
            content = None if self._try([_user(), _calling(None, as_text, 1)]) else ""
            return replace(made, arguments_as_text=as_text, no_content=content)
        return None

    def _thought_channel(self, channel: str, message: str) -> str:
        """The channel on which the template writes reasoning; "" if it writes none."""
        for key in (REASONING_KEY, "thinking", "reasoning"):
            answer = {"role": "assistant", "content": _ANSWERED, key: _THOUGHT}
            text = self._try([_user(), answer]) or ""
            found = re.search(rf"{re.escape(channel)}(\w+){re.escape(message)}{_THOUGHT}", text)
            if found is not None:
                return found[1]
        return ""

    def _prompt_end(self, text: str) -> int:
        """Where the prompt ends in the text of a conversation."""
        prompt = self._try([_user()], add_generation_prompt=True) or ""
        return common(prompt, text)

    def _answer(
        self, content: str | None, as_text: bool, lead: str
    ) -> tuple[str, int, Sequence[Spot]] | None:
        """An answer with two calls, else with one: the text, where the answer begins, the calls."""
        for count in (2, 1):
            text = self._try([_user(), _calling(content, as_text, count, self._ids)])
            if text is None:
                continue
            begin = self._prompt_end(text)
            if content:
                if (found := text.rfind(content)) < 0:
                    return None
                begin = found + len(content)
            elif text.startswith(lead, begin):
                begin += len(lead)
            calls: list[Spot] = []
            for name, arguments in _CALLS[:count]:
                spot = locate(text, calls[-1].end if calls else begin, name, arguments)
                if spot is None:
                    break
                calls.append(spot)
            if len(calls) == count:
                return text, begin, calls
        return None

    def _tail(self, tail: str, end: str) -> str:
        """The text after the last call, without the text that ends every answer."""
        if end and tail.endswith(end):
            return tail[: -len(end)]
        ends = [
            tail.find(token) for token in self._special if token in end or token == tail.strip()
        ]
        return tail[: min((at for at in ends if at >= 0), default=len(tail))]

    def _finished(self, made: CallFormat, as_text: bool, lead: str) -> CallFormat:
        """The format with the content that the template accepts for an answer without text."""
        for content in (None, ""):
            spots = self._answer(content, as_text, lead)
            if spots is not None and "None" not in spots[0][spots[1] : spots[2][0].begin]:
                break
        return CallFormat(**{**vars(made), "arguments_as_text": as_text, "no_content": content})

    def _try(self, messages: Sequence[MessageDict], **options: Any) -> str | None:
        try:
            return self._render(messages, **options)
        except RequestError as error:
            if isinstance(error.__cause__, TemplateLimitError):
                raise _NoFormat("the chat template takes too long or too much memory") from None
            return None


def _user() -> MessageDict:
    return {"role": "user", "content": _ASKED}


def _calling(content: str | None, as_text: bool, count: int, ids: str = "") -> MessageDict:
    calls = [
        {
            "id": f"{ids}{_CALLS[index][0]}{_NUMBERED}" if ids else f"probe000{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given) if as_text else dict(given)},
        }
        for index, (name, given) in enumerate(_CALLS[:count])
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@dataclass(frozen=True)
class Spot:
    """A call in a text: where its body begins and ends, and the body's shape."""

    begin: int
    end: int
    body: ObjectBody | NamedBody | TaggedBody


def locate(text: str, start: int, name: str, arguments: Mapping[str, Any]) -> Spot | None:
    """The call of this name after a position; None if it has no known shape."""
    at = text.find(name, start)
    if at < 0:
        return None
    return (
        _object(text, start, at, name, arguments)
        or _named(text, at, name, arguments)
        or _tagged(text, at, name, arguments)
    )


def assemble(text: str, begin: int, calls: Sequence[Spot], tail: str) -> CallFormat | None:
    """The format of an answer that begins at a position.

    Args:
        calls: one or two of them.
        tail: what follows the last one.

    Returns:
        None if two calls are written in different ways.
    """
    first = calls[0]
    before = text[begin : first.begin]
    if len(calls) == 1:
        opened = before.lstrip()
        return CallFormat(first.body, call_open=opened, call_close=tail.rstrip(), several=False)
    second = calls[1]
    if _shape(first.body) != _shape(second.body):
        return None
    between = text[first.end : second.begin]
    call_open = _opening(before, between)
    between = between[: len(between) - len(call_open)]
    call_close = between[: common(between, tail)]
    return CallFormat(
        first.body,
        section_open=before[: len(before) - len(call_open)].lstrip(),
        call_open=call_open,
        call_close=call_close,
        separator=between[len(call_close) :],
        section_close=tail[len(call_close) :].rstrip(),
    )


def _shape(body: ObjectBody | NamedBody | TaggedBody) -> object:
    return (body.name, body.arguments) if isinstance(body, ObjectBody) else body


def _object(text: str, start: int, at: int, name: str, arguments: Mapping[str, Any]) -> Spot | None:
    """The outermost JSON object that holds both."""
    for begin in _all(text, "{", start, at):
        value, end = _decoded(text, begin)
        if end <= at:
            continue
        name_path = _path(value, lambda found: found == name)
        path = _path(value, lambda found: _as_object(found) == arguments)
        if name_path is not None and path is not None:
            return Spot(begin, end, ObjectBody(name_path, path, text[begin:end]))
    return None


def _named(text: str, at: int, name: str, arguments: Mapping[str, Any]) -> Spot | None:
    after = at + len(name)
    for begin in _all(text, "{", after, len(text)):
        value, end = _decoded(text, begin)
        if value == arguments:
            return Spot(at, end, NamedBody(text[after:begin]))
    return None


def _tagged(text: str, at: int, name: str, arguments: Mapping[str, Any]) -> Spot | None:
    """Keys and values in the order of the arguments: a string, an object, a number."""
    gaps, after = [], at + len(name)
    for key, value in arguments.items():
        begin = text.find(key, after)
        if begin < 0:
            return None
        span = _value(text, begin + len(key), value)
        if span is None:
            return None
        gaps.append((text[after:begin], text[begin + len(key) : span[0]]))
        after = span[1]
    (first, key_close), (second, _), (third, _) = gaps
    opened = _opening(first, second)
    close = second[: len(second) - len(opened)]
    if second != third or not (opened.strip() and key_close.strip() and close.strip()):
        return None
    for ending in (close, close.rstrip()):
        if text.startswith(ending, after):
            after += len(ending)
            break
    return Spot(at, after, TaggedBody(first[: len(first) - len(opened)], opened, key_close, close))


def _value(text: str, start: int, value: object) -> tuple[int, int] | None:
    """Where a value stands, as text or as JSON."""
    if isinstance(value, dict):
        for begin in _all(text, "{", start, len(text)):
            found, end = _decoded(text, begin)
            if found == value:
                return begin, end
        return None
    begin = text.find(str(value), start)
    return None if begin < 0 else (begin, begin + len(str(value)))


def _opening(one: str, other: str) -> str:
    """The opening literal that both texts end with."""
    return one[len(one) - common(one[::-1], other[::-1]) :].lstrip(_CLOSING)


def common(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _all(text: str, character: str, start: int, end: int) -> Iterator[int]:
    while (start := text.find(character, start, end)) >= 0:
        yield start
        start += 1


def _decoded(text: str, begin: int) -> tuple[object, int]:
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, -1


def _as_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _path(value: object, wanted: Any) -> KeyPath | None:
    if wanted(value):
        return ()
    for key, inner in value.items() if isinstance(value, dict) else ():
        if (below := _path(inner, wanted)) is not None:
            return (key, *below)
    return None
