"""What the routes answer is what the library gives, whole and streamed, through OpenAI's client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openai

from moe import MoE, SamplingParams

CHAT: Any = [{"role": "user", "content": "Hello"}]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def test_completion_is_that_of_the_library_whole_and_streamed(
    client: openai.OpenAI, model: MoE
) -> None:
    expected = model.generate("def f(", GREEDY)[0]
    whole = client.completions.create(model="tiny", prompt="def f(", max_tokens=12, temperature=0)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 6
    assert whole.usage.completion_tokens == len(expected.tokens)
    stream = client.completions.create(
        model="tiny",
        prompt="def f(",
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1
    assert len(chunks) == len(expected.tokens) + 1


def test_chat_is_that_of_the_library_whole_and_streamed(client: openai.OpenAI, model: MoE) -> None:
    expected = model.generate([CHAT], GREEDY)[0]
    asked: Any = {"model": "tiny", "messages": CHAT, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_completion_tokens=12)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, max_tokens=12, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    # What a client got it may send back as it is.
    history: Any = [*CHAT, whole.choices[0].message, *CHAT]
    client.chat.completions.create(model="tiny", messages=history, max_tokens=1)


def test_content_in_parts_is_one_text(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    answers = [
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=8
        )
        for content in (parts, "Hello you")
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage


def test_prompts_of_every_kind_and_several_samples(client: openai.OpenAI, model: MoE) -> None:
    params = SamplingParams(max_new_tokens=5, temperature=1.3, n=2, seed=4)
    expected = [c.text for c in model.generate(["ab", "xyz"], params)]
    ids = [model.codec.encode(text) for text in ("ab", "xyz")]
    for prompt in (["ab", "xyz"], ids):
        got = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=5, temperature=1.3, n=2, seed=4
        )
        assert [choice.text for choice in got.choices] == expected
        assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    one = client.completions.create(
        model="tiny", prompt=ids[1], max_tokens=5, temperature=1.3, n=2, seed=4, stream=True
    )
    texts = ["", ""]
    for chunk in one:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected[2:]


def test_stop_and_penalties_are_those_of_the_library(client: openai.OpenAI, model: MoE) -> None:
    text = model.generate("hello", GREEDY)[0].text
    assert len(text) > 4
    stop = text[2:4]
    got = client.completions.create(model="tiny", prompt="hello", max_tokens=12, stop=stop)
    assert got.choices[0].text == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"
    params = SamplingParams(
        max_new_tokens=12,
        temperature=0.7,
        top_p=0.8,
        seed=3,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.2,
        ignore_eos=True,
    )
    got = client.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=12,
        temperature=0.7,
        top_p=0.8,
        seed=3,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        extra_body={"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True},
    )
    assert got.choices[0].text == model.generate("hello", params)[0].text


def test_a_special_token_may_be_a_stop_string(client: openai.OpenAI, model: MoE) -> None:
    assert model.codec.tokenizer is not None
    for name in ("<pad>", "</s>"):  # the second is also the model's own end token
        token_id = model.codec.tokenizer.convert_tokens_to_ids(name)
        asked: Any = {
            **{"model": "tiny", "prompt": "a", "max_tokens": 3, "temperature": 0},
            **{"logit_bias": {str(token_id): 100}, "extra_body": {"ignore_eos": True}},
        }
        whole = client.completions.create(**asked, stop=[name, "z"])
        assert (whole.choices[0].finish_reason, whole.choices[0].text) == ("stop", "")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 1
        assert client.completions.create(**asked).choices[0].finish_reason == "length"


def test_logprobs_are_those_of_the_library(client: openai.OpenAI, model: MoE) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=0, logprobs=3)
    expected = model.generate("hello", params)[0].tokens
    completion = client.completions.create(model="tiny", prompt="hello", max_tokens=4, logprobs=3)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [t.logprob for t in expected]
    assert logprobs.top_logprobs is not None
    assert [sorted(top.values()) for top in logprobs.top_logprobs] == [
        sorted(value for _, value in t.top or ()) for t in expected
    ]
    for few in (0, 1):  # the chosen token is there, likely or not
        asked: Any = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "logprobs": few}
        hot = client.completions.create(**asked, temperature=2, seed=3).choices[0].logprobs
        assert hot is not None
        assert hot.tokens is not None
        assert hot.top_logprobs is not None
        chosen = zip(hot.tokens, hot.token_logprobs or (), strict=True)
        for (token, logprob), top in zip(chosen, hot.top_logprobs, strict=True):
            assert top.pop(token) == logprob
            assert len(top) <= few
            assert all(value >= logprob for value in top.values())
    assert logprobs.text_offset == [0, 1, 2, 3]
    ids: Any = model.codec.encode("hello")
    streamed = client.completions.create(
        model="tiny", prompt=ids, max_tokens=4, logprobs=3, stream=True
    )
    offsets = [c.choices[0].logprobs.text_offset for c in streamed if c.choices[0].logprobs]
    assert offsets == [[0], [1], [2], [3]]
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert all(bytes(entry.bytes or []).decode() == entry.token for entry in content)
    assert all(math.isfinite(entry.logprob) for entry in content)


def test_without_max_tokens_the_default_is_cut_to_fit(client: openai.OpenAI) -> None:
    got = client.completions.create(model="tiny", prompt=[7] * 250, extra_body={"ignore_eos": True})
    assert got.usage is not None
    assert got.usage.completion_tokens == 6


def test_a_chat_without_a_limit_goes_on_until_the_context_is_full(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model="tiny", messages=CHAT, extra_body={"ignore_eos": True}
    )
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.total_tokens == 256


def test_a_profile_has_the_last_word_on_defaults(serve: Any, text_checkpoint: Path) -> None:
    def load() -> MoE:
        return MoE.from_pretrained(text_checkpoint, generation={"max_new_tokens": 3, "top_k": 1})

    with serve(load=load) as server:
        body = {"model": "tiny", "messages": CHAT, "temperature": 1.9, "ignore_eos": True}
        answers = [server.http.post("/v1/chat/completions", json=body).json() for _ in range(4)]
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {3}
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        sampling = server.http.get("/v1/status").json()["model"]["sampling"]
        assert sampling["top_k"] == {"value": 1, "origin": "profile"}
        assert sampling["top_p"] == {"value": 1.0, "origin": "default"}


def test_labels_and_names_change_no_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    labels: Any = {
        **{"store": False, "metadata": {"run": "7"}, "user": "u", "safety_identifier": "s"},
        **{"prompt_cache_key": "k", "extra_body": {"top_k": -1}},
    }
    named: Any = [{**CHAT[0], "name": "ann"}]
    plain = client.chat.completions.create(**asked, messages=CHAT)
    labelled = client.chat.completions.create(**asked, messages=named, **labels)
    assert labelled.choices == plain.choices
    assert labelled.usage == plain.usage


def test_no_answer_says_which_experts_it_used(client: openai.OpenAI) -> None:
    """Who knows them can tell what was asked (MoEcho, arXiv 2508.15036)."""
    asked: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 2, "logprobs": True}
    answer = client.chat.completions.with_raw_response.create(**asked)
    assert "expert" not in f"{answer.headers} {answer.text}".lower()
