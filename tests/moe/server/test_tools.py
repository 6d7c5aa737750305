"""Tools through OpenAI's own client, with a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from moe import MoE
from moe.commands.batch import BatchJob
from moe.server.openai.request import ChatRequest
from moe.text.tool_calls.grammar import after_reasoning
from moe.text.tool_calls.reasoning import ReasoningFormat
from tests.moe.server.conftest import Say, forget_habits
from tests.moe.text.tool_calls.templates import (
    HERMES,
    LLAMA,
    MISTRAL,
    PYTHONIC,
    QWEN3,
    QWEN3_CODER,
)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED: Any = [{"role": "user", "content": "Is it raining?"}]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm </tool_call>"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "\u00fcz"}}\n</tool_call>'
)
CITIES = ["Ulm </tool_call>", "\u00fcz"]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    asked: Any = {"model": "tiny", "messages": ASKED, "tools": [WEATHER]} | more
    return client.chat.completions.create(**asked)


def streamed(client: openai.OpenAI, **more: Any) -> tuple[dict[str, Any], list[str]]:
    """A streamed message put together as clients do it, and what came in which order."""
    message: dict[str, Any] = {"content": "", "calls": [], "finish_reason": None}
    order = []
    for chunk in ask(client, stream=True, **more):
        choice = chunk.choices[0]
        assert message["finish_reason"] is None, "a chunk after the end"
        message["finish_reason"] = choice.finish_reason
        message["content"] += choice.delta.content or ""
        order += ["text"] if choice.delta.content else []
        for call in choice.delta.tool_calls or []:
            if call.index == len(message["calls"]):
                assert call.id
                assert call.type == "function"
                message["calls"].append({"name": call.function.name, "arguments": ""})
                order.append("call")
            message["calls"][call.index]["arguments"] += call.function.arguments
    return message, order


def test_calls_come_whole_and_streamed_and_go_back(client: openai.OpenAI, say: Say) -> None:
    say("It may be. I look it up.\n" + CALLS)
    (choice,) = ask(client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "It may be. I look it up."
    calls = choice.message.tool_calls
    assert [call.type for call in calls] == ["function"] * 2
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments)["city"] for call in calls] == CITIES
    assert len({call.id for call in calls}) == 2
    message, order = streamed(client)
    assert message == {
        "content": choice.message.content,
        "calls": [{"name": c.function.name, "arguments": c.function.arguments} for c in calls],
        "finish_reason": "tool_calls",
    }
    assert order[:2] == ["text", "text"]
    assert order[-2:] == ["call", "call"]
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": f"rain {i}"}
        for i, call in enumerate(calls)
    ]
    say("It rains.")
    got = ask(client, messages=[*ASKED, choice.message, *results])
    assert got.choices[0].message.content == "It rains."
    assert got.choices[0].message.tool_calls is None
    assert got.choices[0].finish_reason == "stop"


def test_a_model_reads_what_it_and_its_tools_have_said(model: MoE, say: Say) -> None:
    say("")
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    history: Any = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [{"id": "a1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a1", "content": "rain"},
    ]
    text = model.codec.decode(model.codec.encode(history, tools=[WEATHER]))
    assert '"description": "Tells the weather."' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text


def test_only_calls_is_no_content(client: openai.OpenAI, say: Say) -> None:
    say(CALLS)
    assert ask(client).choices[0].message.content is None
    message, order = streamed(client)
    assert message["content"] == ""
    assert order == ["call", "call"]


@pytest.mark.parametrize(
    "text",
    [
        "Nothing to call.",
        '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>',
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_content(client: openai.OpenAI, say: Say, text: str) -> None:
    say(text)
    (choice,) = ask(client).choices
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    assert choice.message.tool_calls is None
    message, _ = streamed(client)
    assert message == {"content": text, "calls": [], "finish_reason": "stop"}


def test_an_answer_that_is_cut_off_ends_with_length(client: openai.OpenAI, say: Say) -> None:
    say(CALLS)
    (choice,) = ask(client, max_tokens=100).choices
    assert choice.finish_reason == "length"
    assert len(choice.message.tool_calls) == 1
    assert (
        choice.message.content == CALLS.split("\n</tool_call>\n")[1][: len(choice.message.content)]
    )


def test_each_sample_has_its_own_calls(client: openai.OpenAI, say: Say) -> None:
    say(CALLS, "Yes.")
    first, second = ask(client, n=2).choices
    assert len(first.message.tool_calls) == 2
    assert second.message.content == "Yes."
    assert [first.finish_reason, second.finish_reason] == ["tool_calls", "stop"]


def test_one_call_at_a_time_and_none(client: openai.OpenAI, say: Say, model: MoE) -> None:
    say("Ok. " + CALLS)
    answered = ask(client, parallel_tool_calls=False)
    (choice,) = answered.choices
    assert choice.finish_reason == "tool_calls"
    assert answered.usage.completion_tokens == len("Ok. " + CALLS.rpartition("\n<tool_call>")[0])
    assert [json.loads(c.function.arguments)["city"] for c in choice.message.tool_calls] == CITIES[
        :1
    ]
    assert choice.message.content == "Ok."
    message, order = streamed(client, parallel_tool_calls=False)
    assert (message["finish_reason"], order[-1], len(message["calls"])) == ("tool_calls", "call", 1)
    say("Ok. " + CALLS, "Yes.", "<think>" + CALLS + "</think>No.", template=QWEN3)
    several = ask(client, parallel_tool_calls=False, n=3)
    ends = [choice.finish_reason for choice in several.choices]
    assert ends == ["tool_calls", "stop", "stop"]
    assert several.choices[2].message.content == "No."
    say("Ok. " + CALLS)
    untold = ask(client, tool_choice="none")
    assert untold.choices[0].message.content == "Ok. " + CALLS
    assert untold.choices[0].message.tool_calls is None
    assert untold.usage.prompt_tokens == len(model.codec.encode(ASKED))
    assert ask(client).usage.prompt_tokens == len(model.codec.encode(ASKED, tools=[WEATHER]))


def test_a_model_that_cannot_be_given_tools_says_why(
    client: openai.OpenAI, say: Say, server: Any
) -> None:
    say("Yes.", template=PYTHONIC)
    calls: Any = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    called: Any = [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls}]
    for more in ({}, {"tools": [], "messages": called}):
        with pytest.raises(openai.BadRequestError, match="cannot be given tools: the chat") as info:
            ask(client, **more)
        assert info.value.code == "tools_not_supported"
    assert ask(client, tool_choice="none").choices[0].message.content == "Yes."
    status = server.http.get("/v1/status").json()["model"]["tools"]
    assert status["enabled"] is False
    assert status["why"] in str(info.value)
    say("Yes.")
    status = server.http.get("/v1/status").json()["model"]["tools"]
    assert status["enabled"] is True
    assert status["format"]["opens"] == "<tool_call>\n"


@pytest.mark.parametrize("arguments", ["", "{", "[]", "3"])
def test_calls_that_come_back_must_have_an_object(
    client: openai.OpenAI, say: Say, arguments: str
) -> None:
    say("Yes.")
    function = {"name": "f", "arguments": arguments}
    called: Any = [{"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]
    if not arguments:  # some clients send this for a function without arguments
        assert ask(client, messages=[*ASKED, *called])
        return
    with pytest.raises(openai.BadRequestError, match="arguments of a call must be a JSON object"):
        ask(client, messages=[*ASKED, *called])


def test_a_batch_calls_tools_too(model: MoE, say: Say) -> None:
    say(CALLS)
    answers: list[dict[str, Any]] = []
    body = {"model": "tiny", "messages": ASKED, "tools": [WEATHER]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    BatchJob(model, "tiny", answers.append).run(iter([(1, json.dumps(line).encode())]), set())
    choice = answers[0]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 2


DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
DAYS: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Ulm", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST: Any = {"type": "function", "function": {"name": "forecast", "parameters": DAYS}}
SPECIAL = MISTRAL.replace("[TOOL_CALLS]", "<|im_start|>")  # which the shipped tokenizer has


@pytest.fixture(scope="module")
def demo(serve: Any) -> Iterator[tuple[openai.OpenAI, MoE]]:
    model = MoE.from_pretrained(DEMO)
    with serve(load=lambda: model) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0), model


def use(model: MoE, template: str) -> None:
    assert model.codec.tokenizer is not None
    model.codec.tokenizer.chat_template = template
    forget_habits(model)


@pytest.mark.parametrize("template", [HERMES, MISTRAL, SPECIAL, LLAMA, QWEN3_CODER])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "forecast"}}]
)
def test_the_shipped_model_calls_where_it_has_to(
    demo: tuple[openai.OpenAI, MoE], template: str, choice: Any
) -> None:
    """It has never seen a tool, so that all of this is the grammar's doing."""
    client, model = demo
    use(model, template)
    asked: Any = {"temperature": 1.0, "seed": 5, "max_tokens": 400, "tool_choice": choice}
    tools = [FORECAST] if choice == "required" else [WEATHER, FORECAST]
    asked |= {"tools": tools, "parallel_tool_calls": False}
    (answered,) = ask(client, **asked).choices
    assert answered.finish_reason == "tool_calls"
    assert answered.message.content is None
    (call,) = answered.message.tool_calls
    assert call.function.name == "forecast"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Ulm", "Oslo")
    assert 1 <= arguments["days"] <= 9
    message, _ = streamed(client, **asked)
    assert message["calls"] == [{"name": "forecast", "arguments": call.function.arguments}]


