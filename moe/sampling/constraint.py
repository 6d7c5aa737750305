"""Structured outputs: which tokens may come next in a sequence that follows a structure.

llguidance compiles the grammars. Each token's mask is computed from the sequence's own state, so
it does not depend on other sequences of the batch.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any, Protocol, cast

import llguidance.hf
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from moe.errors import RequestError, StructureError
from moe.sampling.grammar import LIMITS, fault, grammar_of
from moe.sampling.params import SamplingParams, Structure

_SPECIAL = re.compile(r"<\[[^\]\s]*\]>|<\|[^|<>\s]+\|>")  # tokens by number or name


class Vocabulary(Protocol):
    """The part of `moe.text.tokenizer.TextCodec` that structures need."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def require_tokenizer(self, what: str) -> Any: ...


class Constraint:
    """One sequence's state in its structure.

    Args:
        matcher: at the beginning of the text.
        vocab_size: V of the logits.
        barred: tokens that are never allowed, even by the structure.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, barred: Iterable[int] = ()) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._barred = [token_id for token_id in barred if token_id < vocab_size]

    @property
    def is_over(self) -> bool:
        """The text is complete and nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed_V(self) -> np.ndarray:
        """Which tokens may come next: (V,) bool. Raises `StructureError` if that is too complex."""
        assert not self.is_over
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        allowed: np.ndarray = bits.view(np.bool_)
        allowed[self._barred] = False
        return allowed

    def take(self, token_id: int) -> None:
        """Advance by an allowed token. Raises `StructureError` if that is too complex."""
        self._matcher.consume_token(token_id)
        self._check()

    def fork(self) -> Constraint:
        """An independent copy."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size, self._barred)

    def _check(self) -> None:
        if self._matcher.is_error():
            why = " ".join(str(self._matcher.get_error()).split())
            raise StructureError(
                f"the structure cannot be followed any further: {why[:300]}; make it simpler"
            )


class Structures:
    """Compiles structures for one model.

    Args:
        codec: its tokenizer, and the tokens that end a text.
        vocab_size: V of its logits.
    """

    def __init__(self, codec: Vocabulary, vocab_size: int) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | str | None = None
        self._lock = threading.Lock()

    def check(self, structure: Structure) -> None:
        """Raise `RequestError`, with the reason, if a structure cannot be followed.

        Takes a tenth of a second for a new structure.
        """
        self._tokenizer()
        source = structure.source
        if structure.kind == "grammar":  # `constraint` checks which special tokens exist
            source = _SPECIAL.sub("<[0]>", source)
        if why := fault(structure.kind, source):
            for name, part in structure.parts:
                if its_own := fault(part.kind, part.source):
                    raise _refusal(name, its_own, part.source)
            raise _refused(structure, why)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """A new sequence's constraint; None without a structure. `check` must have passed.

        If the model has no end tokens, or the request ignores them (``ignore_eos``), the text goes
        on for as long as its structure allows.
        """
        structure = params.structure
        if structure is None:
            return None
        tokens = self._tokenizer()
        grammar = grammar_of(structure.kind, structure.source)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        goes_on = params.ignore_eos or not self._codec.eos_token_ids
        return Constraint(matcher, self._vocab_size, tokens.eos_tokens if goes_on else ())

    def _tokenizer(self) -> LLTokenizer:
        """The tree of the tokens' bytes, made on first use: that takes up to a few seconds."""
        with self._lock:
            if self._tokens is None:
                self._tokens = self._made()
        if isinstance(self._tokens, str):
            raise RequestError(self._tokens)
        return self._tokens

    def _made(self) -> LLTokenizer | str:
        """The tree, or why there is none."""
        tokenizer = self._codec.require_tokenizer("structured outputs")
        ends = sorted(i for i in self._codec.eos_token_ids if i < self._vocab_size)
        size = max(self._vocab_size, len(tokenizer))
        try:
            return llguidance.hf.from_tokenizer(cast(Any, tokenizer), size, ends or None)
        except Exception as error:  # llguidance raises many types for tokenizers it cannot read
            return (
                "structured outputs need a fast tokenizer whose tokens are bytes, and this "
                f"model's is not ({error})"
            )


def _refused(structure: Structure, why: str) -> RequestError:
    if not structure.parts:
        return _refusal(structure.name, why, structure.source)
    names = ", ".join(name for name, _ in structure.parts)
    return _refusal(f"what is made of {names[:200]}", why, "")


def _refusal(name: str, why: str, source: str) -> RequestError:
    why = " ".join(why.split())
    shown = source if len(source) <= 80 else f"{source[:77]}..."
    got = f"; got {shown}" if source else "; make it simpler"
    return RequestError(f"{name} cannot be followed: {why[:300]}{got}")
