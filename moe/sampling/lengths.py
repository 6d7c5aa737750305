"""Bounds the lengths of a text's parts: `LengthRules` of one sequence.

A text does not end before so many tokens (``min_tokens``), and after so many tokens of reasoning
the model's own end of it is forced (`ThinkingBudget`). Both are restrictions of the next token, as
structures are, and a structure goes first: where it allows nothing else, the rule gives way.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy

import numpy as np

from moe.sampling.params import ThinkingBudget

Decode = Callable[[Sequence[int]], str]
_SPARE = 8  # tokens looked at beyond those of a literal: one may have space around it


class LengthRules:
    """One sequence's state under its rules of length.

    Args:
        min_tokens: the text has at least so many.
        ends: tokens that would end it.
        thinking: None: reasoning may be of any length.
        decode: the text of token ids, special tokens included.
    """

    def __init__(
        self,
        min_tokens: int,
        ends: Collection[int],
        thinking: ThinkingBudget | None,
        decode: Decode,
    ) -> None:
        self._left = min_tokens
        self._ends = sorted(ends)
        self._thinking = None if thinking is None else _Thinking(thinking, decode)

    @property
    def is_active(self) -> bool:
        """A token to come may be restricted."""
        return self._left > 0 or (self._thinking is not None and not self._thinking.is_over)

    def allowed_bits(self, bits: np.ndarray | None, vocab_size: int) -> np.ndarray | None:
        """Which tokens may come next, as of `Constraint.allowed_bits`; None: all.

        Args:
            bits: those that a structure allows; None: all.
        """
        size = -(-vocab_size // 8)
        forced = None if self._thinking is None else self._thinking.forced
        if forced is not None:
            if bits is not None and not bits[forced // 8] >> forced % 8 & 1:
                return bits
            only = np.zeros(size, np.uint8)
            only[forced // 8] = 1 << forced % 8
            return only
        if self._left <= 0 or not self._ends:
            return bits
        others = np.full(size, 255, np.uint8) if bits is None else bits.copy()
        for token_id in self._ends:
            if token_id < vocab_size:
                others[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        return others if others.any() else bits

    def take(self, token_id: int) -> None:
        """The token was generated."""
        self._left -= 1
        if self._thinking is not None:
            self._thinking.take(token_id)

    def fork(self) -> LengthRules:
        """An independent copy."""
        twin = copy(self)
        twin._thinking = None if self._thinking is None else self._thinking.fork()
        return twin


class _Thinking:
    """The place of a text in its reasoning, by its tokens.

    Attributes:
        is_over: the reasoning has ended, or there is none.
    """

    def __init__(self, budget: ThinkingBudget, decode: Decode) -> None:
        self.is_over = False
        self._budget, self._decode = budget, decode
        self._open, self._close = _squashed(budget.open), _squashed(budget.close)
        self._ids: tuple[int, ...] = ()  # since the reasoning began, or since where it may begin
        self._left = budget.tokens
        self._inside = budget.inside
        self._closing: tuple[int, ...] = ()  # what is still to be forced
        if self._inside and self._left <= 0:
            self._closing = budget.close_ids

    @property
    def forced(self) -> int | None:
        """The next token, if it is not free."""
        return self._closing[0] if self._closing else None

    def take(self, token_id: int) -> None:
        if self.is_over:
            return
        if self._closing:
            # A structure may have had it otherwise: then the end is not forced once more.
            self._closing = self._closing[1:] if token_id == self._closing[0] else ()
            if not self._closing:
                self._leave()
            return
        self._ids += (token_id,)
        if not self._inside:
            self._enter()
        else:
            self._left -= 1
            self._ids = self._ids[-len(self._budget.close) - _SPARE :]
            if self._close in _squashed(self._decode(self._ids)):
                self._leave()
        if self._inside and self._left <= 0 and not self.is_over:
            self._closing = self._budget.close_ids

    def _enter(self) -> None:
        """Find out whether the text begins with reasoning."""
        text = _squashed(self._decode(self._ids)).rstrip("\ufffd")
        if self._open and text.startswith(self._open):
            self._inside = True
            self._left -= len(self._ids)
            self._ids = ()
        elif not self._open.startswith(text):
            self.is_over = True

    def _leave(self) -> None:
        """The reasoning has ended; on channels it may begin again."""
        self._inside, self._ids = False, ()
        self.is_over = not self._budget.reopens

    def fork(self) -> _Thinking:
        return copy(self)


def _squashed(text: str) -> str:
    """A text without space, which does not matter around literals."""
    return "".join(text.split())