class Forecast(BaseModel):
    """Tells the weather."""

    city: Literal["Ulm", "Oslo"]
    days: Literal[1, 2, 3]


def test_openais_helpers_for_tools(demo: tuple[openai.OpenAI, MoE]) -> None:
    """They make strict tools of classes, put chunks together and give instances back."""
    client, model = demo
    use(model, HERMES)
    tool = openai.pydantic_function_tool(Forecast)
    asked: Any = {"model": "tiny", "messages": ASKED, "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "seed": 5, "temperature": 1.0}
    calls = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Forecast)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed_calls = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed_calls is not None
    assert streamed_calls[0].function.parsed_arguments == calls[0].function.parsed_arguments


def test_strict_tools_are_called_as_they_say_or_not_at_all(
    demo: tuple[openai.OpenAI, MoE],
) -> None:
    client, model = demo
    use(model, HERMES)
    strict = {"type": "function", "function": FORECAST["function"] | {"strict": True}}
    (answered,) = ask(client, tools=[strict, WEATHER], temperature=0, max_tokens=8).choices
    assert answered.message.tool_calls is None
    assert answered.message.content
    assert answered.finish_reason == "length"
    # A bias that opens a call: how it goes on is then the grammar's.
    assert model.codec.tokenizer is not None
    first = model.codec.encode("<tool_call>")
    seeds = [
        ask(
            client,
            tools=[strict],
            max_tokens=300,
            temperature=1.5,
            seed=seed,
            logit_bias={str(first[0]): 30},
        ).choices[0]
        for seed in range(2)
    ]
    for choice in seeds:
        for call in choice.message.tool_calls or []:
            assert json.loads(call.function.arguments)["city"] in ("Ulm", "Oslo")
        if choice.finish_reason != "length":
            assert "<tool_call>" not in (choice.message.content or "")
    use(model, LLAMA)
    with pytest.raises(openai.BadRequestError, match="strict tools need delimiters"):
        ask(client, tools=[strict])


