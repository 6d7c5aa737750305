"""Streams of blocks, however an answer was cut into tokens: put together they are the answer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moe.completion import StreamEvent
from moe.sampling.batch import Token
from moe.sequence import Delta, FinishReason
from moe.server.answers import AnswerParser, EmittedCall
from moe.server.anthropic import MessagesAnswer, MessagesRequest
from moe.server.responses import ResponsesAnswer, ResponsesRequest
from moe.server.translation import BlockAnswer
from moe.text.tool_calls.format import CallFormat, ObjectBody
from moe.text.tool_calls.reasoning import ReasoningFormat

CALLS = CallFormat(
    ObjectBody(("name",), ("arguments",)), call_open="<tool_call>", call_close="</tool_call>"
)
CODEC: Any = SimpleNamespace(
    tools=SimpleNamespace(format=CALLS),
    reasoning=SimpleNamespace(format=ReasoningFormat("<think>", "</think>")),
    opens_reasoning=lambda prompt: False,
    response_template="the tokenizer has none",
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PARTS = st.sampled_from(["a b", " ", "<think>", "</think>", CALL, CALL[:20], "<tool_call>", "\n"])
ASKED: Any = {"model": "m", "tools": [{"name": "f", "input_schema": {}}], "max_tokens": 9}
MESSAGES = MessagesRequest.model_validate(ASKED | {"messages": [{"role": "user", "content": ""}]})
RESPONSES = ResponsesRequest.model_validate(
    {"model": "m", "input": "x", "tools": [{"type": "function", "name": "f"}]}
)


@st.composite
def answers(draw: st.DrawFn) -> list[StreamEvent]:
    """One text in tokens, some of which add nothing."""
    text = "".join(draw(st.lists(PARTS, max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    ending: FinishReason = draw(st.sampled_from(["stop", "length"]))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    endings: list[FinishReason | None] = [*[None] * (len(pieces) - 1), ending]
    return [
        StreamEvent(0, 0, Delta(Token(0), piece, end), [1, 2])
        for piece, end in zip(pieces, endings, strict=True)
    ]


def said(events: list[StreamEvent]) -> list[tuple[str, str]]:
    """Reasoning, text and calls, read from the whole text."""
    reader: AnswerParser = MESSAGES.chat.answer_parser(CODEC, [1, 2])
    text = "".join(event.delta.text for event in events)
    got = reader.take(text, events[-1].delta.finish_reason)
    made = [("reasoning", got.reasoning)] if got.reasoning else []
    for piece in got.parts:
        if isinstance(piece, EmittedCall):
            made.append(("call", piece.arguments))
        elif piece:
            joins = made and made[-1][0] == "text"
            made[-1:] = [("text", made[-1][1] + piece)] if joins else [*made[-1:], ("text", piece)]
    return made


def stream(answer: BlockAnswer, events: list[StreamEvent]) -> list[Any]:
    made: list[Any] = answer.begin(2, 1)
    for event in events:
        made += answer.more(event)
    return json.loads(json.dumps(made + answer.end()))


@settings(max_examples=150, deadline=None)
@given(answers())
def test_messages_are_their_streams(events: list[StreamEvent]) -> None:
    answer = MessagesAnswer(MESSAGES, CODEC, "id", "m")
    start, _, *told, end, _ = stream(answer, events)
    blocks: list[tuple[str, str]] = []
    names = {"thinking": "reasoning", "text": "text", "tool_use": "call"}
    for event in told:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append((names[event["content_block"]["type"]], ""))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            *_, piece = event["delta"].values()
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + piece)
    assert blocks == said(events)
    whole = MessagesAnswer(MESSAGES, CODEC, "id", "m").whole(2, events)
    assert [names[block["type"]] for block in whole["content"]] == [name for name, _ in blocks]
    assert whole["usage"] == end["usage"]
    assert start["message"] | end["delta"] | {"content": 0, "usage": 0} == whole | {
        "content": 0,
        "usage": 0,
    }


@settings(max_examples=150, deadline=None)
@given(answers())
def test_responses_are_their_streams(events: list[StreamEvent]) -> None:
    answer = ResponsesAnswer(RESPONSES, CODEC, "id", "m")
    *told, end = stream(answer, events)
    texts: dict[int, str] = {}
    done: list[Any] = []
    for event in told[2:]:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            texts[place] = texts.get(place, "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            done.append(event["item"])
    names = {"reasoning": "reasoning", "message": "text", "function_call": "call"}
    got = [(names[item["type"]], texts[place]) for place, item in enumerate(done)]
    assert got == said(events)
    for (_, text), item in zip(got, done, strict=True):
        assert text == (item["content"][0]["text"] if "content" in item else item["arguments"])
    assert end["response"]["output"] == done
    assert [event["sequence_number"] for event in [*told, end]] == list(range(len(told) + 1))
    statuses = [item["status"] for item in done]
    assert set(statuses[:-1]) <= {"completed"}
