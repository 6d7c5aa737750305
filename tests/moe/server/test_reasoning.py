"""Models that think aloud, through OpenAI's own client, with a model that says what it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from moe import MoE
from tests.moe.server.conftest import Say, forget_habits
from tests.moe.text.tool_calls.reasoning_templates import (
    ANALYSIS,
    BRACKETS,
    FINAL,
    HARMONY,
    MINIMAX,
    QWEN3,
    QWEN3_OPENED,
)
from tests.moe.text.tool_calls.templates import HERMES

ASKED: Any = [{"role": "user", "content": "Is it raining?"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
THOUGHT = "I see <b> </thin> it."
CHANNELS = f"{ANALYSIS}{THOUGHT}<|end|><|start|>assistant{FINAL}Yes."


def ask(client: openai.OpenAI, **more: Any) -> Any:
    asked: Any = {"model": "tiny", "messages": ASKED} | more
    return client.chat.completions.create(**asked)


def streamed(client: openai.OpenAI, **more: Any) -> tuple[str, str, list[str]]:
    """Reasoning, content, and the names of the tools called."""
    thought, content, calls = "", "", []
    for chunk in ask(client, stream=True, **more):
        delta = chunk.choices[0].delta
        more_thought = getattr(delta, "reasoning_content", "")
        assert getattr(delta, "reasoning", "") == more_thought
        assert not (more_thought and content), "reasoning behind the answer"
        thought += more_thought
        content += delta.content or ""
        calls += [call.function.name for call in delta.tool_calls or []]
    return thought, content, calls


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN3, f"<think>\n{THOUGHT}\n</think>\n\nYes."),
        (QWEN3_OPENED, f"{THOUGHT}\n</think>\n\nYes."),
        (MINIMAX, f"{THOUGHT}\n</think>\n\nYes."),
        (HARMONY, CHANNELS),
        # A token that decoding leaves out, as those of channels are.
        (BRACKETS.replace("[THINK]", "<pad>"), f"<pad>{THOUGHT}[/THINK]Yes."),
    ],
)
def test_reasoning_comes_beside_the_answer(
    client: openai.OpenAI, say: Say, template: str, text: str
) -> None:
    say(text, template=template)
    answer = ask(client, logprobs=True)
    (choice,) = answer.choices
    assert choice.message.content == "Yes."
    assert choice.message.reasoning_content == choice.message.reasoning == THOUGHT
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert streamed(client) == (THOUGHT, "Yes.", [])
    again = ask(client, messages=[*ASKED, choice.message, *ASKED])
    assert again.choices[0].message.content == "Yes."


def test_reasoning_that_is_cut_off_is_all_there_is(client: openai.OpenAI, say: Say) -> None:
    say(f"<think>\n{THOUGHT}\n</think>\n\nYes.", template=QWEN3)
    (choice,) = ask(client, max_tokens=20).choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.reasoning_content == THOUGHT[:12]
    assert streamed(client, max_tokens=20)[:2] == (THOUGHT[:12], "")


def test_answers_without_reasoning_are_as_ever(client: openai.OpenAI, say: Say) -> None:
    for template in (QWEN3, HERMES):
        say(" Yes. <think>No</think>", template=template)
        (choice,) = ask(client).choices
        assert choice.message.content == " Yes. <think>No</think>"
        assert not hasattr(choice.message, "reasoning_content")


def test_calls_come_behind_reasoning_and_not_in_it(client: openai.OpenAI, say: Say) -> None:
    say(f"<think>\n{CALL}?\n</think>\n\nI look.\n{CALL}", template=QWEN3)
    (choice,) = ask(client, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == f"{CALL}?"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert streamed(client, tools=[WEATHER]) == (f"{CALL}?", "I look.", ["weather"])


def test_templates_get_their_own_variables_and_no_others(
    client: openai.OpenAI, say: Say, model: MoE
) -> None:
    say("Yes.", template=QWEN3_OPENED)
    off: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    (choice,) = ask(client, **off).choices
    assert choice.message.content == "Yes."
    assert not hasattr(choice.message, "reasoning_content")
    (choice,) = ask(client).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("", "Yes.")
    assert streamed(client, **off) == ("", "Yes.", [])
    arguments = ("chat_template", "messages", "tools", "add_generation_prompt", "tokenize", "_x")
    for name in (*arguments, "bos_token", "raise_exception", "strftime_now"):
        with pytest.raises(openai.BadRequestError, match=f"{name}' is set by the server"):
            ask(client, extra_body={"chat_template_kwargs": {name: "x"}})
    for value in ([1], {"a": 1}, "x" * 1025):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            ask(client, extra_body={"chat_template_kwargs": {"a": value}})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_templates_get_earlier_reasoning(
    server: Any, say: Say, model: MoE, name: str, client: openai.OpenAI
) -> None:
    say("", template=QWEN3)
    answer = {"role": "assistant", "content": "Yes.", name: "I see."}
    messages = [*ASKED, answer]
    got = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert "<think>\nI see.\n</think>\n\nYes." in model.codec.decode(got)
    with pytest.raises(openai.BadRequestError, match="reasoning is of role assistant"):
        ask(client, messages=[ASKED[0] | {name: "x"}])


def test_the_status_says_what_was_found(server: Any, say: Say) -> None:
    say("", template=QWEN3)
    status = server.http.get("/v1/status").json()["model"]["reasoning"]
    assert status["enabled"] is True
    assert status["format"] == {
        "opens": "<think>",
        "closes": "</think>",
        "key": "reasoning_content",
    }
    say("")
    status = server.http.get("/v1/status").json()["model"]["reasoning"]
    assert (status["enabled"], status["format"]) == (False, None)
    assert "neither writes the reasoning" in status["why"]


@pytest.mark.parametrize("opened", [False, True])
def test_structures_come_behind_reasoning(serve: Any, opened: bool) -> None:
    """The shipped model, which has never been taught to think or to stop it."""
    model = MoE.from_pretrained(Path(__file__).parents[3] / "examples" / "demo-model")
    assert model.codec.tokenizer is not None
    model.codec.tokenizer.chat_template = QWEN3_OPENED if opened else QWEN3
    forget_habits(model)
    schema: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    format: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    called: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    regex: Any = {"extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}}
    with serve(load=lambda: model) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        whole = ask(client, **regex).choices[0].message
        assert len(whole.content) == 3
        assert not hasattr(whole, "reasoning_content")
        for asked in ({"response_format": format}, called):
            (choice,) = ask(client, max_tokens=80, temperature=0, **asked).choices
            assert (choice.message.content, choice.finish_reason) == ("", "length")
            assert choice.message.reasoning_content
        off: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        (choice,) = ask(client, response_format=format, **off).choices  # it begins at once
        assert json.loads(choice.message.content)["a"] in (1, 2)
        if not opened:  # a bias against thinking at all
            never = {str(model.codec.encode(text)[0]): -100 for text in ("<think>", "\n<think>")}
            (choice,) = ask(client, logit_bias=never, response_format=format).choices
            assert json.loads(choice.message.content)["a"] in (1, 2)
