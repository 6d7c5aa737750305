"""Chat templates run elsewhere, with limits, and say what they would say here."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.errors import RequestError
from moe.text.chat import RENDERERS, render
from moe.text.tokenizer import TextCodec
from tests.moe.text.test_prompts import VOCAB_SIZE, make_tokenizer
from tests.moe.text.tool_calls.templates import KNOWN

CHAT = [{"role": "user", "content": "hi"}]
DOUBLED = (
    "{% set n = namespace(x='a') %}{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
TOO_MUCH = ["{{ 'a' * 3000000000 }}", "{{ '%3000000000d' % 1 }}", DOUBLED]


@pytest.mark.parametrize("template", TOO_MUCH)
def test_a7_templates_that_make_gigabytes_are_refused(template: str) -> None:
    codec = TextCodec(make_tokenizer(template), VOCAB_SIZE)
    before = peak_kib()
    with pytest.raises(RequestError, match="chat template takes more than 1024 MiB of memory"):
        codec.encode(CHAT)
    assert peak_kib() < before + 2**19


def peak_kib() -> int:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a7_time_is_limited_also_of_a_single_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RENDERERS, "_seconds", 1)
    codec = TextCodec(make_tokenizer("{{ 7 ** (10 ** 9) % 2 }}"), VOCAB_SIZE)
    with pytest.raises(RequestError, match="chat template takes more than 1 s of a processor"):
        codec.encode(CHAT)


def test_a7_long_texts_are_refused() -> None:
    codec = TextCodec(make_tokenizer("{{ 'a' * 70000000 }}"), VOCAB_SIZE)
    with pytest.raises(RequestError, match="makes more than 67108864 bytes"):
        codec.encode(CHAT)


names = st.sampled_from(["content", "x", "tool_calls"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])}
    ).flatmap(
        lambda role: st.dictionaries(names, values, max_size=3).map(lambda rest: role | rest)
    ),
    max_size=4,
)
SHOWS_ALL = "{{ bos_token }}{{ messages | tojson }}{{ tools }}{{ add_generation_prompt }}{{ y }}"


@settings(max_examples=30)
@given(
    template=st.sampled_from([SHOWS_ALL, *KNOWN.values()]),
    messages=messages,
    open=st.booleans(),
    y=values,
)
def test_texts_are_those_of_transformers_here(
    template: str, messages: list[dict[str, Any]], open: bool, y: object
) -> None:
    tokenizer = make_tokenizer(template)
    options: dict[str, Any] = {"add_generation_prompt": open, "tools": None, "y": y}
    try:
        expected = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception:
        expected = None
    try:
        assert render(tokenizer, messages, **options) == expected
    except ValueError:
        assert expected is None
