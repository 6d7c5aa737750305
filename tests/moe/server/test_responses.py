"""`/v1/responses` through OpenAI's own client: a chat in other words."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from moe import MoE
from moe.sequence import RunningSequence
from moe.server.responses import ResponsesRequest
from moe.server.unsupported import UNSUPPORTED
from tests.moe.server.conftest import Say, forget_habits
from tests.moe.server.wire import check_wrong_types, events_of
from tests.moe.text.tool_calls.reasoning_templates import HARMONY, MINIMAX, QWEN3
from tests.moe.text.tool_calls.templates import HERMES

ROUTE = "/v1/responses"
DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": None}
CHAT_WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture
def server(strict: Any) -> Any:
    """What is not honoured is refused; `test_unknown_fields.py` has what is taken."""
    return strict


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**({"model": "tiny", "input": "Is it raining?"} | more))


def chat_tokens(client: openai.OpenAI, messages: Any, **more: Any) -> int:
    """Of the prompt that a chat has."""
    asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 1} | more
    usage = client.chat.completions.create(**asked).usage
    assert usage is not None
    return usage.prompt_tokens


def timeless(response: Any) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    text = json.dumps(response)
    for name in (response["id"].removeprefix("resp_"), str(response["created_at"])):
        text = text.replace(name, "0")
    made: dict[str, Any] = json.loads(text)
    for item in made["output"]:
        item.pop("call_id", None)
    return made


def test_the_tokens_are_those_of_a_chat(client: openai.OpenAI, server: Any) -> None:
    asked: Any = {"temperature": 0, "model": "tiny"}
    turns: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
    turns.append({"role": "user", "content": "def f("})
    chat = client.chat.completions.create(
        messages=[
            {"role": "system", "content": "Be brief"},
            {"role": "developer", "content": "and kind"},
            *turns,
        ],
        max_tokens=12,
        **asked,
    )
    leading = [{"role": "developer", "content": [{"type": "input_text", "text": "and kind"}]}]
    body = asked | {"input": leading + turns, "instructions": "Be brief", "max_output_tokens": 12}
    got = ask(client, **body)
    assert got.output_text == chat.choices[0].message.content
    assert got.usage.input_tokens == chat.usage.prompt_tokens
    assert got.usage.output_tokens == chat.usage.completion_tokens
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.output[0].status == "incomplete"
    events = events_of(server.http, ROUTE, body)
    assert events[-1]["type"] == "response.incomplete"
    whole = server.http.post(ROUTE, json=body).json()
    assert timeless(events[-1]["response"]) == timeless(whole)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == got.output_text


LOGPROBS = ["message.output_text.logprobs"]


def test_log_probabilities_are_those_of_a_chat(client: openai.OpenAI, server: Any) -> None:
    asked: Any = {"temperature": 0, "model": "tiny"}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        **asked,
    )
    expected = chat.model_dump()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in expected] == [2] * 5
    body = asked | {"input": "Hello", "max_output_tokens": 5}
    body |= {"include": LOGPROBS, "top_logprobs": 2}
    got = ask(client, **body).output[0].content[0]
    assert got.model_dump()["logprobs"] == expected
    events = events_of(server.http, ROUTE, body)
    parts = [event for event in events if event["type"].startswith("response.output_text.")]
    assert [entry for event in parts[:-1] for entry in event["logprobs"]] == expected
    assert parts[-1]["logprobs"] == expected
    plain = ask(client, input="Hello", max_output_tokens=5, top_logprobs=0)
    assert plain.output[0].content[0].logprobs == []


def test_log_probabilities_are_of_text_alone(client: openai.OpenAI, say: Say) -> None:
    say(SAID, template=QWEN3)
    got = ask(client, tools=[WEATHER], include=LOGPROBS)
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call"]
    text = got.output[1].content[0]
    assert "".join(entry.token for entry in text.logprobs).strip() == text.text == "I look."
    say("<thin ice", template=QWEN3)  # which may begin reasoning, at first
    text = ask(client, include=LOGPROBS).output[0].content[0]
    assert "".join(entry.token for entry in text.logprobs) == text.text == "<thin ice"


def test_a_stream_has_its_events_in_order(client: openai.OpenAI, server: Any, say: Say) -> None:
    say(SAID, template=QWEN3)
    body: Any = {"model": "tiny", "input": "Is it raining?", "tools": [WEATHER]}
    events = events_of(server.http, ROUTE, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in groupby(e["type"] for e in events)]
    opened, closed = ["output_item.added", "content_part.added"], ["content_part.done"]
    assert names == [
        *("created", "in_progress"),
        *(*opened, "reasoning_text.delta", "reasoning_text.done", *closed, "output_item.done"),
        *(*opened, "output_text.delta", "output_text.done", *closed, "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert final["output"] == done
    for event in events[2:-1]:
        item = done[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
    whole = server.http.post(ROUTE, json=body).json()
    assert timeless(final) == timeless(whole)
    with client.responses.stream(**body) as stream:
        assert [event.type for event in stream] == [event["type"] for event in events]
        got = stream.get_final_response()
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call"]


def test_calls_and_reasoning_go_back(client: openai.OpenAI, say: Say) -> None:
    say(SAID, template=QWEN3)
    first = ask(client, tools=[WEATHER], include=["reasoning.encrypted_content"])
    thought, message, call = first.output
    assert thought.content[0].text == "Hm."
    assert message.content[0].text == first.output_text == "I look."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
    assert first.usage.output_tokens_details.reasoning_tokens == len("<think>\nHm.\n</think>")
    say("It rains.", template=QWEN3)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked: Any = [{"role": "user", "content": "Is it raining?"}]
    second = ask(client, tools=[WEATHER], input=[*asked, *first.output, result])
    assert second.output_text == "It rains."
    function = {"name": "weather", "arguments": call.arguments}
    history: Any = [
        *asked,
        {
            **{"role": "assistant", "content": "I look.", "reasoning_content": "Hm."},
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    assert second.usage.input_tokens == chat_tokens(client, history, tools=[CHAT_WEATHER])


def test_nothing_is_stored_and_the_answer_says_so(client: openai.OpenAI, server: Any) -> None:
    for said in ({}, {"store": True}, {"store": False}, {"store": None}):
        body = {"model": "tiny", "input": "x", "max_output_tokens": 2, "metadata": {"a": "b"}}
        answer = server.http.post(ROUTE, json=body | said).json()
        assert answer["store"] is False
        assert answer["metadata"] == {"a": "b"}
    with pytest.raises(openai.BadRequestError, match="the server keeps no answers"):
        ask(client, previous_response_id=answer["id"])


def test_known_prefixes_are_counted(serve: Any, text_checkpoint: Path) -> None:
    def load() -> MoE:
        return MoE.from_pretrained(text_checkpoint, memory={"prefix_tokens": 1000})

    with serve(load=load) as server:
        body = {"model": "tiny", "input": "x" * 100, "max_output_tokens": 3}
        message = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 3}
        known = []
        for salt in ("a", "a", "b"):
            usage = server.http.post(ROUTE, json=body | {"cache_salt": salt}).json()["usage"]
            known.append(usage["input_tokens_details"]["cached_tokens"])
        asked = {"model": "tiny", "cache_salt": "a"} | message
        usage = server.http.post("/v1/messages", json=asked).json()["usage"]
        assert known == [0, 96, 0]
        assert usage["cache_read_input_tokens"] == 96
        assert usage["input_tokens"] == len("u:\na:") + 100 - 96
        usage = server.http.post("/v1/chat/completions", json=asked).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 96}
        prompts: Any = {"model": "tiny", "prompt": ["y" * 40, "z" * 40], "max_tokens": 2, "n": 2}
        ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
        for known_now in (0, 64):
            *_, last = ours.completions.create(
                **prompts, stream=True, stream_options={"include_usage": True}
            )
            assert last.usage.prompt_tokens_details.cached_tokens == known_now


def test_reasoning_is_turned_where_the_template_can(client: openai.OpenAI, say: Say) -> None:
    say("Yes.", template=QWEN3)
    question: Any = [{"role": "user", "content": "Is it raining?"}]
    off = ask(client, reasoning={"effort": "none", "summary": "auto"})
    kwargs: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    assert off.usage.input_tokens == chat_tokens(client, question, **kwargs)
    assert off.usage.input_tokens > ask(client).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="does not read a reasoning effort") as info:
        ask(client, reasoning={"effort": "high"})
    assert info.value.code == "reasoning_not_supported"
    with pytest.raises(openai.BadRequestError, match="another field says 'enable_thinking'"):
        chat_tokens(client, question, reasoning_effort="none", **kwargs)
    say("Yes.", template="{{- reasoning_effort or 'medium' }}" + HARMONY)
    effort = ask(client, reasoning={"effort": "xhigh"}).usage.input_tokens
    assert ask(client).usage.input_tokens - effort == len("medium") - len("xhigh")
    assert effort == chat_tokens(client, question, reasoning_effort="xhigh")
    say("Yes.", template=MINIMAX)
    with pytest.raises(openai.BadRequestError, match="nothing that turns reasoning off"):
        ask(client, reasoning={"effort": "none"})
    say("Yes.", template=HERMES)
    assert ask(client, reasoning={"effort": "none"}).output_text == "Yes."


def test_a_stream_that_fails_says_so(
    server: Any, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("Never said.")

    def fail(*_: Any) -> Any:
        raise RuntimeError("inside")

    monkeypatch.setattr(RunningSequence, "append_token", fail)
    events = events_of(server.http, ROUTE, {"model": "tiny", "input": "x"})
    assert [event["type"] for event in events[2:]] == ["response.failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "inside" not in failed["error"]["message"]
    asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    events = events_of(server.http, "/v1/messages", asked)
    assert [event["type"] for event in events] == ["message_start", "ping", "error"]
    assert events[-1]["error"]["type"] == "api_error"


class City(BaseModel):
    city: Literal["Ulm", "Oslo"]


def test_openais_helpers_for_structures_and_tools(serve: Any) -> None:
    model = MoE.from_pretrained(DEMO)
    assert model.codec.tokenizer is not None
    model.codec.tokenizer.chat_template = HERMES
    forget_habits(model)
    with serve(load=lambda: model) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        closed = City.model_json_schema() | {"additionalProperties": False}
        schema = {"type": "json_schema", "schema": closed}
        message: Any = {"model": "tiny", "messages": [{"role": "user", "content": "A city?"}]}
        message |= {"max_tokens": 100, "output_config": {"format": schema}}
        (block,) = running.http.post("/v1/messages", json=message).json()["content"]
        assert City.model_validate_json(block["text"])
        asked: Any = {"model": "tiny", "input": "Name a city.", "temperature": 1.0}
        got = client.responses.parse(**asked, text_format=City)
        assert isinstance(got.output_parsed, City)
        tool = openai.pydantic_function_tool(City)["function"]
        asked |= {"tools": [{"type": "function", **tool}], "parallel_tool_calls": False}
        choice: Any = {"type": "function", "name": "City"}
        for chosen in ("required", choice):
            (call,) = client.responses.parse(**asked, tool_choice=chosen).output
            assert call.type == "function_call"
            assert json.loads(call.arguments)["city"] in ("Ulm", "Oslo")


def test_wrong_types_never_break_the_server(server: Any) -> None:
    body = {"model": "tiny", "input": "x", "max_output_tokens": 1}
    fields = [*ResponsesRequest.model_fields, *UNSUPPORTED["responses"]]
    check_wrong_types(server.http, ROUTE, body, fields)
    assert server.is_idle()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("input", [], "input: List should have at least 1 item"),
        ("input", [{"type": "web_search_call"}], "the type may be message, reasoning"),
        ("input", [{"role": "user"}], r"'input.0.content' is missing"),
        ("input", [{"type": "reasoning", "encrypted_content": "x"}], "encrypted_content'; remove"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "an image must be a"),
        ("input", [{"type": "function_call_output", "output": "x"}], "call_id' is missing"),
        ("tools", [{"type": "web_search"}], "must have the type function, and the client runs"),
        ("tools", [WEATHER, WEATHER], "'weather' is there twice"),
        ("tool_choice", "required", "only with tools"),
        ("tool_choice", {"type": "function", "name": "f"}, "there is no tool 'f'"),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice"),
        ("text", {"format": {"type": "json_schema"}}, "has a name and a schema"),
        ("text", {"verbosity": "high"}, "text.verbosity"),
        ("reasoning", {"summary": "detailed"}, "reasoning.summary"),
        ("include", ["web_search_call.results"], "include.0"),
        ("truncation", "auto", "truncation"),
        ("stream_options", {"include_obfuscation": True}, "include_obfuscation"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", 2.1, "temperature"),
        ("background", True, "background is not supported: the server keeps no answers"),
        ("conversation", "conv_1", "so send the whole conversation"),
        ("max_tool_calls", 3, "this one runs none"),
        ("prompt", {"id": "x"}, "prompt is not supported"),
        ("top_logprobs", 2, "only with include: .'message.output_text.logprobs'"),
        ("top_logprobs", 21, "top_logprobs"),
        ("max_tokens", 3, "unknown field 'max_tokens'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    server: Any, field: str, value: Any, rule: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match=rule):
        ask(client, extra_body={field: value})
    assert server.is_idle()
