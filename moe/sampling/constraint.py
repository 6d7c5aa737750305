"""Structured outputs: which tokens may come next in a sequence that follows a structure.

llguidance compiles the grammars. Each token's mask is computed from the sequence's own state, so
it does not depend on other sequences of the batch.

A mask usually takes a tenth of a millisecond, and some structures make it take seconds. So masks
are computed in threads of their own, while the model computes the logits; a sequence whose mask is
late keeps its logits, and the step goes on without it. One whose mask costs too much ends.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from moe.errors import BusyError, RequestError, StructureError
from moe.fair_pool import FairPool
from moe.helpers import HelperLimitError, Helpers
from moe.sampling.lengths import LengthRules
from moe.sampling.number_end import TAIL, NumberEnd
from moe.sampling.params import SamplingParams, Structure

# What needs llguidance imports it where a structure is asked for: text without one needs none.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MASK_SECONDS = 0.1
"""Most seconds of a processor for one mask, by this machine's clock."""
_PROMPT_S = 0.002
"""Until this long after it began a mask is waited for, even if the step's time is up."""
_THREADS = 4
_KNOWN = 64
_SPECIAL = re.compile(r"<\[[^\]\s]*\]>|<\|[^|<>\s]+\|>")  # tokens by number or name


CPU_SECONDS, MEMORY = 2, 2**31
TOO_COMPLEX = (
    f"it takes more than {CPU_SECONDS} s of a processor or {MEMORY >> 20} MiB to compile, or is "
    "nested too deeply"
)
COMPILERS = Helpers(
    Path(__file__).with_name("grammar.py"), memory=MEMORY, seconds=CPU_SECONDS, most_bytes=2**20
)


def fault(kind: str, source: str) -> str:
    """Why a structure cannot be followed, or "" if it can; see `faults`."""
    return faults(((kind, source),))[0]


