"""Calls out of answers: what templates write is read back, however it is cut up."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe.errors import RequestError
from moe.text.chat import with_calls
from moe.text.tool_calls import parser
from moe.text.tool_calls import scanner as reader
from moe.text.tool_calls.format import CallFormat
from moe.text.tool_calls.parser import CallParser, ParsedCall
from moe.text.tool_calls.probe import ToolSupport, probe_tools
from moe.text.tool_calls.spots import departs
from tests.moe.text.test_prompts import make_tokenizer
from tests.moe.text.tool_calls.templates import (
    BRACED,
    ENDS,
    JSON_SHAPED,
    KNOWN,
    SPECIAL,
    TAGGED,
    UNKNOWN,
)

ASKED = {"role": "user", "content": "what?"}


def renderer(template: str) -> Callable[..., str]:
    tokenizer = make_tokenizer(template)

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:
            raise RequestError(str(error)) from error

    return render


@cache
def probed(name: str) -> tuple[Callable[..., str], ToolSupport]:
    render = renderer(KNOWN[name])
    return render, probe_tools(render, SPECIAL, ENDS)


def format_of(name: str) -> CallFormat:
    format = probed(name)[1].format
    assert format is not None
    return format


def written(name: str, content: str | None, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What a model would have generated, from the template's rendering of it as history."""
    render, format = probed(name)[0], format_of(name)
    made = [
        {
            "id": f"{index:09}",
            "type": "function",
            "function": {
                "name": tool,
                "arguments": json.dumps(given) if format.arguments_as_text else given,
            },
        }
        for index, (tool, given) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content or format.no_content, "tool_calls": made}
    text = render(with_calls([ASKED, answer], format))
    prompt = render([ASKED], add_generation_prompt=True)
    answered = text[departs(prompt, text) :]
    for begin in ("\n<think></think>", "<think>\n\n</think>\n\n", "<|turn>assistant\n"):
        answered = answered.removeprefix(begin)
    for end in ENDS:
        answered = answered.rstrip("\n").removesuffix(end)
    return answered


def read(parser: CallParser, pieces: list[str]) -> tuple[str, list[ParsedCall], list[str]]:
    """Content, calls, and the order in which they came."""
    out = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    content = "".join(item for item in out if isinstance(item, str))
    return (
        content,
        [item for item in out if isinstance(item, ParsedCall)],
        [type(i).__name__ for i in out],
    )


def cut(text: str, places: list[int]) -> list[str]:
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(at)]


names = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)
DELIMITERS = sorted(
    {word for name in KNOWN for literal in format_of(name).literals for word in literal.split()}
)
printable = st.just(" ") | st.characters(exclude_categories=["C", "Z"])  # as str.isprintable
texts = st.one_of(
    st.text(printable, max_size=20),
    st.sampled_from([*DELIMITERS, '"', "\\", '\\"', "}", "{", "\n", "你好", "true", "7"]),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(names, st.dictionaries(texts.filter(bool), values, max_size=4)),
    min_size=1,
    max_size=3,
)
places = st.lists(st.integers(0, 10_000), max_size=20)


@pytest.mark.parametrize("name", JSON_SHAPED)
@given(calls=calls, content=st.sampled_from([None, "Let me see.", "Ok: {"]), places=places)
def test_what_a_template_writes_as_json_is_read_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], content: str | None, places: list[int]
) -> None:
    format = format_of(name)
    if not format.several:
        calls = calls[:1]
    if name in (
        "mistral",
        "llama",
        "deepseek",
        "alike",
        "last-is-otherwise",
    ):  # these write either text or calls
        content = None
    text = written(name, content, calls)
    tools: dict[str, Any] = {tool: {} for tool, _ in calls}
    got, found, order = read(CallParser(format, tools), cut(text, places))
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert got == (content or "")
    assert (got, found) == read(CallParser(format, tools), [text])[:2]
    assert (got, found) == read(CallParser(format, tools), list(text))[:2]
    assert "".join(kind[0] for kind in order).lstrip("s") == "P" * len(calls)


def schema(value: object) -> dict[str, str]:
    kinds: dict[type, str] = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
    kinds |= {list: "array", dict: "object"}
    return {"type": kinds[type(value)]}


