"""What templates of others write of calls is read back, or tools are refused with the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe.errors import RequestError
from moe.text.chat import with_calls
from moe.text.tool_calls.channels import ChannelParser
from moe.text.tool_calls.notation import from_notation
from moe.text.tool_calls.parser import CallParser, ParsedCall, from_text
from moe.text.tool_calls.probe import probe_tools
from moe.text.tool_calls.spots import departs
from tests.moe.text.tool_calls.templates import (
    HERMES,
    NUMBERED_BEFORE,
    PYTHONS_DICT,
    READS_EARLIER,
)
from tests.moe.text.tool_calls.test_calls import renderer
from tests.world.files import LLAMA_CPP

TOKEN = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\s]+\uff5c>|<\|[\w\"]+>|<[\w\"]+\|>|<seed:\w+>|</?s>"
)
TOKENS_OF_MISTRAL = re.compile(r"\[/?[A-Z_]{3,}\]|\]~b\]|\[e~\[|<SPECIAL_\d+>")
ANSWER = "the answer 42"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "about": {"type": "object"},
        "exact": {"type": "boolean"},
    },
}
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("forecast", {"city": "Ulm"})],
    [("forecast", {"days": 3, "city": "12"})],
    [("forecast", {"about": {"at": ["x", 1], "deep": {"y": None}}, "exact": False})],
    [("forecast", {})],
    [("forecast", {"city": "Neu Ulm"}), ("look_up", {"days": 0})],
]


def end_of(render: Any, special: list[str]) -> list[str]:
    """The token behind an answer, as a model's configuration names it."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = render([*turns, turns[0]])
    except RequestError:
        return ["</s>"]
    tail = text[text.find(ANSWER) + len(ANSWER) :]
    found = re.search("|".join(map(re.escape, sorted(special, key=len, reverse=True))), tail)
    return [found[0]] if found and not re.search("END_(TEXT|RESP)", found[0]) else ["</s>"]


@pytest.mark.parametrize(
    "path", sorted(LLAMA_CPP.glob("models/templates/*.jinja")), ids=lambda path: path.stem
)
def test_calls_of_real_templates(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    special = sorted({*TOKEN.findall(source), *TOKENS_OF_MISTRAL.findall(source), "<s>", "</s>"})
    render = renderer(source)
    ends = end_of(render, special)
    support = probe_tools(render, special, ends)
    format = support.format
    if format is None:
        assert re.search("does not|not read back|not understood", support.reason)
        return
    shown = "\0".join(format.literals)
    tools = {"forecast": SCHEMA, "look_up": SCHEMA}
    asked = {"role": "user", "content": "hello"}
    prompt = render([asked], add_generation_prompt=True)
    for calls in CALLS if format.several else CALLS[:-1]:
        made = [
            {
                "id": f"abcd{at:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for at, (name, given) in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": format.no_content, "tool_calls": made}
        text = render(with_calls([asked, answer], format))
        text = text[departs(prompt, text) :]
        text = text[: min((at for end in ends if (at := text.find(end)) >= 0), default=None)]
        for token in sorted(special, key=len, reverse=True):
            text = text if token in shown else text.replace(token, "")
        if format.channels is not None:
            channels = ChannelParser(format.channels, tools)
            parts = channels.push(text)[1] + channels.finish()[1]
        else:
            parser = CallParser(format, tools)
            parts = parser.push(text) + parser.finish()
        found = [part for part in parts if isinstance(part, ParsedCall)]
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls


READ = {
    "alike": "Cohere2MoE",
    "marked": "deepseek-ai-DeepSeek-V3.2",
    "marked too": "deepseek-ai-DeepSeek-V4",
    "a notation": "google-gemma-4-31B-it",
    "numbers": "moonshotai-Kimi-K2",
    "nano": "NVIDIA-Nemotron-Nano-v2",
    "nano 3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "suffixes": "tencent-Hy3",
    "python's": "openbmb-MiniCPM5-1B",
}


@pytest.mark.parametrize("kind", READ)
def test_real_templates_of_these_kinds_are_not_refused(kind: str) -> None:
    path = LLAMA_CPP / "models" / "templates" / f"{READ[kind]}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not there: `python -m tests.world.files` fetches it")
    source = path.read_text(encoding="utf-8")
    special = sorted({*TOKEN.findall(source), *TOKENS_OF_MISTRAL.findall(source)})
    render = renderer(source)
    assert probe_tools(render, special, end_of(render, special)).format is not None


def test_an_earlier_answer_may_need_a_text_where_the_last_one_needs_none() -> None:
    """As Qwen's QwQ: without it, the prompt behind the first result of a tool is refused."""
    format = probe_tools(renderer(READS_EARLIER), ["<|im_end|>"], ["<|im_end|>"]).format
    assert format is not None
    assert format.no_content == ""


@pytest.mark.parametrize(
    ("template", "several", "as_text"),
    [(NUMBERED_BEFORE, False, False), (PYTHONS_DICT, True, True), (HERMES, True, False)],
)
def test_what_reads_one_call_may_not_read_the_third(
    template: str, several: bool, as_text: bool
) -> None:
    """Two calls are what the probe has seen; Python's text of a dict has quotes of two kinds."""
    format = probe_tools(renderer(template), ["<|im_end|>"], ["<|im_end|>"]).format
    assert format is not None
    assert (format.several, format.arguments_as_text) == (several, as_text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{a:@x@,b:3}", {"a": "x", "b": 3}),
        ("{a:@x, {y}:z@}", {"a": "x, {y}:z"}),
        ("{a:[@x@,@y@], b:{c:true}}", {"a": ["x", "y"], "b": {"c": True}}),
        ("{a:None,b:False,c:null}", {"a": None, "b": False, "c": None}),
        ("{a:bare words}", {"a": "bare words"}),
        ('{"a": @x@, "b": "y"}', {"a": "x", "b": "y"}),
        ("{@a@:@x@}", {"a": "x"}),
        ("{true:1,3:2}", {"true": 1, "3": 2}),
        ("{}", {}),
        ("{a:@x}", None),
        ("{a:1", None),
        ("{a:12:30}", None),
        ("{a}", None),
    ],
)
def test_a_notation_like_json(text: str, value: object) -> None:
    for quote in ("<|q|>", "~~", "'"):
        assert from_notation(text.replace("@", quote), quote) == value


def test_values_as_python_writes_them() -> None:
    whole: dict[str, Any] = {}
    assert from_text("{'in': [True, None], 'a': 'b'}", {}, whole) == {"in": [True, None], "a": "b"}
    assert from_text("{'in': 1}", {"type": "string"}, whole) == "{'in': 1}"
    assert from_text("{'in': }", {}, whole) == "{'in': }"
    assert from_text("None", {}, whole) is None
    assert from_text("[1, ", {}, whole) == "[1, "