@lru_cache(maxsize=256)
def faults(structures: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Why each structure, a kind and its source, cannot be followed, or "" if it can.

    One helper process tries them; its limits hold for all of them.

    Raises `BusyError` if the machine is too busy to find out; nothing is remembered then.
    """
    if not structures:
        return ()
    try:
        return tuple(json.loads(COMPILERS.ask(json.dumps(structures).encode())))
    except HelperLimitError:
        return (TOO_COMPLEX,) * len(structures)


class Vocabulary(Protocol):
    """The part of `moe.text.tokenizer.TextCodec` that structures need."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def require_tokenizer(self, what: str) -> Any: ...
    def special_tokens(self, stop: Collection[str]) -> dict[int, str]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class MaskLateError(Exception):
    """The mask of the next token is not there yet; the sequence can try again with its logits."""


class MaskThreads:
    """Computes the masks of one request's sequences, one at a time.

    Args:
        pool: shared by all requests; each has one of its threads.
        on_excess: called once a mask has cost too much.
    """

    def __init__(
        self, pool: FairPool | None = None, on_excess: Callable[[], None] = lambda: None
    ) -> None:
        self._pool = pool or FairPool(1, "moe-mask", each=1)
        self._on_excess = on_excess

    def submit(self, work: Callable[[], bytes]) -> Future[bytes]:
        """Raises `StructureError` from the future if the work takes too long."""

        def timed() -> bytes:
            start = time.thread_time()
            bits = work()
            if time.thread_time() - start > MASK_SECONDS:
                self._on_excess()
                raise _too_costly()
            return bits

        return self._pool.submit(self, timed)


def _too_costly() -> StructureError:
    return StructureError(
        f"the structure cannot be followed any further: a token takes more than {MASK_SECONDS:g} s "
        "of a processor; make it simpler"
    )


class Constraint:
    """One sequence's state in its structure.

    Args:
        matcher: at the beginning of the text; None: a fork of a constraint that was busy, which
            never has a mask.
        vocab_size: V of the logits.
        barred: tokens that are never allowed, even by the structure.
        threads: compute the masks.
        numbers: bars digits of numbers that do not end; None: the structure has no JSON.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        vocab_size: int,
        barred: Iterable[int] = (),
        threads: MaskThreads | None = None,
        numbers: NumberEnd | None = None,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._barred = [token_id for token_id in barred if token_id < vocab_size]
        self._threads = threads or MaskThreads()
        self._numbers, self._tail = numbers, b""
        self._mask: Future[bytes] | None = None
        self._begun = 0.0
        self._until = math.inf
        self._is_slow = False

    @property
    def is_over(self) -> bool:
        """The text is complete and nothing may follow."""
        matcher = self._idle_matcher()
        return bool(matcher.is_stopped()) and not matcher.is_error()

    def begin_mask(self) -> None:
        """Start to compute the mask of the next token, in another thread, once there is one."""
        if self._mask is None and self._matcher is not None and not self.is_over:
            self._begun = time.monotonic()
            with suppress(BusyError):
                self._mask = self._threads.submit(self._matcher.compute_bitmask)

    def wait_until(self, until: float) -> None:
        """Set when masks are late: after this time of `time.monotonic`."""
        self._until = until

    def allowed_bits(self) -> np.ndarray:
        """Which tokens may come next: (ceil(V / 8),) uint8, bit ``i % 8`` of byte ``i // 8``.

        Raises:
            StructureError: that is too complex.
            MaskLateError: it is not known in time.
        """
        self.begin_mask()
        matcher = self._idle_matcher()
        if self._mask is None:  # no thread to be had
            time.sleep(_PROMPT_S)
            raise MaskLateError
        known = np.frombuffer(self._mask.result(), dtype=np.uint8)
        self._check(matcher)
        bits = np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
        bits[: len(known)] = known[: len(bits)]
        for token_id in self._barred:
            bits[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        return bits if self._numbers is None else self._numbers.bar(bits, self._tail)

    def take(self, token_id: int) -> None:
        """Advance by an allowed token. Raises `StructureError` if that is too complex."""
        matcher = self._idle_matcher()
        self._mask = None
        matcher.consume_token(token_id)
        self._check(matcher)
        if self._numbers is not None:
            self._tail = (self._tail + self._numbers.bytes_of(token_id))[-TAIL:]

    def fork(self) -> Constraint:
        """An independent copy."""
        try:
            matcher = self._idle_matcher().deep_copy()
        except MaskLateError:
            matcher = None
        twin = Constraint(matcher, self._vocab_size, self._barred, self._threads, self._numbers)
        twin._tail = self._tail
        twin._mask, twin._begun = self._mask, self._begun
        twin._until, twin._is_slow = self._until, self._is_slow
        return twin

    def _idle_matcher(self) -> LLMatcher:
        """The matcher, which no thread uses. Raises `MaskLateError` if that is not so in time."""
        if self._matcher is None:
            raise MaskLateError
        if self._mask is not None and not self._mask.done():
            until = self._until if self._is_slow else max(self._until, self._begun + _PROMPT_S)
            left = max(until - time.monotonic(), 0.0)
            try:
                self._mask.exception(None if math.isinf(left) else left)
            except FutureTimeoutError:
                self._is_slow = True
                raise MaskLateError from None
        return self._matcher

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            from moe.sampling.grammar import why_not_further

            why = why_not_further(str(matcher.get_error()))
            raise StructureError(
                f"the structure cannot be followed any further: {why}; make it simpler"
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
        self._numbers: NumberEnd | None = None
        self._lock = threading.Lock()
        self._pool = FairPool(_THREADS, "moe-mask", each=1)
        self._excessive: OrderedDict[Structure, None] = OrderedDict()

    def check(self, structure: Structure) -> None:
        """Raise `RequestError`, with the reason, if a structure cannot be followed.

        Takes a tenth of a second for a new structure.

        Raises:
            BusyError: the machine is too busy to find out.
        """
        self._tokenizer()
        if structure in self._excessive:
            raise _refused(structure, str(_too_costly()))
        source = structure.source
        if structure.kind == "grammar":  # `constraint` checks which special tokens exist
            source = _SPECIAL.sub("<[0]>", source)
        (why,) = faults(((structure.kind, source),))
        # A part may have dead ends that texts of the whole are too long to come to.
        own = faults(tuple((part.kind, part.source) for _, part in structure.parts))
        for (name, part), its_own in zip(structure.parts, own, strict=True):
            if its_own and (why or its_own != TOO_COMPLEX):
                raise _refusal(name, its_own, part.source)
        if why:
            raise _refused(structure, why)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """A new sequence's constraint; None without a structure. `check` must have passed.

        Its first mask is being computed.

        If the model has no end tokens, or the request ignores them (``ignore_eos``), the text goes
        on for as long as its structure allows.
        """
        structure = params.structure
        if structure is None:
            return None
        tokens = self._tokenizer()
        from llguidance import LLMatcher

        from moe.sampling.grammar import LIMITS, grammar_of

        grammar = grammar_of(structure.kind, structure.source)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        goes_on = params.ignore_eos or not self._codec.eos_token_ids
        threads = MaskThreads(self._pool, partial(self._remember, structure))
        barred = tokens.eos_tokens if goes_on else ()
        has_json = structure.kind == "json_schema" or "%json" in structure.source
        numbers = self._numbers if has_json else None
        made = Constraint(matcher, self._vocab_size, barred, threads, numbers)
        made.begin_mask()
        return made

    def lengths(self, params: SamplingParams) -> LengthRules | None:
        """A new sequence's rules of length; None: it has none."""
        if not params.min_tokens and params.thinking is None:
            return None
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self._codec.eos_token_ids
        if params.stop and params.min_tokens:
            ends |= self._codec.special_tokens(params.stop).keys()
        return LengthRules(params.min_tokens, ends, params.thinking, self._codec.decode)

    def _remember(self, structure: Structure) -> None:
        """This structure has cost too much: `check` refuses it from now on."""
        self._excessive[structure] = None
        while len(self._excessive) > _KNOWN:
            self._excessive.popitem(last=False)

    def _tokenizer(self) -> LLTokenizer:
        """The tree of the tokens' bytes, made on first use: that takes up to a few seconds."""
        with self._lock:
            if self._tokens is None:
                self._tokens = self._made()
                if not isinstance(self._tokens, str):
                    self._numbers = NumberEnd(self._tokens, self._vocab_size)
        if isinstance(self._tokens, str):
            raise RequestError(self._tokens)
        return self._tokens

    def _made(self) -> LLTokenizer | str:
        """The tree, or why there is none."""
        tokenizer = self._codec.require_tokenizer("structured outputs")
        ends = sorted(i for i in self._codec.eos_token_ids if i < self._vocab_size)
        size = max(self._vocab_size, len(tokenizer))
        try:
            import llguidance.hf
        except ImportError:
            return "structured outputs need llguidance; install it (pip install 'llguidance>=1.9')"
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
