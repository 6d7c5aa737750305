"""Answers read by the ``response_template`` that a tokenizer carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from moe.errors import RequestError
from moe.server.answers import EmittedCall
from moe.server.openai.request import ChatRequest
from moe.text.tokenizer import TextCodec, load_tokenizer
from moe.text.tool_calls.parser import ParsedCall
from moe.text.tool_calls.response_template import ResponseTemplate

TEMPLATE: dict[str, Any] = {
    "start_anchor": "a:",
    "fields": {
        "content": {},
        "thinking": {"open_pattern": r"<\|think\|>", "close": "<|/think|>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
TOOLS = {"weather": {"type": "object"}, "now": {}}
CALL = '<call>{"name": "weather", "arguments": {"city": "Ulm"}}</call>'
CALLED = ParsedCall("weather", '{"city": "Ulm"}')


def read(
    *pieces: str, prompt: str = "q a:", most: int | None = None, template: dict[str, Any] = TEMPLATE
) -> tuple[str, list[object]]:
    parser = ResponseTemplate(template).parser(prompt, TOOLS, most)
    found = [parser.push(piece) for piece in pieces] + [parser.finish()]
    parts: list[object] = []
    for part in (part for _, some in found for part in some):
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return "".join(thought for thought, _ in found), parts


def test_fields_are_found_however_the_text_is_cut() -> None:
    text = f"<|think|> so  it\nis <|/think|>\n\nHi, <b> \n {CALL} {CALL}  bye "
    whole = "so  it\nis", ["Hi, <b>", CALLED, CALLED, "bye"]
    assert read(text) == whole
    assert read(*text) == whole
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:]) == whole, cut


def test_the_prompt_may_have_begun_the_answer() -> None:
    assert read("so<|/think|>yes", prompt="a: x b: a:<|think|>\n") == ("so", ["yes"])
    assert read("yes", prompt="a:<|think|>so<|/think|>") == ("", ["yes"])
    assert read("yes", prompt="<|think|>") == ("", ["yes"])  # no anchor: nothing is known


@pytest.mark.parametrize(
    "text", ['{"name": "other", "arguments": {}}', '{"name": "now", "arguments": 3}', '{"name": ']
)
def test_what_is_no_call_stays_text(text: str) -> None:
    thought, parts = read("hi ", "<call>", text, "</call>")
    assert thought == ""
    assert "".join(map(str, parts)).replace("</call>", "") == f"hi{text}"


def test_calls_may_be_limited() -> None:
    assert read(f"a {CALL}{CALL} b", most=1) == ("", ["a", CALLED])


def test_expressions_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.text.tool_calls.response_template._SECONDS", 0.01)
    fields = {"content": {}, "thinking": {"open_pattern": r"(x+x+)+y", "close": "z"}}
    text = "x" * 40
    assert read(text, " and", template={"start_anchor": "a:", "fields": fields}) == (
        "",
        [f"{text} and"],
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({"fields": {}}, "non-empty dict"),
        ("text", "must be an object"),
        ({"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}}, "invalid"),
        (
            {"start_anchor": "a", "fields": {"tool_calls": {"open": "b", "content": "xml-inline"}}},
            "no time limit",
        ),
        (None, "has no response_template"),
    ],
)
def test_other_templates_are_not_used(template: object, why: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.response_template = template
    found = ResponseTemplate.of(tokenizer)
    assert isinstance(found, str)
    assert why in found


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Of a tokenizer with a template for answers, and a chat template that shows no calls."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    letters = ["<pad>", "</s>", "<|think|>", "<|/think|>", "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(letters[:4])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}a:"
    made.response_template = TEMPLATE
    made.save_pretrained(path)
    tokenizer, why = load_tokenizer(path)
    assert tokenizer is not None, why
    return TextCodec(tokenizer, len(letters))


def request(**more: Any) -> ChatRequest:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest.model_validate({"messages": messages, "tools": [tool], **more})


def test_requests_are_answered_by_it(codec: TextCodec) -> None:
    assert codec.tools.format is None
    asked = request()
    prompt = codec.encode([{"role": "user", "content": "hi"}])
    assert set(asked.shown_tokens(codec)) == {2, 3}
    assert asked.call_structure(codec) is None
    parser = asked.answer_parser(codec, prompt)
    pieces = [parser.take(token, None) for token in ["<|think|>", "so", "<|/think|>", "Hi "]]
    pieces += [parser.take(CALL, "stop")]
    assert "".join(piece.reasoning for piece in pieces) == "so"
    parts = [part for piece in pieces for part in piece.parts]
    assert parts[0] == "Hi"
    assert isinstance(parts[1], EmittedCall)
    assert (parts[1].name, parts[1].arguments) == ("weather", '{"city": "Ulm"}')
    assert pieces[-1].finish_reason == "tool_calls"
    assert parser.num_reasoning_tokens == 1  # the one behind the delimiter
    with pytest.raises(RequestError, match="can be read, not enforced"):
        request(tool_choice="required").call_structure(codec)


def test_a_grammar_covers_the_whole_answer(codec: TextCodec) -> None:
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"regex": "a"}}
    )
    assert asked.answer_parser(codec, [5]).take("<|think|>", "stop").parts == ["<|think|>"]
