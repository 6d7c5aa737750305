"""Anthropic's own client library: the server takes what it sends, and it reads what it gets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.moe.server.conftest import Say
from tests.moe.server.test_messages import ASKED, CALL, WEATHER

anthropic: Any = pytest.importorskip("anthropic")  # `make` installs it; environments may be older


def client_of(server: Any, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def test_a_message_whole_streamed_and_counted(server: Any, say: Say) -> None:
    say("Two plus two is four.")
    messages = client_of(server).messages
    whole = messages.create(model="tiny", max_tokens=99, messages=ASKED)
    assert [block.text for block in whole.content] == ["Two plus two is four."]
    assert whole.stop_reason == "end_turn"
    with messages.stream(model="tiny", max_tokens=99, messages=ASKED) as stream:
        parts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(parts) == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = messages.count_tokens(model="tiny", messages=ASKED)
    assert counted.input_tokens == whole.usage.input_tokens > 0


def test_a_tool_is_called_and_its_result_taken(server: Any, say: Say) -> None:
    say(CALL)
    messages = client_of(server).messages
    called = messages.create(model="tiny", max_tokens=99, messages=ASKED, tools=[WEATHER])
    (use,) = called.content
    assert (called.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "22 degrees"}
    turns = [*ASKED, {"role": "assistant", "content": called.content}]
    turns.append({"role": "user", "content": [result]})
    say("It is warm.")
    answer = messages.create(model="tiny", max_tokens=99, messages=turns, tools=[WEATHER])
    assert answer.content[0].text == "It is warm."


def test_errors_are_those_of_the_library(serve: Any) -> None:
    with serve(api_key="s3cret") as server:
        known, stranger = (client_of(server, key).messages for key in ("s3cret", "wrong"))
        for messages, changes, error in (
            (stranger, {}, anthropic.AuthenticationError),
            (known, {"model": "other"}, anthropic.NotFoundError),
            (known, {"max_tokens": 10_000}, anthropic.BadRequestError),
        ):
            body = {"model": "tiny", "max_tokens": 2, "messages": ASKED} | changes
            with pytest.raises(error):
                messages.create(**body)
        assert known.create(model="tiny", max_tokens=2, messages=ASKED).stop_reason == "max_tokens"
