"""Tokenizers of GGUF files give llama.cpp's ids: for its own vocabularies, and for small ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from moe.errors import UnsupportedModelError
from moe.loading.gguf.header import open_gguf
from moe.loading.gguf.pre_tokenizers import ADD_BOS, IGNORE_MERGES, PLAIN, SPLITS
from moe.loading.gguf.tokenizer import made_tokenizer, write_tokenizer
from moe.text.tokenizer import load_tokenizer
from tests.world.files import LLAMA_CPP, needed

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# llama.cpp's vocabularies --------------------------------------------------------------------

REFUSED = {
    "aquila": "splits text as None",
    "bert-bge": "of the kind 'bert'",
    "gpt-neox": "splits text as None",
    "nomic-bert-moe": "of the kind 't5'",
}
SMALL = ["gpt-2", "mpt", "phi-3", "llama-spm", "falcon", "refact", "starcoder", "deepseek-coder"]
LARGE = ["baichuan", "command-r", "deepseek-llm", "gemma-4", "llama-bpe", "qwen2", "qwen35"]


def vocabulary(name: str) -> tuple[Path, dict[str, Any]]:
    path = needed(LLAMA_CPP) / "models" / f"ggml-vocab-{name}.gguf"
    file = open_gguf(path)
    os.close(file.fd)
    return path, file.metadata


@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(n, marks=pytest.mark.deep) for n in LARGE)]
)
def test_ids_are_those_that_llama_cpp_wrote_down(name: str) -> None:
    path, metadata = vocabulary(name)
    tokenizer = made_tokenizer(metadata)
    if name == "baichuan":  # it has no expected ids
        return
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    for text, ids in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(i) for i in ids.split()]
    assert len(texts) >= 46


@pytest.mark.parametrize("name", REFUSED)
def test_vocabularies_that_do_not_say_how_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        made_tokenizer(vocabulary(name)[1])


def test_no_vocabulary_of_llama_cpp_is_left_out() -> None:
    found = (needed(LLAMA_CPP) / "models").glob("ggml-vocab-*.gguf")
    names = {file.stem.removeprefix("ggml-vocab-") for file in found}
    assert names == {*SMALL, *LARGE, *REFUSED}


# Small vocabularies ---------------------------------------------------------------------------

ALPHABET = sorted(ByteLevel.alphabet())


def keys(tokens: list[str], types: list[int] | None = None, **more: Any) -> dict[str, Any]:
    named = {"tokens": tokens, "token_type": types or [NORMAL] * len(tokens), **more}
    return {f"tokenizer.ggml.{key}": value for key, value in named.items()}


def byte_level(
    more: list[str], types: list[int], merges: list[str], pre: str, **others: Any
) -> dict[str, Any]:
    kinds = [NORMAL] * len(ALPHABET) + types
    named: dict[str, Any] = {"model": "gpt2", "pre": pre, "merges": merges, **others}
    return keys(ALPHABET + more, kinds, **named)


def pieces(metadata: dict[str, Any], text: str, special: bool = False) -> list[str]:
    made = made_tokenizer(metadata)
    ids = made.encode(text, add_special_tokens=special)
    tokens: list[str] = made.convert_ids_to_tokens(ids)
    return tokens


@pytest.mark.parametrize("pre", sorted(set(SPLITS) - PLAIN))
def test_tokens_of_the_user_stand_in_texts_as_the_file_spells_them(pre: str) -> None:
    """Runs of spaces, tabs and line ends, letters that bytes are written with, other scripts."""
    own = ["  ", "   ", "\t\t", "\n\n\n", "é!", "<think>", "Ġn", "思考"]
    made = made_tokenizer(byte_level(own, [USER_DEFINED] * len(own), [], pre))
    for text in own:
        assert made.convert_ids_to_tokens(made.encode(f"i{text}f")) == ["i", text, "f"]
    assert made.convert_ids_to_tokens(made.encode("     if")) == ["   ", "  ", "i", "f"]
    assert made.convert_ids_to_tokens(made.encode(" no")) == ["Ġ", "n", "o"]
    assert made.decode(made.encode("a   b\t\t<think>c")) == "a   b\t\t<think>c"
    assert made.all_special_ids == []


@pytest.mark.parametrize("pre", sorted(set(SPLITS) - PLAIN))
def test_a_token_that_no_merge_leads_to_is_found_where_the_name_says_so(pre: str) -> None:
    whole = pieces(byte_level(["xyz"], [NORMAL], [], pre), "xyz")
    assert whole == (["xyz"] if pre in IGNORE_MERGES else ["x", "y", "z"])


@pytest.mark.parametrize("pre", sorted(SPLITS))
@pytest.mark.parametrize("said", [None, True, False])
def test_a_text_begins_with_bos_as_the_file_says_or_the_name(pre: str, said: bool | None) -> None:
    others = {"bos_token_id": 257} | ({} if said is None else {"add_bos_token": said})
    metadata = byte_level(["ab", "<bos>"], [NORMAL, CONTROL], ["a b"], pre, **others)
    expected = ["<bos>", "ab"] if (pre in ADD_BOS if said is None else said) else ["ab"]
    assert pieces(metadata, "ab", special=True) == expected
    assert pieces(metadata, "ab") == ["ab"]


def test_the_names_that_llama_cpp_begins_with_bos() -> None:
    llama3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken"
    assert {*llama3.split(), "gemma4"} == ADD_BOS
    assert {*llama3.split(), "glm4", "glm5"} == IGNORE_MERGES


@pytest.mark.parametrize("said", [None, True, False])
def test_gemma_4_obeys_the_file(said: bool | None) -> None:
    others = {} if said is None else {"add_bos_token": said}
    tokens = ["<bos>", "a", "▁", "▁a", "\n", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [CONTROL, *[NORMAL] * 5, *[BYTE] * 256]
    merges = ["▁ a", "\n \n"]
    metadata = keys(tokens, types, model="gemma4", bos_token_id=0, merges=merges, **others)
    expected = ["▁a", "\n\n", "a", "<0xC3>", "<0xA9>"]
    assert pieces(metadata, " a\n\naé") == expected
    begin = [] if said is False else ["<bos>"]
    assert pieces(metadata, " a\n\naé", special=True) == begin + expected
    made = made_tokenizer(metadata)
    assert made.decode(made.encode(" a\n\naé"), skip_special_tokens=True) == " a\n\naé"


def test_end_of_turn_tokens_of_careless_converters_are_found() -> None:
    metadata = byte_level(["<|im_end|>"], [NORMAL], [], "qwen2")
    assert pieces(metadata, "a<|im_end|>") == ["a", "<|im_end|>"]
    assert made_tokenizer(metadata).decode([0, 256], skip_special_tokens=True) == ALPHABET[0]


def test_merges_of_what_is_no_token_never_happen() -> None:
    metadata = byte_level(["ab"], [NORMAL], ["a b", "ab c", "zz q"], "gpt-2")
    assert pieces(metadata, "abc") == ["ab", "c"]


@pytest.mark.parametrize("pre", ["afmoe", "kimi-k2", "default", "", None, "qwen2 "])
def test_a_way_to_split_text_that_is_not_known_is_refused(pre: Any) -> None:
    with pytest.raises(UnsupportedModelError) as found:
        made_tokenizer(byte_level([], [], [], pre))
    assert f"splits text as {pre!r} (tokenizer.ggml.pre), which is not known" in str(found.value)
    assert "bailingmoe, bailingmoe2" in str(found.value)


def test_a_tokenizer_that_cannot_be_made_names_the_file(tmp_path: Path) -> None:
    real = tmp_path / "real-Q4_K_M.gguf"
    real.touch()
    (tmp_path / "00000.gguf").symlink_to(real)
    write_tokenizer(tmp_path, "00000.gguf", keys(["a"], model="rwkv"))
    _, why = load_tokenizer(tmp_path)
    assert why == (
        "the tokenizer of real-Q4_K_M.gguf cannot be used: it is of the kind 'rwkv' "
        "(tokenizer.ggml.model), which is not known; known are gemma4, gpt2, llama"
    )


# SentencePiece ----------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", "<|x|>", *(f"<0x{byte:02X}>" for byte in range(256))]
KINDS = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256]
WORDS = ["▁", "a", "b", "ab", "▁a", "▁▁", "ba", "aba", "▁ab", "▁▁▁▁", "bb", "▁aba"]


def sentencepiece(scores: list[float], **others: Any) -> dict[str, Any]:
    kinds = KINDS + [NORMAL] * len(WORDS)
    named: dict[str, Any] = {"model": "llama", "pre": "default", "scores": [0.0] * 260 + scores}
    return keys(PIECES + WORDS, kinds, **named | others)


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """By the rule: of neighbours that make a token, those with the best score, leftmost first."""
    symbols = list(text)
    while True:
        pairs = range(len(symbols) - 1)
        joined = [(-scores[s], i) for i in pairs if (s := symbols[i] + symbols[i + 1]) in scores]
        if not joined:
            break
        at = min(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        piece
        for s in symbols
        for piece in ([s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()])
    ]


@given(
    text=st.lists(st.sampled_from(["a", "b", " ", "é", "<|x|>", "</s>"]), max_size=12),
    order=st.permutations(range(len(WORDS))),
    prefix=st.booleans(),
)
def test_sentencepiece_merges_by_score_and_puts_a_space_before(
    text: list[str], order: list[int], prefix: bool
) -> None:
    scores = dict(zip(WORDS, (-1.0 - i for i in order), strict=True))
    metadata = sentencepiece(list(scores.values()), add_space_prefix=prefix)
    expected, part = ["<s>"], ""
    for piece in [*text, "</s>"]:
        if piece not in ("<|x|>", "</s>"):
            part += piece
            continue
        if part:
            expected += merged((" " * prefix + part).replace(" ", "▁"), scores)
        expected.append(piece)
        part = ""
    made = made_tokenizer(metadata)
    ids = made.encode("".join([*text, "</s>"]))
    assert made.convert_ids_to_tokens(ids) == expected


@pytest.mark.parametrize(
    ("said", "text", "expected"),
    [
        (None, "a", ["▁a"]),
        (None, " a", ["▁", "▁a"]),
        (True, "  a", ["▁▁", "▁a"]),
        (False, "a", ["a"]),
        (False, " a", ["▁a"]),
        (None, "", []),
    ],
)
def test_the_space_before_a_text(said: bool | None, text: str, expected: list[str]) -> None:
    others = {} if said is None else {"add_space_prefix": said}
    metadata = sentencepiece([-float(i) for i in range(len(WORDS))], **others)
    scores = {word: -float(i) for i, word in enumerate(WORDS)}
    assert expected == merged(
        (" " * (said is not False and bool(text)) + text).replace(" ", "▁"), scores
    )
    assert pieces(metadata, text) == expected
    made = made_tokenizer(metadata)
    assert made.decode(made.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, ["<s>", "▁a"]),
        ({"add_bos_token": False}, ["▁a"]),
        ({"add_eos_token": True}, ["<s>", "▁a", "</s>"]),
    ],
)
def test_sentencepiece_begins_with_bos_unless_the_file_says_otherwise(
    others: dict[str, bool], expected: list[str]
) -> None:
    metadata = sentencepiece([-float(i) for i in range(len(WORDS))], **others)
    assert pieces(metadata, "a", special=True) == expected


@pytest.mark.parametrize(("name", "takes"), [("Phi-3.5-MoE", True), ("Mixtral", False)])
def test_special_tokens_of_phi_3_take_the_space_behind_them(name: str, takes: bool) -> None:
    metadata = sentencepiece([-float(i) for i in range(len(WORDS))])
    found = pieces(metadata | {"general.name": name}, "<|x|> a</s> a<s> a")
    behind = ["▁a"] if takes else ["▁", "▁a"]
    assert found == ["<|x|>", *behind, "</s>", *behind, "<s>", "▁", "▁a"]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"scores": [0.0]}, "it has 1 scores of 2 tokens"),
        ({"tokens": ["a", "b" * 257]}, "a token has 257 characters, .* at most 256"),
    ],
)
def test_damaged_vocabularies_are_refused(others: dict[str, Any], why: str) -> None:
    named: dict[str, Any] = {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, 0.0], **others}
    tokens = named.pop("tokens")
    with pytest.raises(UnsupportedModelError, match=why):
        made_tokenizer(keys(tokens, **named))
