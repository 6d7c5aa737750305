"""Calls and reasoning as messages on channels (harmony)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.errors import RequestError
from moe.sampling.params import Structure
from moe.server.answers import AnswerParser, EmittedCall
from moe.text.tool_calls.channels import ChannelParser
from moe.text.tool_calls.format import CallFormat, Channels, NamedBody
from moe.text.tool_calls.grammar import CallGrammar
from moe.text.tool_calls.parser import ParsedCall
from moe.text.tool_calls.probe import probe_tools
from tests.moe.text.tool_calls.templates import HARMONY
from tests.moe.text.tool_calls.test_calls import renderer

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
THINKING = HARMONY.replace(
    "{{- '<|start|>assistant<|channel|>final",
    "{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking }}"
    "{{- '<|end|>' }}{%- endif %}{{- '<|start|>assistant<|channel|>final",
)
TOOLS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "now": {}}
CHANNELS = Channels(
    "<|start|>", "<|channel|>", "<|message|>", ("<|call|>", "<|end|>"), "to=functions.", "analysis"
)


def found(template: str) -> CallFormat:
    support = probe_tools(renderer(template), SPECIAL)
    assert support.format is not None, support.reason
    return support.format


def test_the_format_is_found() -> None:
    format = found(THINKING)
    assert format.channels == CHANNELS
    assert format.call_open == "<|channel|>commentary to=functions."
    assert format.body == NamedBody(" json<|message|>")
    assert format.as_dict()["shape"] == "a message on a channel"
    assert found(HARMONY).channels is not None


def read(text: str, cuts: list[int], most: int | None = None) -> tuple[str, list[object]]:
    """Reasoning and parts of an answer that comes in pieces; texts joined."""
    parser = ChannelParser(CHANNELS, TOOLS, most)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [parser.push(text[a:b]) for a, b in pairwise(edges)]
    pieces.append(parser.finish())
    parts: list[object] = []
    for part in (part for _, some in pieces for part in some):
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return "".join(reasoning for reasoning, _ in pieces), parts


THOUGHT = "<|channel|>analysis<|message|>Let me look.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'
WEATHER = ParsedCall("weather", '{"city": "Bern"}')
ANSWERS = {
    "a call": (THOUGHT + "<|start|>assistant" + CALL, "Let me look.", [WEATHER]),
    "the recipient before the channel": (
        " to=functions.weather<|channel|>commentary json<|message|>" + '{"city": "Bern"}<|call|>',
        "",
        [WEATHER],
    ),
    "an answer": (
        THOUGHT + "<|start|>assistant<|channel|>final<|message|>It rains.",
        "Let me look.",
        ["It rains."],
    ),
    "a preamble": (
        f"<|channel|>commentary<|message|>Soon.<|end|><|start|>assistant{CALL}",
        "",
        ["Soon.", WEATHER],
    ),
    "another tool": (CALL.replace("weather", "other"), "", ['{"city": "Bern"}']),
    "damaged": (CALL[:-1], "", ['{"city": "Bern"']),
    "no channel": ("It rains.", "", ["It rains."]),
    "two calls": (f"{CALL}<|call|><|start|>assistant{CALL}", "", [WEATHER, WEATHER]),
}


@pytest.mark.parametrize("what", ANSWERS)
@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_answers_are_read_however_they_come(what: str, cuts: list[int]) -> None:
    text, reasoning, parts = ANSWERS[what]
    assert read(text, cuts) == (reasoning, parts)


def test_most_calls() -> None:
    assert read(ANSWERS["two calls"][0], [], most=1) == ("", [WEATHER])


def test_an_answer_in_tokens() -> None:
    parser = AnswerParser(ChannelParser(CHANNELS, TOOLS), None)
    tokens = ["<|channel|>", "analysis", "<|message|>", "Let", " me", "<|end|>", "<|start|>"]
    tokens += ["assistant", "<|channel|>", "commentary to=functions.now json", "<|message|>", "{}"]
    pieces = [parser.take(token, None) for token in tokens]
    pieces.append(parser.take("", "stop"))
    assert "".join(piece.reasoning for piece in pieces) == "Let me"
    (call,) = [part for piece in pieces for part in piece.parts]
    assert isinstance(call, EmittedCall)
    assert (call.name, call.arguments) == ("now", "{}")
    assert pieces[-1].finish_reason == "tool_calls"


def test_grammars() -> None:
    grammar = CallGrammar(found(THINKING), {"<|channel|>": 7, "<|message|>": 8})
    text = grammar.calls({"now": {"type": "object"}}, several=True)
    assert '<[7]> "commentary to=functions." body' in text
    assert 'tool0: "now" " json" <[8]> %json' in text
    with pytest.raises(RequestError, match="messages on channels"):
        grammar.text_or_calls({"now": {}}, several=True)
    lead = "<|channel|>final<|message|>"
    text = grammar.answer_or_calls(Structure.choice(["yes"]), lead, {"now": {}}, several=True)
    assert text.startswith('start: final | call\nfinal: <[7]> "final" <[8]> form\nform: "yes"\n')
