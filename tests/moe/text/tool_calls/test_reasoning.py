"""Reasoning out of answers: found by probing, and read the same however an answer is cut up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.errors import RequestError
from moe.helpers import HelperLimitError
from moe.sampling.params import Structure
from moe.text.chat import with_reasoning
from moe.text.tool_calls.grammar import after_reasoning
from moe.text.tool_calls.reasoning import (
    ReasoningFormat,
    ReasoningParser,
    probe_reasoning,
)
from tests.moe.text.tool_calls.reasoning_templates import ANALYSIS, FINAL, FOUND, NOT_FOUND
from tests.moe.text.tool_calls.test_call_grammar import takes
from tests.moe.text.tool_calls.test_calls import ASKED, cut, places, renderer

FORMAT = ReasoningFormat("<think>", "</think>")
CHANNELS = ReasoningFormat(ANALYSIS, f"<|end|><|start|>assistant{FINAL}", FINAL, "thinking")


def read(format: ReasoningFormat, pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(format, inside=inside)
    out = [*map(parser.push, pieces), parser.finish()]
    return "".join(thought for thought, _ in out), "".join(text for _, text in out)


@pytest.mark.parametrize("name", FOUND)
def test_what_stands_around_reasoning_is_found(name: str) -> None:
    template, (open, close, lead), key, inside = FOUND[name]
    render = renderer(template)
    support = probe_reasoning(render)
    assert support.format is not None
    found = support.format.key  # newer versions of transformers know several names themselves
    assert (found is None) == (key is None)
    assert support.format == ReasoningFormat(open, close, lead, found)
    assert support.as_dict()["enabled"] is True
    assert support.format.opened_by(render([ASKED], add_generation_prompt=True)) is inside


@pytest.mark.parametrize("name", NOT_FOUND)
def test_where_there_is_none_none_is_found(name: str) -> None:
    support = probe_reasoning(renderer(NOT_FOUND[name]))
    told: dict[str, Any] = {"switch": None, "takes_effort": False, "efforts": []}
    told |= {"enabled": False, "why": support.reason, "format": None}
    assert support.as_dict() == told
    assert "neither writes the reasoning" in support.reason


@pytest.mark.parametrize(
    ("template", "switch", "takes_effort"),
    [
        (FOUND["qwen3"][0], "enable_thinking", False),
        (FOUND["deepseek-3.1"][0], "thinking", False),
        (FOUND["r1"][0], None, False),
        (FOUND["harmony"][0], None, False),
        ("{{- reasoning_effort or 'medium' }}" + FOUND["harmony"][0], None, True),
        ("{{- raise_exception('no') }}", None, False),
    ],
)
def test_what_turns_reasoning_on_and_how_high_is_found(
    template: str, switch: str | None, takes_effort: bool
) -> None:
    support = probe_reasoning(renderer(template))
    assert (support.switch, support.takes_effort) == (switch, takes_effort)


def test_a_template_that_takes_too_long_is_asked_once() -> None:
    asked = []

    def render(*_: object, **__: object) -> str:
        asked.append(1)
        raise RequestError("late") from HelperLimitError()

    assert probe_reasoning(render).reason == "the chat template takes too long or too much memory"
    assert len(asked) == 1


@pytest.mark.parametrize("name", FOUND)
@given(
    thought=st.text(min_size=1, max_size=30).filter(lambda t: t.strip() == t),
    answer=st.text(max_size=30).filter(lambda t: t.strip() == t),
    places=places,
)
def test_what_a_template_writes_is_read_back(
    name: str, thought: str, answer: str, places: list[int]
) -> None:
    _, (open, close, lead), key, inside = FOUND[name]
    format = ReasoningFormat(open, close, lead, key)
    text = f"{'' if inside else open}\n{thought}\n{close}\n\n{answer}"
    for pieces in ([text], list(text), cut(text, places)):
        assert read(format, pieces, inside=inside) == (thought, answer)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("format", [FORMAT, CHANNELS])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), places=places)
def test_any_text_is_read_the_same_in_any_pieces(
    format: ReasoningFormat, inside: bool, data: st.DataObject, places: list[int]
) -> None:
    words = [format.open, format.close, format.open[:-2], format.close[:9], "<", "</", ">", "\n"]
    words += ["Hi", " ", "think", format.lead]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=20)))
    one = read(format, [text], inside=inside)
    assert one == read(format, cut(text, places), inside=inside)
    assert one == read(format, list(text), inside=inside)
    thought, answer = one
    if not inside and format.open not in text and not text.lstrip().startswith(format.lead or "\0"):
        assert (thought, answer) == ("", text)
    assert not answer or answer in text
    assert thought in text


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>I see</think>Yes", False, ("I see", "Yes")),
        ("\n<think>\n\n</think>\n\n Yes ", False, ("", "Yes ")),
        ("<think>I see", False, ("I see", "")),
        ("<think>I see </thin", False, ("I see </thin", "")),
        ("I see", True, ("I see", "")),
        ("<think>I see</think>", True, ("I see", "")),
        ("I </thinks> </think>Yes<think>a</think>", True, ("I </thinks>", "Yes<think>a</think>")),
        ("<thin", False, ("", "<thin")),
        ("Yes <think>a</think>", False, ("", "Yes <think>a</think>")),
        ("a</think>b", False, ("", "a</think>b")),
    ],
)
def test_reasoning_is_what_comes_first_and_is_closed_or_unfinished(
    text: str, inside: bool, expected: tuple[str, str]
) -> None:
    assert read(FORMAT, list(text), inside=inside) == expected


def test_channels() -> None:
    again = "<|end|><|start|>assistant"
    text = f"{ANALYSIS}I see{again}{FINAL}Yes"
    assert read(CHANNELS, list(text)) == ("I see", "Yes")
    assert read(CHANNELS, list(f"{FINAL}Yes")) == ("", "Yes")
    twice = f"{ANALYSIS}I see{again}{ANALYSIS}Hm{again}{FINAL}Yes"
    assert read(CHANNELS, list(twice)) == (f"I see{again}{ANALYSIS}Hm", "Yes")


def test_what_begins_an_answer_may_follow_reasoning() -> None:
    musing = ReasoningFormat("<A>", "</A>", "<B>")
    for text in ("<A>I see</A><B>Yes", "<A>I see</A>\n<B>Yes", "<A>I see</A>Yes"):
        for pieces in ([text], list(text)):
            assert read(musing, pieces) == ("I see", "Yes")
    grammar = after_reasoning(SCHEMA, musing, {}, inside=False).source
    assert takes(grammar, '<A>I see</A><B>{"a": 1}')
    assert takes(grammar, '<A>I see</A>{"a": 1}')
    assert takes(grammar, '<B>{"a": 1}')


def test_reasoning_comes_at_once() -> None:
    parser = ReasoningParser(FORMAT, inside=False)
    pieces = ["<th", "ink>", "\nI", " see", " </", "b>", "\n</think", ">\n\n", "Yes", "!"]
    assert [parser.push(piece) for piece in pieces] == [
        *[("", "")] * 2,
        *[("I", ""), (" see", ""), ("", ""), (" </b>", "")],
        *[("", "")] * 2,
        *[("", "Yes"), ("", "!")],
    ]


def test_long_reasoning_is_forgotten_as_it_comes() -> None:
    parser = ReasoningParser(FORMAT, inside=True)
    for _ in range(1000):
        parser.push("abcd <")
        assert len(parser._scanner.text) < 10


def test_earlier_reasoning_gets_the_name_that_the_template_reads() -> None:
    said = {"role": "assistant", "content": "Yes", "reasoning_content": "I see"}
    plain = {"role": "assistant", "content": "Yes"}
    assert with_reasoning([ASKED, said], CHANNELS.key) == [ASKED, plain | {"thinking": "I see"}]
    assert with_reasoning([ASKED, said], FORMAT.key) == [ASKED, plain]


SCHEMA = Structure.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (SCHEMA, '{"a": 1}', '{"a": "1"}'),
        (Structure.choice(["yes", "no"]), "no", "maybe"),
        (Structure.grammar('start: "x" body\nbody: "y"+\n'), "xyy", "y"),
    ],
)
def test_a_structure_may_come_behind_reasoning(structure: Structure, good: str, bad: str) -> None:
    grammar = after_reasoning(structure, FORMAT, {}, inside=False).source
    inside = after_reasoning(structure, FORMAT, {}, inside=True).source
    for thought in ("", "I </see {", "1\n\n2"):
        assert takes(grammar, f"<think>\n{thought}\n</think>\n\n{good}")
        assert takes(inside, f"{thought}</think>{good}")
        assert not takes(grammar, f"<think>{thought}</think>{bad}")
        assert not takes(inside, f"{thought}</think>{bad}")
        assert not takes(inside, f"{thought}</think>Well, {good}")
    assert takes(grammar, good)
    assert not takes(grammar, bad)
    assert not takes(grammar, "<think>" + good)
    assert not takes(inside, good)


def test_special_tokens_around_reasoning_are_tokens() -> None:
    special = {"<|channel|>": 1, "<|message|>": 2, "<|end|>": 3, "<|start|>": 4}
    made = after_reasoning(SCHEMA, CHANNELS, special, inside=False).source
    assert made.startswith(
        'start: BLANK? <[1]> "analysis" <[2]> thought BLANK? answer '
        '| <[1]> "final" <[2]> answer\n'
        'thought: THOUGHT <[3]> <[4]> "assistant" <[1]> "final" <[2]>\n'
    )


_ASKED_ONCE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "efforts", "nearest"),
    [
        ("", (), {"low": None, "max": None, "none": None}),
        (
            "{{ reasoning_effort or 'medium' }}",
            ("low", "medium", "high"),
            {"minimal": "low", "max": "high", "none": None},
        ),
        (
            "{% if reasoning_effort == 'max' %}Think hard.{% endif %}",
            ("max",),
            {"xhigh": "max", "high": None, "low": None},
        ),
        (
            "{% if reasoning_effort in ('low', 'high') %}{{ reasoning_effort }}"
            "{% elif reasoning_effort %}{{ raise_exception('no') }}{% endif %}",
            ("low", "high"),
            {"minimal": "low", "medium": None, "max": "high"},
        ),
        (
            "{{ 'off' if reasoning_effort == 'none' else '' }}",
            ("none",),
            {"none": "none", "high": None},
        ),
    ],
)
def test_efforts_are_those_that_change_the_prompt(
    template: str, efforts: tuple[str, ...], nearest: dict[str, str | None]
) -> None:
    support = probe_reasoning(renderer(_ASKED_ONCE + template))
    assert support.efforts == efforts
    assert {effort: support.nearest(effort) for effort in nearest} == nearest
