"""Prompts to token ids: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import MixtralConfig, PreTrainedTokenizerFast

from moe import MoE, SamplingParams
from moe.errors import CheckpointError, ContextError, RequestError
from moe.text.tokenizer import TextCodec, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content or m.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE = 300


def make_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level, with a begin token that it adds by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=5
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(make_tokenizer(), VOCAB_SIZE)


def decode(codec: TextCodec, ids: list[int]) -> str:
    text = codec.require_tokenizer("tests").decode(ids)
    assert isinstance(text, str)
    return text


def test_text_gets_the_tokenizers_own_special_tokens(codec: TextCodec) -> None:
    assert decode(codec, codec.encode("héllo wörld")) == "<s>héllo wörld"


def test_chat_messages_go_through_the_template_alone(codec: TextCodec) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi 你"}]
    assert decode(codec, codec.encode(messages)) == (
        "<|system|>be brief\n<|user|>hi 你\n<|assistant|>"
    )


def test_a_message_that_calls_tools_needs_no_content(codec: TextCodec) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": ["f()"]}
    assert "<|assistant|>['f()']" in decode(codec, codec.encode([call]))


@pytest.mark.parametrize("ids", [[0, 299], (5,), [np.int64(7)], range(3)])
def test_token_ids_pass_as_they_are(codec: TextCodec, ids: list[int]) -> None:
    encoded = codec.encode(ids)
    assert encoded == list(ids)
    assert all(type(token_id) is int for token_id in encoded)


REFUSED = [
    ("", "the prompt is empty; give at least one character, id or message"),
    ([], "the prompt is empty"),
    (b"ab", "must be a string, a list of token ids or a list of chat messages, got bytes"),
    (7, "must be a string, a list of token ids or a list of chat messages, got int"),
    ("ab\ud800", r"valid Unicode, got the lone surrogate '\\ud800' at position 2"),
    ([{"role": "user", "content": "\ud800"}], r"valid Unicode, got the lone surrogate '\\ud800'"),
    ([1, 300], r"from 0 to 299 \(vocabulary of 300\), got 300 at position 1"),
    ([-1], "from 0 to 299 .*, got -1 at position 0"),
    ([1, 2, True], "whole numbers .*, got True at position 2"),
    ([1.0], "whole numbers .*, got 1.0 at position 0"),
    (["hi"], "whole numbers .*, got 'hi' at position 0"),
    ([{"role": "user", "content": "a"}, 3], "chat message 1 must be a mapping .*, got 3; do not"),
    ([{"content": "a"}], "chat message 0 must have a role such as 'user', got None"),
    ([{"role": "user"}], "chat message 0 must have a string as its content, got None"),
    ([{"role": "user", "content": ["a"]}], "must have parts .*, got 'a'"),
    (
        [{"role": "robot", "content": "a"}],
        "template refused the messages: unknown role robot; check their roles and order",
    ),
]


@pytest.mark.parametrize(("prompt", "message"), REFUSED)
def test_a_prompt_outside_the_rules_is_refused(
    codec: TextCodec, prompt: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        codec.encode(prompt)  # type: ignore[arg-type]


def test_text_that_the_tokenizer_drops_is_an_empty_prompt() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        TextCodec(tokenizer, VOCAB_SIZE).encode(" \n")


def test_ids_of_the_tokenizer_beyond_the_model_are_refused() -> None:
    with pytest.raises(RequestError, match=r"from 0 to 9 .*at position 0"):
        TextCodec(make_tokenizer(), 10).encode("hi")


def test_chat_without_a_template_is_refused() -> None:
    codec = TextCodec(make_tokenizer(chat_template=None), VOCAB_SIZE)
    with pytest.raises(RequestError, match="tokenizer has none; give the prompt as text"):
        codec.encode([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"],
)
def test_templates_run_in_a_sandbox_and_their_failures_are_the_requests(template: str) -> None:
    codec = TextCodec(make_tokenizer(template), VOCAB_SIZE)
    with pytest.raises(RequestError, match="chat template refused the messages"):
        codec.encode([{"role": "user", "content": "hi"}])


def test_a_template_that_cannot_be_read_is_not_the_messages_fault() -> None:
    codec = TextCodec(make_tokenizer("{{ bos_token }}\n{% for %}"), VOCAB_SIZE)
    with pytest.raises(RequestError, match=r"template cannot be read: line 2: .*; mend it where"):
        codec.encode([{"role": "user", "content": "hi"}])


def test_without_a_tokenizer_only_token_ids_work(tmp_path: Path) -> None:
    codec = TextCodec.from_directory(tmp_path, MixtralConfig(vocab_size=9, eos_token_id=2))
    assert codec.encode([1, 8]) == [1, 8]
    assert codec.decoder() is None
    assert codec.eos_token_ids == {2}
    with pytest.raises(
        RequestError, match=r"text prompts need a tokenizer, and .* has no tokenizer"
    ):
        codec.encode("hi")
    with pytest.raises(RequestError, match="chat prompts need a tokenizer"):
        codec.encode([{"role": "user", "content": "hi"}])


def test_a_directory_gives_the_tokenizer_and_every_end_token(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    MixtralConfig(vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    config = MixtralConfig(vocab_size=VOCAB_SIZE, eos_token_id=5)
    codec = TextCodec.from_directory(tmp_path, config)
    assert decode(codec, codec.encode("hi")) == "<s>hi"
    assert codec.eos_token_ids == {3, 4, 5, make_tokenizer().eos_token_id}
    decoder = codec.decoder()
    assert decoder is not None
    assert "".join(decoder.push(i) for i in codec.encode("hi")) == "hi"


def test_a_damaged_tokenizer_leaves_token_ids_and_says_so(tmp_path: Path) -> None:
    MixtralConfig().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version":')
    codec = TextCodec.from_directory(tmp_path, MixtralConfig())
    with pytest.raises(RequestError, match=r"cannot be loaded \(JSONDecodeError"):
        codec.encode("hi")


def test_code_in_the_directory_is_not_run(tmp_path: Path) -> None:
    MixtralConfig().save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", None]}
    settings = {"tokenizer_class": "Unknown", "auto_map": auto_map}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    codec = TextCodec.from_directory(tmp_path, MixtralConfig())
    assert codec.tokenizer is None or type(codec.tokenizer).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        *(f'{{"eos_token_id": {wrong}}}' for wrong in ("1.5", '"</s>"', '["a"]', "true", "{}")),
    ],
)
def test_a_damaged_generation_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json must be a JSON object"):
        TextCodec.from_directory(tmp_path, MixtralConfig())


GROWING = {
    "a literal": (normalizers.Replace("a", "b" * 1000), None),
    "an expression": (normalizers.Replace(Regex("x*"), "b" * 1000), None),
    "replacements": (normalizers.Sequence([normalizers.Replace("a", "a" * 100)] * 3), None),
    "repetitions": (None, processors.TemplateProcessing(single=["$A"] * 1000, special_tokens=[])),
}


@pytest.mark.parametrize("kind", GROWING)
def test_a7_texts_that_a_tokenizer_makes_much_longer_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.text.tokenizer._TEXT_CHARACTERS", 2**14)
    tokenizer = make_tokenizer()
    normalizer, processor = GROWING[kind]
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    if processor is not None:
        tokenizer.backend_tokenizer.post_processor = processor
    with pytest.raises(ContextError, match=r"tokenizer may make \d+ of each; send at most"):
        TextCodec(tokenizer, VOCAB_SIZE).encode("a" * 100)


def test_a_text_that_is_far_too_long_is_judged_by_its_beginning() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("x" * 40)  # 100 tokens could have all of the text
    codec = TextCodec(tokenizer, VOCAB_SIZE)
    text, most = "a b " * 1000, 100
    assert len(codec.encode(text)) > 2 * most
    lengths, encode = [], tokenizer.encode

    def counted(text: str, **options: object) -> object:
        lengths.append(len(text))
        return encode(text, **options)

    tokenizer.encode = counted
    with pytest.raises(ContextError, match=r"the first 400 of which are \d+ tokens"):
        codec.encode(text, most)
    assert lengths == [400]
    assert codec.encode(text, 10_000) == codec.encode(text)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("decoder", decoders.Replace("a", "b" * 100_000)),
        ("normalizer", normalizers.Prepend("b" * 100_000)),
    ],
)
def test_a7_tokens_of_endless_text_make_no_tokenizer(
    part: str, value: object, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    setattr(tokenizer.backend_tokenizer, part, value)
    tokenizer.save_pretrained(tmp_path)
    found, why = load_tokenizer(tmp_path)
    assert found is None
    assert re.search("makes texts of .* characters of a token, more than 65536", why)


def test_a7_files_of_a_tokenizer_have_a_limit(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    with (tmp_path / "vocab.txt").open("wb") as file:
        file.truncate(2**29)
    found, why = load_tokenizer(tmp_path)
    assert found is None
    assert "vocab.txt has more than 256 MiB" in why


def test_a7_a_panic_of_the_tokenizer_is_the_requests(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer()
    rules = [normalizers.Replace(Regex("x*"), "yy"), normalizers.Replace("ab", "c" * 9)]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*rules, normalizers.NFKC()])
    with pytest.raises(RequestError, match="tokenizer cannot take this text: index out of bounds"):
        TextCodec(tokenizer, VOCAB_SIZE).encode("abxxa")


def test_a7_a_panic_while_tokens_are_written_ends_their_sequence_and_not_the_loop(
    tiny_moe: Callable[[str], MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_moe("qwen3_moe"), make_tokenizer()
    # It cuts two letters from both ends of a token, also of one that has fewer.
    tokenizer.backend_tokenizer.decoder = decoders.Strip("!", 2, 2)
    codec = TextCodec(tokenizer, VOCAB_SIZE)
    (letter,) = codec.encode("!")[1:]
    monkeypatch.setattr(model, "_loaded", replace(model._loaded, codec=codec))
    engine, panics = model.engine(), SamplingParams(max_new_tokens=4, logit_bias={letter: 100.0})
    fine = SamplingParams(max_new_tokens=4, logit_bias={letter + 1: 100.0})
    groups = [model.request([5, 6, 7], params) for params in (panics, fine)]
    for group in groups:
        engine.submit(group)
    events = []
    while not engine.idle:
        events += engine.step()
    (told,) = [event for _, event in events if isinstance(event, Exception)]
    assert "tokenizer cannot write these tokens as text: " in str(told)
    assert [len(group.sequences[0].token_ids) for group in groups] == [1, 4]
    with pytest.raises(RequestError, match="cannot write these tokens"):
        codec.decode([letter])
