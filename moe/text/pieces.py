"""What single tokens stand for, as bytes: a token may be half a character, and joined they are the
text that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.text.detokenize import BYTE_TOKEN, REPLACEMENT, special_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEFORE = "a"  # a tokenizer may strip what a text begins with, such as a space
# How byte-level tokenizers write bytes, since GPT-2: those that can be shown as they are.
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = sorted(set(range(256)) - set(_SHOWN))
_BYTES = {chr(byte): byte for byte in _SHOWN}
_BYTES |= {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}


class Pieces:
    """The bytes of each token of a tokenizer, in the midst of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)
        before = tokenizer.convert_tokens_to_ids(_BEFORE)
        self._before: list[int] = []
        if isinstance(before, int) and self._decode([before]) == _BEFORE:
            self._before.append(before)

    def of(self, token_id: int) -> bytes:
        text = self._text(token_id)
        if REPLACEMENT in text:
            token = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
            if found := BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(found[1])
            if all(character in _BYTES for character in token):
                return bytes(_BYTES[character] for character in token)
        return text.encode()

    def _text(self, token_id: int) -> str:
        if self._before and token_id not in self._special_ids:
            text = self._decode([*self._before, token_id])
            if text.startswith(_BEFORE):
                return text.removeprefix(_BEFORE)
        return self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
