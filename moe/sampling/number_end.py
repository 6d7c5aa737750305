"""`NumberEnd`: numbers of JSON end, though its grammar lets their digits go on for ever.

A model that is sure of nothing writes ``6E1960...`` until its tokens are spent. No schema can bound
the digits of a number that may have a fraction, and llguidance takes no other grammar of numbers:
so digits are barred after a run that no number needs, where something else may follow.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer

DIGITS, EXPONENT = 40, 3
"""Digits in a row after which none may begin a token, and those of an exponent. A token may have
several: a run is longer by one token's at most."""
_LONG = re.compile(rb"[0-9]{%d}\Z|[0-9][eE][+-]?[0-9]{%d,}\Z" % (DIGITS, EXPONENT))
TAIL = DIGITS + 8
"""Bytes of a text's end that show a long number."""
_DIGITS = b"0123456789"
_NOT_BEHIND = b'"abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ'
"""No token that begins so may follow the digits of a number of JSON; inside a text one may."""


class NumberEnd:
    """Bars digits from the masks of one vocabulary, where a number has too many.

    Args:
        tokens: the vocabulary.
        vocab_size: V of the logits.
    """

    def __init__(self, tokens: LLTokenizer, vocab_size: int) -> None:
        self._tokens = tokens
        ids = range(min(vocab_size, tokens.vocab_size))
        begin = [self.bytes_of(token_id)[:1] or b" " for token_id in ids]
        begin += [b" "] * (vocab_size - len(begin))
        first = np.frombuffer(b"".join(begin), dtype=np.uint8)
        self._digits = _bits(first, _DIGITS)
        self._not_behind = _bits(first, _NOT_BEHIND)

    def bytes_of(self, token_id: int) -> bytes:
        """A token's text; none of a special token."""
        if token_id >= self._tokens.vocab_size or self._tokens.is_special_token(token_id):
            return b""
        return self._tokens.decode_bytes([token_id])

    def bar(self, bits: np.ndarray, tail: bytes) -> np.ndarray:
        """A mask of (ceil(V / 8),) bits behind a text that ends so; as it was if the text does not
        end in a long number, or nothing but digits may follow."""
        if not _LONG.search(tail) or (bits & self._not_behind).any():
            return bits
        others = bits & ~self._digits
        return others if others.any() else bits


def _bits(first: np.ndarray, among: bytes) -> np.ndarray:
    """Tokens whose first byte is among these, as `Constraint.allowed_bits` writes them."""
    chosen = np.isin(first, np.frombuffer(among, dtype=np.uint8))
    return np.packbits(chosen, bitorder="little")
