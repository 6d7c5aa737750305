"""The bytes of single tokens, for four kinds of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.text.detokenize import TokenBytes
from tests.moe.text.test_detokenize import TOKENIZERS, ids_of

TEXTS = st.text("aä½é你😀. \n", max_size=12)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=TEXTS)
def test_pieces_joined_are_the_text_also_where_tokens_are_parts_of_characters(
    name: str, text: str
) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = TokenBytes(tokenizer)
    ids = tokenizer.encode("a" + text, add_special_tokens=False)
    joined = b"".join(map(pieces.of, ids)).decode()
    assert joined.removeprefix(" ") == "a" + text  # which some tokenizers put in front


def test_tokens_keep_their_space_and_differ() -> None:
    """At the start of a text it is left out, so that two tokens seemed the same."""
    for name, tokens in (
        ("byte_fallback", {"the": b"the", "▁the": b" the", "▁": b" ", "<0xC3>": b"\xc3"}),
        ("metaspace", {"the": b"the", "▁the": b" the", "▁": b" "}),
        ("byte_level", {"Ġ": b" ", "Ġä": b" \xe4", "½": b"\xbd"}),
        ("word_piece", {"a": b" a", "##re": b"re"}),
    ):
        pieces = TokenBytes(TOKENIZERS[name])
        ids = ids_of(TOKENIZERS[name], list(tokens))
        assert [pieces.of(token_id) for token_id in ids] == list(tokens.values())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_and_unknown_tokens_are_as_decoding_shows_them(name: str) -> None:
    pieces = TokenBytes(TOKENIZERS[name])
    assert pieces.of(ids_of(TOKENIZERS[name], ["</s>"])[0]) == b"</s>"
    replaced = ids_of(TOKENIZERS[name], ["\N{REPLACEMENT CHARACTER}!"])[0]
    assert pieces.of(replaced).strip() == "\N{REPLACEMENT CHARACTER}!".encode()
    assert pieces.of(100_000) == b""
