"""The tokenizer of a GGUF file, made of its keys, as the files that transformers reads.

It gives llama.cpp's ids. A file leaves a part to llama.cpp by a name (``tokenizer.ggml.pre``, see
`pre_tokenizers`). A name that is not known would give other tokens than the model was trained on,
so such a tokenizer is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moe.errors import UnsupportedModelError
from moe.loading.gguf.pre_tokenizers import ADD_BOS, IGNORE_MERGES, PLAIN, SPLITS
from moe.text.detokenize import without_panics
from moe.text.tokenizer import WHY_NONE

_SENTENCEPIECE, _BYTE_LEVEL, _GEMMA4 = KINDS = ("llama", "gpt2", "gemma4")
"""Kinds of tokenizers (``tokenizer.ggml.model``) that can be made."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's types of tokens
_SPACE = "\u2581"
_LONGEST_PIECE = 256  # characters; each is cut at each place
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}

# Files of some converters call these normal tokens. llama.cpp takes them as control tokens by name.
_ALWAYS_CONTROL = frozenset(
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *(
            "<|calls|>",
            "<end_of_turn>",
            "<|endoftext|>",
            "<|eom_id|>",
            "<EOT>",
            "_<EOT>",
            "[EOT]",
            "[EOS]",
        ),
        *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|fim_repo|>"),
        *("<|file_sep|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    ]
)
# llama.cpp's list has </s>, too, which is text in vocabularies such as Qwen's.
_NOT_STRIPPED = {"<unk>", "<s>", "<|endoftext|>"}

_logger = logging.getLogger(__name__)


def write_tokenizer(directory: Path, file: str, metadata: Mapping[str, Any]) -> None:
    """Write the tokenizer of a GGUF file in a model directory; where it cannot be used, why.

    Args:
        file: what the GGUF file, or a link to it, is called in the directory.
    """
    if not metadata.get("tokenizer.ggml.tokens"):
        return
    try:
        make = partial(made_tokenizer, metadata)
        without_panics(make, "be made").save_pretrained(directory)
    except Exception as error:  # as of any damaged tokenizer
        name = (directory / file).resolve().name
        why = f"the tokenizer of {name} cannot be used: {error or type(error).__name__}"
        (directory / WHY_NONE).write_text(why, encoding="utf-8")
        _logger.warning("%s; prompts can only be token ids", why)


def made_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """transformers' tokenizer by the keys of a GGUF file.

    Raises:
        UnsupportedModelError: it is of a kind that is not known, or splits text in such a way.
    """
    from transformers import PreTrainedTokenizerFast

    keys = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, pre = keys.get("model"), keys.get("pre")
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"it is of the kind {kind!r} (tokenizer.ggml.model), which is not known; known are "
            f"{', '.join(sorted(KINDS))}"
        )
    if kind == _GEMMA4:
        pre = _GEMMA4
    if kind == _BYTE_LEVEL and pre not in SPLITS:
        raise UnsupportedModelError(
            f"it splits text as {pre!r} (tokenizer.ggml.pre), which is not known; known are "
            f"{', '.join(sorted(SPLITS))}"
        )
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(keys["tokens"])]
    defaults = _SENTENCEPIECE_IDS if kind == _SENTENCEPIECE else {}
    named = {
        name: _token(tokens, keys.get(f"{key}_token_id", defaults.get(key)))
        for name, key in _NAMED.items()
    }
    made = (
        _sentencepiece(tokens, keys, named["unk_token"])
        if kind == _SENTENCEPIECE
        else _of_merges(tokens, keys, str(pre), named["unk_token"])
    )
    strips = _strips_after_specials(str(metadata.get("general.name", "")))
    for is_special, group in _added(tokens, keys.get("token_type") or (), strips):
        (made.add_special_tokens if is_special else made.add_tokens)(group)
    begins = kind == _SENTENCEPIECE or pre in ADD_BOS
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        **{name: text for name, text in named.items() if text is not None},
        add_bos_token=bool(keys.get("add_bos_token", begins)),
        add_eos_token=bool(keys.get("add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
"""Names of tokens that have a task: transformers' and llama.cpp's."""


def _token(tokens: Sequence[str], token_id: object) -> str | None:
    """The text of a token; None without it, or with an id that the vocabulary does not have."""
    if type(token_id) is int and 0 <= token_id < len(tokens):
        return tokens[token_id]
    return None


def _of_merges(tokens: list[str], keys: Mapping[str, Any], pre: str, unknown: str | None) -> Any:
    """A vocabulary whose merges the file lists: byte-level ones, and Gemma 4's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {text: i for i, text in enumerate(tokens)}
    # A merge of what is no token never happens; one to no token would lose text.
    cut = (_halves(merge) for merge in keys["merges"])
    merges = [each for each in cut if {*each, "".join(each)} <= ids.keys()]
    plain = pre in PLAIN
    made = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=unknown if plain else None,
            fuse_unk=plain,
            byte_fallback=plain,
            ignore_merges=pre in IGNORE_MERGES,
        )
    )
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(each), behavior="isolated") for each in SPLITS[pre]
    ]
    if plain:
        made.normalizer = normalizers.Replace(" ", _SPACE)
        made.decoder = decoders.Sequence(_of_pieces(decoders))
    else:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return made


def _halves(merge: str) -> tuple[str, str]:
    """The two tokens of a merge; the first may be a space."""
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentencepiece(tokens: list[str], keys: Mapping[str, Any], unknown: str | None) -> Any:
    """A SentencePiece vocabulary: two neighbours become the token with the best score.

    A space stands before a text, and before text behind a special token, unless the file says
    otherwise (``add_space_prefix``).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {text: i for i, text in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges_by_score(tokens, ids, keys["scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    pieces = _of_pieces(decoders)
    if keys.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        pieces.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(spaces)
    made.decoder = decoders.Sequence(pieces)
    return made


def _of_pieces(decoders: Any) -> list[Any]:
    return [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _merges_by_score(
    tokens: Sequence[str], ids: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All ways to make a token of two, the token with the best score first."""
    if len(scores) < len(tokens):
        raise UnsupportedModelError(f"it has {len(scores)} scores of {len(tokens)} tokens")
    if (longest := max(map(len, tokens))) > _LONGEST_PIECE:
        raise UnsupportedModelError(
            f"a token has {longest} characters, and a piece of SentencePiece at most "
            f"{_LONGEST_PIECE}"
        )
    order = sorted(range(len(tokens)), key=lambda i: -scores[i])
    return [
        (text[:at], text[at:])
        for text in (tokens[i] for i in order)
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]


def _added(
    tokens: Sequence[str], types: Sequence[int], strips: bool
) -> Iterable[tuple[bool, list[Any]]]:
    """The tokens that are found in a text before anything else: special ones, and the others.

    A token that the user defined is spelled as it stands in texts, in byte-level vocabularies, too.
    """
    from tokenizers import AddedToken

    special, plain = [], []
    for text, type_ in zip(tokens, types, strict=False):
        if type_ in (_UNKNOWN, _CONTROL) or text in _ALWAYS_CONTROL:
            strip = strips and text not in _NOT_STRIPPED
            special.append(AddedToken(text, normalized=False, special=True, rstrip=strip))
        elif type_ == _USER_DEFINED:
            plain.append(AddedToken(text, normalized=False, rstrip=strips))
    return (True, special), (False, plain)


def _strips_after_specials(name: str) -> bool:
    """Return whether special tokens take the space after them, which no key says: Phi 3's do."""
    return any(each in name.lower() for each in ("phi-3", "phi3"))
