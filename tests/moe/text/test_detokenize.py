"""Incremental decoding against decoding the whole at once, for four kinds of tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe.text.detokenize import IncrementalDecoder, decode_beside, special_token_ids

WORDS = [
    "the",
    "▁the",
    "▁",
    "▁▁",
    "é",
    "你",
    "▁😀",
    "a",
    "▁a",
    ".",
    "n't",
    "\N{REPLACEMENT CHARACTER}",
]


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Adds `</s>`, which the tokenizer names, and `<fim>`, special only to its backend."""
    backend.add_special_tokens(
        [AddedToken("</s>", special=True), AddedToken("<fim>", special=True)]
    )
    backend.add_tokens([AddedToken("<tool>"), AddedToken("\N{REPLACEMENT CHARACTER}!")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, and two that hold parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ä", "½"), ("Ġ", "ä"), ("ł", "ä")]
    tokens = alphabet + [left + right for left, right in merges]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def byte_fallback() -> PreTrainedTokenizerFast:
    """The decoder of Llama's and Mixtral's SentencePiece tokenizers."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + [*WORDS, ""]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return wrap(backend)


def metaspace() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrap(backend)


def word_piece() -> PreTrainedTokenizerFast:
    words = ["the", "##re", "n't", "a", ".", "##s", "[UNK]"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return wrap(backend)


TOKENIZERS = {f.__name__: f() for f in (byte_level, byte_fallback, metaspace, word_piece)}


def ids_of(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert isinstance(ids, list)
    return ids


def whole(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def check(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """Asserts that what is handed out is always the beginning of the whole; returns the pieces."""
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in ids]
    pieces.append(decoder.finish())
    assert decoder.finish() == ""
    assert "".join(pieces) == whole(tokenizer, ids)
    return pieces


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_of_random_tokens_join_to_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # Two ids more than the tokenizer knows, as where the embedding is padded.
    any_id = st.integers(0, len(tokenizer) + 1)
    late_id = st.integers(max(0, len(tokenizer) - 20), len(tokenizer) + 1)
    check(tokenizer, data.draw(st.lists(any_id | late_id, max_size=60)))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_long_lists_have_the_text_of_the_tokenizers_own_way(name: str, data: st.DataObject) -> None:
    """Which keeps the interpreter."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 1), min_size=1, max_size=60))
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert decode_beside(tokenizer.backend_tokenizer, ids) == text


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=30))
def test_pieces_of_encoded_text_join_to_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = check(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    if name == "byte_level" and "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@example([0x80] * 100)
@given(st.lists(st.sampled_from([0x80, 0xBF, 0xE4, 0xF0, 0xFF]), min_size=40, max_size=80))
def test_long_runs_of_invalid_bytes(values: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    letters = ids_of(tokenizer, sorted(pre_tokenizers.ByteLevel.alphabet()))
    by_value = dict(zip(_byte_values(), letters, strict=True))
    ids = [by_value[value] for value in values]
    decoder = IncrementalDecoder(tokenizer)
    text = ""
    for token_id in ids:
        text += decoder.push(token_id)
        assert len(decoder._window) <= 32  # bounded, hence constant time a token
    assert text + decoder.finish() == bytes(values).decode(errors="replace")


def _byte_values() -> list[int]:
    """Byte of each letter of the sorted byte-level alphabet (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(256 + index): byte for index, byte in enumerate(others)}
    return [letters[letter] for letter in sorted(letters)]


def test_characters_come_whole_and_at_once() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    pieces = check(tokenizer, tokenizer.encode("a😀b"))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = ids_of(tokenizer, ["▁a", "<0xC3>", "<0xA9>", "<0xFF>", "a"])
    assert check(tokenizer, ids[:3]) == ["a", "", "", "é"]
    assert check(tokenizer, ids) == ["a", "", "", "", "\ufffd\ufffd\ufffda", ""]
    skipped = [*ids[:3], *ids_of(tokenizer, ["</s>"]), len(tokenizer), *ids[3:]]
    assert "".join(check(tokenizer, skipped)) == "a\ufffd\ufffd\ufffda"


def test_a_token_that_is_the_replacement_character_comes_at_once() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    ids = ids_of(tokenizer, ["▁a", "\N{REPLACEMENT CHARACTER}", "a"])
    assert check(tokenizer, ids) == ["a", "\N{REPLACEMENT CHARACTER}", "a", ""]


def test_a_skipped_special_token_does_not_eat_the_next_space() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = ids_of(tokenizer, ["</s>", "▁the", "</s>", "<fim>", "▁", "▁a"])
    assert check(tokenizer, ids) == ["", "the", "", "", " ", " a", ""]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_special_token_that_is_part_of_the_text_is_shown_between_what_surrounds_it(
    name: str,
) -> None:
    tokenizer = TOKENIZERS[name]
    fim, end = ids_of(tokenizer, ["<fim>", "</s>"])
    words = tokenizer.encode("the a", add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer, shown=[fim])
    pieces = [decoder.push(token_id) for token_id in (*words, fim, end, *words, fim)]
    text = "".join(pieces) + decoder.finish()
    before, between, after = text.split("<fim>")
    assert before == whole(tokenizer, words)
    assert between.strip() == before.strip()
    assert after == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_a_text_that_continues_another_has_the_space_between_them(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    size = len(tokenizer)
    before, after = (data.draw(st.lists(st.integers(0, size - 1), max_size=12)) for _ in range(2))
    decoder = IncrementalDecoder(tokenizer, behind=before)
    text = "".join(map(decoder.push, after)) + decoder.finish()
    specials = special_token_ids(tokenizer)
    ends = [place for place, token_id in enumerate(before) if token_id in specials]
    context = before[max([0, len(before) - 8, *(end + 1 for end in ends)]) :]
    start, last = whole(tokenizer, before), str(tokenizer.convert_ids_to_tokens(before[-1:]))
    continued = whole(tokenizer, before + after)[len(start) :]
    if whole(tokenizer, context) and "<0x" not in last and "\N{REPLACEMENT CHARACTER}" not in start:
        assert text == continued
    else:
        assert text in (whole(tokenizer, after), continued)


def test_words_behind_a_text_are_words_of_their_own() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    first, second, end = ids_of(tokenizer, ["▁the", "▁a", "</s>"])
    for before, expected in (([first], " a"), ([], "a"), ([first, end], "a")):
        decoder = IncrementalDecoder(tokenizer, behind=before)
        assert decoder.push(second) + decoder.finish() == expected


def test_a_tokenizer_with_a_way_of_its_own_keeps_it() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    tokenizer = Loud(tokenizer_object=TOKENIZERS["metaspace"].backend_tokenizer)
    ids = ids_of(tokenizer, ["▁a", "a"])
    assert "".join(check(tokenizer, ids)) == "AA"