PLAIN = st.text(printable.filter(lambda char: char not in "<>"), max_size=20)
tagged_calls = st.lists(
    st.tuples(
        names,
        st.dictionaries(
            names, st.none() | st.booleans() | st.integers() | texts | PLAIN | st.lists(PLAIN)
        ),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call[0],
)


@pytest.mark.parametrize("name", TAGGED)
@given(calls=tagged_calls, content=st.sampled_from([None, "Let me see."]), places=places)
@example(calls=[("f", {"code": "a </parameter> b\n  c"}), ("g", {})], content=None, places=[5])
def test_what_a_template_writes_in_tags_is_read_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], content: str | None, places: list[int]
) -> None:
    format = format_of(name)
    text = written(name, content, calls)
    tools: dict[str, Any] = {
        tool: {"properties": {key: schema(value) for key, value in given.items()}}
        for tool, given in calls
    }
    got, found, _ = read(CallParser(format, tools), cut(text, places))
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert got.strip() == (content or "")
    assert (got, found) == read(CallParser(format, tools), list(text))[:2]


WORDS = st.text("abc {}[],:\"'\\\n<|", max_size=12).filter(
    lambda t: "<<" not in t and t[-1:] != "<"
)
noted_calls = st.lists(
    st.tuples(
        names,
        st.dictionaries(
            names.filter(lambda n: not n[:1].isdigit()),
            st.recursive(
                st.none() | st.booleans() | st.integers() | WORDS,
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
                max_leaves=6,
            ),
            max_size=3,
        ),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", BRACED)
@given(calls=noted_calls, content=st.sampled_from([None, "Let me see."]), places=places)
def test_what_a_template_writes_in_a_notation_of_its_own_is_read_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], content: str | None, places: list[int]
) -> None:
    format = format_of(name)
    text = written(name, content, calls)
    tools: dict[str, Any] = {tool: {} for tool, _ in calls}
    got, found, _ = read(CallParser(format, tools), cut(text, places))
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert got == (content or "")
    assert (got, found) == read(CallParser(format, tools), list(text))[:2]


@pytest.mark.parametrize("name", KNOWN)
@given(data=st.data(), places=places)
def test_any_text_is_read_the_same_in_any_pieces(
    name: str, data: st.DataObject, places: list[int]
) -> None:
    """And what holds no call comes out as it went in. Also where looking into failed calls ends."""
    format = format_of(name)
    again = data.draw(st.sampled_from([0, 1, parser.AGAIN]))
    words = [w for literal in format.literals for w in (literal, *literal.split()) if w]
    fragments = st.sampled_from(
        [*words, '{"name": "f", ', '"arguments": {', '"parameters": {"a": "', '"}', "}", "f", " "]
        + ["\n", "Hi", '{"a": 1}', "a", "\\", '"', "]", "["]
    )
    text = "".join(data.draw(st.lists(fragments, max_size=25)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "AGAIN", again)
        one = read(CallParser(format, {"f": {}}), cut(text, places))
        assert one[:2] == read(CallParser(format, {"f": {}}), [text])[:2]
        assert one[:2] == read(CallParser(format, {"f": {}}), list(text))[:2]
    if not one[1]:
        assert one[0] == text


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_nothing_can_be_derived_the_reason_is_said(name: str) -> None:
    template, reason = UNKNOWN[name]
    support = probe_tools(renderer(template), SPECIAL, ENDS)
    assert support.format is None
    assert reason in support.reason
    assert support.as_dict() == {"enabled": False, "why": support.reason, "format": None}


HERMES: Any = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>nothing</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1e999}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": ["f"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001,
        '<tool_call>\n{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}\n</tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(CallParser(format_of("hermes"), {"f": {}}), pieces)[:2] == (text, [])
    after = read(CallParser(format_of("hermes"), {"f": {}}), [text + " and " + HERMES])
    if not text.endswith(("}", "1")):
        assert after[1] == [ParsedCall("f", '{"a": 1}')]


def test_text_comes_as_soon_as_it_cannot_be_the_beginning_of_a_call() -> None:
    parser = CallParser(format_of("hermes"), {"f": {}})
    pieces = ["I look", " <tool", "s> it", " up\n", "\n<tool_call>", HERMES[11:], "\n"]
    assert [parser.push(piece) for piece in pieces] == [
        ["I look"],
        [],
        [" <tools> it"],
        [" up"],
        [],
        [ParsedCall("f", '{"a": 1}')],
        [],
    ]
    assert parser.finish() == []


def test_arguments_may_be_json_in_json_and_closings_may_lack() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}'
    assert read(CallParser(format_of("hermes"), {"f": {}}), [text])[1] == [
        ParsedCall("f", '{"a": 1}')
    ]


def test_one_call_only_where_one_is_wanted() -> None:
    for text in (HERMES * 3, HERMES + " and so on"):
        parser = CallParser(format_of("hermes"), {"f": {}}, most=1)
        assert read(parser, list("Ok. " + text))[:2] == ("Ok.", [ParsedCall("f", '{"a": 1}')])


