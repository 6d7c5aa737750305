"""Finds where calls stand in a text, and the literals around them.

`locate` finds a call whose name, keys and values are known, in one of the shapes of
`moe.text.tool_calls.format`; `assemble` makes a `CallFormat` of the text around one or two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.text.tool_calls.format import (
    Body,
    BracedBody,
    CallFormat,
    KeyPath,
    NamedBody,
    ObjectBody,
    TaggedBody,
)
from moe.text.tool_calls.notation import from_notation
from moe.text.tool_calls.scanner import StreamScanner

_CLOSING = " \t\r\n>]})|\uff5c\"'`,;:"  # no opening literal begins with one of these
_IN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_IN_ANGLES = re.compile(r"<[^<>\s]*\Z")
_NUMBERED = re.compile(r"(?P<before>[^\w\s{]{1,8})(?P<number>\d{1,4})(?P<behind>\D.*)", re.DOTALL)


@dataclass(frozen=True)
class Spot:
    """A call in a text: where its body begins and ends, and the body's shape."""

    begin: int
    end: int
    body: Body


def locate(text: str, start: int, name: str, arguments: Mapping[str, Any]) -> Spot | None:
    """The call of this name after a position; None if it has no known shape.

    Args:
        arguments: a string, an object, a number and another string, in this order.
    """
    at = text.find(name, start)
    if at < 0:
        return None
    return (
        _object(text, start, at, name, arguments)
        or _named(text, at, name, arguments)
        or _braced(text, at, name, arguments)
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
    body = first.body
    if _shape(body) != _shape(second.body):
        numbered = _numbered(body, second.body)
        if numbered is None:
            return None
        body = numbered
    if isinstance(body, ObjectBody) and isinstance(second.body, ObjectBody):
        varying = tuple(_varying(json.loads(body.sample), json.loads(second.body.sample), body))
        body = replace(body, varying=varying)
    between = text[first.end : second.begin]
    call_open = _opening(before, between)
    between = between[: len(between) - len(call_open)]
    call_close = between[: departs(tail, between)]
    return CallFormat(
        body,
        section_open=before[: len(before) - len(call_open)].lstrip(),
        call_open=call_open,
        call_close=call_close,
        separator=between[len(call_close) :],
        section_close=tail[len(call_close) :].rstrip(),
    )


def common(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def departs(one: str, other: str) -> int:
    """Find where the second text departs from the first: never inside a tag, as some begin
    alike."""
    end = common(one, other)
    unfinished = _IN_TAG.search(other, 0, end)
    return unfinished.start() if unfinished else end


def _varying(one: Any, other: Any, body: ObjectBody, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Keys of texts and numbers that differ in two samples, but for names and arguments."""
    if path in (body.name, body.arguments):
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() & other.keys():
            yield from _varying(one[key], other[key], body, (*path, key))
    elif one != other:
        yield path


def _shape(body: Body) -> object:
    return (body.name, body.arguments) if isinstance(body, ObjectBody) else body


def _numbered(one: Body, other: Body) -> NamedBody | None:
    """The body of calls whose names are followed by their number, as templates count them."""
    if not isinstance(one, NamedBody) or not isinstance(other, NamedBody):
        return None
    first, second = map(_NUMBERED.fullmatch, (one.middle, other.middle))
    if first is None or second is None or int(first["number"]) + 1 != int(second["number"]):
        return None
    if (first["before"], first["behind"]) != (second["before"], second["behind"]):
        return None
    return replace(one, middle=first["behind"], number=first["before"])


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


def _braced(text: str, at: int, name: str, arguments: Mapping[str, Any]) -> Spot | None:
    """An object whose strings stand between quotes of the template's own."""
    after, (key, value) = at + len(name), next(iter(arguments.items()))
    found = re.compile(rf"{key}\S{{0,16}}?\s*:\s*(\S{{1,32}}?){value}\1").search(text, after)
    begin = text.find("{", after)
    if found is None or not after <= begin < found.start():
        return None
    scanner = StreamScanner()
    scanner.text, scanner.ended = text, True
    reading = scanner.braced(begin, found[1])
    try:
        next(reading)
    except StopIteration as read:
        if read.value is not None and from_notation(read.value[0], found[1]) == arguments:
            keys = sorted(arguments, key=text[: read.value[1]].rfind)
            is_sorted = keys == sorted(arguments)
            return Spot(at, read.value[1], BracedBody(text[after:begin], found[1], is_sorted))
    return None


def _tagged(text: str, at: int, name: str, arguments: Mapping[str, Any]) -> Spot | None:
    """Keys and values in the order of the arguments: a string, an object, a number, a string."""
    opens, closes, after = [], [], at + len(name)
    for key, value in arguments.items():
        begin = text.find(key, after)
        span = None if begin < 0 else _value(text, begin + len(key), value)
        if span is None:
            return None
        opens.append(text[after:begin])
        closes.append(text[begin + len(key) : span[0]])
        after = span[1]
    # In front of the strings, and of the others.
    opened = _opening(opens[0], opens[3])
    close = opens[3][: len(opens[3]) - len(opened)]
    key_close, marked_close = closes[0], closes[1]
    if opens[1] != opens[2] or closes[2:] != [marked_close, key_close]:
        return None
    marked = opens[1].removeprefix(close), marked_close
    if not (opened.strip() and key_close.strip() and close.strip()) or opens[1] == marked[0]:
        return None
    for ending in (close, close.rstrip()):
        if text.startswith(ending, after):
            after += len(ending)
            break
    middle = opens[0][: len(opens[0]) - len(opened)]
    told = None if marked == (opened, key_close) else marked
    return Spot(at, after, TaggedBody(middle, opened, key_close, close, told))


def _value(text: str, start: int, value: object) -> tuple[int, int] | None:
    """Find a value in the text, as JSON or as Python writes it."""
    if isinstance(value, dict):
        for begin in _all(text, "{", start, len(text)):
            found, end = _decoded(text, begin)
            if found == value:
                return begin, end
    begin = text.find(str(value), start)
    return None if begin < 0 else (begin, begin + len(str(value)))


def _opening(one: str, other: str) -> str:
    """The opening literal that both texts end with, which does not begin inside a tag."""
    opening = one[len(one) - common(one[::-1], other[::-1]) :]
    if _IN_ANGLES.search(one, 0, len(one) - len(opening)):
        opening = opening.partition(">")[2] or opening
    return opening.lstrip(_CLOSING)


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