def test_an_answer_that_may_call_has_the_form_that_was_asked_for(
    demo: tuple[openai.OpenAI, MoE],
) -> None:
    """As agents with an output type ask. Schemas of tools that are not strict do not matter."""
    client, model = demo
    use(model, HERMES)
    assert model.codec.tokenizer is not None
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form |= {"additionalProperties": False}
    format: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": form}}
    asked: Any = {"tools": [tool, FORECAST], "response_format": format, "max_tokens": 300}
    first = str(model.codec.encode("<tool_call>")[0])
    said = ask(client, **asked, logit_bias={first: -100}).choices[0].message
    assert json.loads(said.content)["a"] in (1, 2)
    assert said.tool_calls is None
    called = ask(client, **asked | {"max_tokens": 30}, logit_bias={first: 30}).choices[0].message
    assert called.content.startswith("<tool_call>\n")  # a call that the limit has cut off
    format["json_schema"]["schema"] = schema
    with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be followed"):
        ask(client, tools=[tool], response_format=format)


def test_many_tools_with_long_texts_can_be_enforced(demo: tuple[openai.OpenAI, MoE]) -> None:
    """Each schema has a limit of its own, and descriptions are no part of the grammar."""
    _, model = demo
    use(model, HERMES)
    limit = 2**16
    city = {"type": "string", "enum": ["Ulm"], "description": "Where it is. " * 300}
    function = {"parameters": DAYS | {"properties": DAYS["properties"] | {"city": city}}}
    tools: Any = [{"type": "function", "function": function | {"name": f"f{i}"}} for i in range(25)]
    assert len(json.dumps(tools)) > limit
    body = ChatRequest(messages=ASKED, tools=tools, tool_choice="required")
    structure = body.call_structure(model.codec)
    assert structure is not None
    model._loaded.structures.check(structure)
    schema = {"enum": ["x" * (limit - 100)]}
    format: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = ChatRequest(messages=ASKED, tools=tools, response_format=format).structure
    assert asked is not None
    thought = ReasoningFormat("<think>", "</think>")
    assert len(after_reasoning(asked, thought, {}, inside=True).source) > limit


def test_schemas_that_cannot_be_enforced_are_refused(demo: tuple[openai.OpenAI, MoE]) -> None:
    client, model = demo
    use(model, HERMES)
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(openai.BadRequestError, match="tools: the schema of 'f' cannot be followed"):
        ask(client, tools=[FORECAST, tool], tool_choice="required")
    structured: Any = {"tools": [tool], "extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}}
    with pytest.raises(openai.BadRequestError, match="the regular expression is of the whole answ"):
        ask(client, **structured)
    chosen = ask(client, **structured, tool_choice="none", max_tokens=300)
    assert len(chosen.choices[0].message.content) == 3
    for choice, rule in (
        ({"type": "function", "function": {"name": "g"}}, "there is no tool 'g'"),
        ("required", "only with tools"),
    ):
        tools = [tool] if isinstance(choice, dict) else []
        with pytest.raises(openai.BadRequestError, match=rule):
            ask(client, tools=tools, tool_choice=choice)