def test_a_call_without_delimiters_is_one_at_the_start_only() -> None:
    bare = '{"name": "f", "parameters": {"a": 1}}'
    parse = lambda text: read(CallParser(format_of("llama"), {"f": {}}), list(text))[:2]  # noqa: E731
    assert parse(f" {bare}\n") == ("", [ParsedCall("f", '{"a": 1}')])
    assert parse(f"It is {bare}") == (f"It is {bare}", [])
    assert parse('{"name": "x", "parameters": {}} it is') == (
        '{"name": "x", "parameters": {}} it is',
        [],
    )


def test_long_arguments_take_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that are looked at, which could be quadratic in the length."""
    looked_at = 0

    class Counting:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.pattern = pattern

        def search(self, text: str, at: int) -> re.Match[str] | None:
            nonlocal looked_at
            found = self.pattern.search(text, at)
            looked_at += (found.end() if found else len(text)) - at
            return found

    for name in ("_INSIDE", "_OUTSIDE"):
        monkeypatch.setattr(reader, name, Counting(getattr(reader, name)))
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "' + "x" * 20_000 + '"}}\n</tool_call>'
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    assert len(read(CallParser(format_of("hermes"), {"f": {}}), pieces)[1]) == 1
    assert 20_000 < looked_at < 2 * len(text)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("ended", [False, True])
def test_failed_calls_take_time_in_proportion(
    name: str, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opening here begins a call that only fails where the answer ends, or far away."""
    looked_at = 0

    def counting(scan: Callable[..., Any]) -> Callable[..., Any]:
        def counted(scanner: reader.StreamScanner, at: int, *more: Any) -> reader.Scan[Any]:
            nonlocal looked_at
            found = yield from scan(scanner, at, *more)
            end = found[1] if isinstance(found, tuple) else found
            if end is not None or more or scanner.text.startswith("{", at):
                looked_at += (len(scanner.text) if end is None else end) - at
            return found

        return counted

    for method in ("json_object", "until"):
        scan = getattr(reader.StreamScanner, method)
        monkeypatch.setattr(reader.StreamScanner, method, counting(scan))
    format = format_of(name)
    call = written(name, None, [("f", {"a": "1"})]).strip()
    begun = call[: call.index("1")]  # a value is open
    for unit in (begun, begun.rstrip('"'), call + begun, format.section_open + format.call_open):
        text = unit * 300 + ("}" * 900 if ended else "")
        looked_at = 0
        read(CallParser(format, {"f": {}}), [text])
        assert looked_at <= 40 * len(text)


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek"])
def test_a_call_behind_a_few_that_failed_is_found(name: str) -> None:
    call = written(name, None, [("f", {"a": "1"})]).strip()
    begun = call[: call.index("1")] * 3
    parsed = read(CallParser(format_of(name), {"f": {}}), list(begun + call))
    assert parsed[1][-1] == ParsedCall("f", '{"a": "1"}')


@pytest.mark.parametrize(
    ("name", "numbers"), [("kimi", [0, 1, 2]), ("counts", [1, 2, 1]), ("counts-on", [0, 1, 2])]
)
def test_results_have_the_ids_that_the_template_gives_calls(name: str, numbers: list[int]) -> None:
    render, format = probed(name)[0], format_of(name)

    def turn(*ids: str) -> list[dict[str, Any]]:
        calls = [{"id": i, "function": {"name": "now", "arguments": "{}"}} for i in ids]
        results = [{"role": "tool", "tool_call_id": i, "content": "12"} for i in ids]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]

    made = with_calls([ASKED, *turn("a", "b"), *turn("c")], format)
    told = [m["tool_call_id"] for m in made if m["role"] == "tool"]
    mark = getattr(format.body, "number", "")
    assert told == [f"{format.ids}now{mark}{number}" for number in numbers]
    text = render(made)
    assert all(text.count(each) >= told.count(each) for each in told)


def test_ids_that_have_names_and_numbers() -> None:
    """Such a template writes the ids of calls only; clients know other ids."""
    format = format_of("kimi")
    assert format.ids == "functions."
    assert format.call_open == "<|tool_call_begin|>functions."
    assert format.section_open == "<|tool_calls_section_begin|>"

    def turn(*ids: str) -> list[dict[str, Any]]:
        calls = [{"id": i, "function": {"name": "now", "arguments": "{}"}} for i in ids]
        results = [{"role": "tool", "tool_call_id": i, "content": "12"} for i in reversed(ids)]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]

    made = with_calls([ASKED, *turn("a", "b"), *turn("c")], format)
    assert [c["id"] for m in made for c in m.get("tool_calls", ())] == [
        f"functions.now:{number}" for number in range(3)
    ]
    told = [m["tool_call_id"] for m in made if m["role"] == "tool"]
    assert told == ["functions.now:1", "functions.now:0", "functions.now:2"]
