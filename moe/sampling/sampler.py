"""The next tokens of a batch, from rows of logits.

Each sequence owns a `Sampler` with its own penalties and its own random numbers, so that what a
request gets never depends on who else is in the batch. `NextTokens` draws the next token of many
at once, and `verify` the next tokens of many with drafts, on the device where their logits are:
everything that a step's draws depend on is copied there, and one readback brings tokens and
log-probabilities.

The order of the steps is fixed: bias -> penalties -> structure -> temperature -> top-k -> top-p ->
min-p -> draw. Each of the three filters works on the renormalised survivors of the one before; ties
go to the lower token id everywhere. `draws.py` has the arithmetic. Shape suffixes: B rows of a
batch, T rows or tokens of a sequence, V vocabulary, C candidates.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moe.sampling import draws, host
from moe.sampling.batch import (
    Drawn,
    Draws,
    LogitsError,
    Proposal,
    Row,
    Token,
    candidates,
    check_peak,
    draw_batch,
    peaks,
    scores_of,
)
from moe.sampling.constraint import Constraint
from moe.sampling.lengths import LengthRules
from moe.sampling.params import SamplingParams
from moe.settings.device import to_device

Guesses = Sequence[tuple[int, Proposal | None]]
"""Drafted tokens of a sequence; with what each was drawn from, if it was (`Sampler.propose`)."""


class Sampler:
    """The parameters of one sequence's tokens, and the state of its penalties and random numbers.

    `index` is the sequence's number among the request's `n`. A seed fixes the output: sequence 0
    uses the seed itself, sequence i one derived from (seed, i). Python's generator is used because
    it takes all bits of the seed (torch's CPU generator drops all but 32) and documents that its
    stream stays the same in later versions; each token takes one number, so a token's draw depends
    on the seed and its position only, on any device. Without a seed, the numbers derive from that
    generator's global state: they differ in each process unless the caller seeds it.

    Attributes:
        redrawn: its last token had to be drawn again (`moe.sampling.batch.Draws`).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        index: int = 0,
        constraint: Constraint | None = None,
        lengths: LengthRules | None = None,
    ) -> None:
        assert 0 <= index < params.n, (index, params.n)
        self.params, self.index = params, index
        self.redrawn = False
        self._constraint = constraint
        self._lengths = lengths
        self._vocab_size = vocab_size
        seed = params.seed
        self._random = _new_random()
        if seed is not None:
            # Python's generator drops the sign.
            self._random.seed(f"{seed}:{index}" if index else seed % 2**64)
        self._uniforms: deque[float] = deque()  # of the next tokens, as far as they were needed
        self._edits = _Edits(params, prompt_token_ids) if _Edits.needed(params) else None

    @property
    def is_argmax(self) -> bool:
        """Return whether the next token is the position of the largest logit and nothing else."""
        return (
            self.params.temperature == 0
            and self.params.logprobs is None
            and self._edits is None
            and self._constraint is None
            and not self._is_bounded
        )

    @property
    def is_random(self) -> bool:
        """Return whether its tokens are drawn at random, without a seed: nothing can predict
        them."""
        return self.params.temperature > 0 and self.params.seed is None

    @property
    def needs_tokens(self) -> bool:
        """Return whether the next token can only be drawn when the host knows the one before: for
        penalties, for a structure or a length, or as that is likely to be drawn again."""
        restricted = self._constraint is not None or self._is_bounded
        return self._edits is not None or restricted or self.redrawn

    @property
    def _is_bounded(self) -> bool:
        return self._lengths is not None and self._lengths.is_active

    def begin_mask(self) -> None:
        """Begin to find out, in another thread, what the structure lets follow; if there is one."""
        if self._constraint is not None:
            self._constraint.begin_mask()

    def wait_until(self, until: float) -> None:
        """Let sampling wait for that until this time of `time.monotonic`."""
        if self._constraint is not None:
            self._constraint.wait_until(until)

    def sample(self, logits_V: Tensor) -> Token:
        """Choose the next token from (V,) logits of any float dtype and device.

        -inf masks a token. Raises `LogitsError` on NaN, on +inf and if every token is masked, and
        `StructureError` and `MaskLateError` (see `Constraint`); after the last the call can be
        repeated.
        """
        assert logits_V.shape == (self._vocab_size,), (logits_V.shape, self._vocab_size)
        (outcome,) = sample_batch([self], [logits_V])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take the state after drawing these tokens, to continue a sequence of another process."""
        for token_id in token_ids:
            self._uniform_of(0)
            self._remember(token_id)

    def fork(self) -> Sampler:
        """A copy for drafting, which predicts what this sampler will draw without changing it.

        With a seed it draws by the same random numbers, else by numbers of its own.
        """
        twin = copy(self)
        twin.redrawn = False
        twin._edits = None if self._edits is None else self._edits.fork()
        twin._constraint = None if self._constraint is None else self._constraint.fork()
        twin._lengths = None if self._lengths is None else self._lengths.fork()
        if self.params.temperature > 0:
            twin._random, twin._uniforms = _new_random(), deque()
            if self.params.seed is not None:
                twin._random.setstate(self._random.getstate())
                twin._uniforms += self._uniforms
        return twin

    def propose(self, logits_V: Tensor) -> tuple[int, float, Proposal | None]:
        """Draft the next token, with a fork, from (V,) logits that approximate the model's.

        Returns the token, its probability, and the `Proposal` to pass to `verify`: None if sampling
        is deterministic, as the sampler chooses a correct draft by itself. Waits for the device;
        `moe.sampling.drafted` does not.
        """
        if not self.is_random:
            token_id = self.sample(logits_V).id
            return token_id, float(logits_V.softmax(0)[token_id]), None
        ids_C, weights_C = self._candidates(logits_V)
        place = host.position(weights_C, min(self._uniform_of(0), draws.MOST_UNIFORM))
        token_id, chances_C = int(ids_C[place]), weights_C / weights_C.sum()
        self._remember(token_id)
        offered = (to_device(own, logits_V.device) for own in (ids_C, chances_C))
        return token_id, float(chances_C[place]), Proposal(token_id, *offered)

    def row(self, place: int = 0) -> Row:
        """Return what decides the next token beside its logits; it stays the same until the token
        is accepted.

        Args:
            place: 1: of the token after the next one, if this does not need it (`needs_tokens`).

        Raises `StructureError`, `MaskLateError`, and `LogitsError` if nothing may follow.
        """
        return self._row(place, self._edits, self._constraint, self._lengths, None)

    def rows(self, guesses: Guesses) -> Iterator[Row]:
        """Yield the `row` of the next token, then that of each token behind a drafted one, as if
        all drafted tokens before it were right. Ends where the structure forbids a drafted token.
        """
        edits, constraint, lengths = self._edits, self._constraint, self._lengths
        for place in range(len(guesses) + 1):
            guess, proposal = guesses[place] if place < len(guesses) else (-1, None)
            row = self._row(place, edits, constraint, lengths, proposal)
            yield row
            bits = row.bits
            if guess < 0 or not (bits is None or bits[guess // 8] >> guess % 8 & 1):
                return
            if edits is not None:
                edits = edits.fork() if place == 0 else edits
                edits.add(guess)
            if constraint is not None:
                constraint = constraint.fork() if place == 0 else constraint
                constraint.take(guess)
            if lengths is not None:
                lengths = lengths.fork() if place == 0 else lengths
                lengths.take(guess)

    def _row(
        self,
        place: int,
        edits: _Edits | None,
        constraint: Constraint | None,
        lengths: LengthRules | None,
        proposal: Proposal | None,
    ) -> Row:
        bits = None
        if constraint is not None:
            if constraint.is_over:  # a draft asks for more
                raise LogitsError("the text is complete, and its structure lets nothing follow")
            bits = constraint.allowed_bits()
        if lengths is not None:
            bits = lengths.allowed_bits(bits, self._vocab_size)
        again = 0.0 if proposal is None else self._random.random()
        changed = None if edits is None else edits.arrays
        return Row(self.params, self._uniform_of(place), changed, bits, proposal, again)

    def accept(self, token: Token) -> Token:
        """Take the state after this token; returns it, marked if it ends its structure."""
        self._remember(token.id)
        is_over = self._constraint is not None and self._constraint.is_over
        return replace(token, is_last=True) if is_over else token

    def _candidates(self, logits_V: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """As `candidates`, after bias, penalties and structure."""
        scores_BV = scores_of(logits_V.detach()[None], [self.row()])
        for peak in (logits_V.max(), scores_BV.max()):
            check_peak(float(peak))
        return candidates(scores_BV[0], self.params)

    def _uniform_of(self, place: int) -> float:
        """The random number of a token to come; 0 where none is drawn."""
        if self.params.temperature == 0:
            return 0.0
        while len(self._uniforms) <= place:
            self._uniforms.append(self._random.random())
        return self._uniforms[place]

    def _remember(self, token_id: int) -> None:
        if self._uniforms:
            self._uniforms.popleft()
        if self._edits is not None:
            self._edits.add(token_id)
        if self._constraint is not None:
            self._constraint.take(token_id)
        if self._lengths is not None:
            self._lengths.take(token_id)


class _Edits:
    """The scores that a sequence's bias and penalties change: an entry for each such token."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        seen = set(prompt_token_ids) if params.repetition_penalty != 1.0 else set()
        ids = sorted(seen | params.logit_bias.keys())
        self._places = {token_id: place for place, token_id in enumerate(ids)}
        self._counts: dict[int, int] = {}
        self._ids, self._numbers = np.array(ids, np.int64), np.empty((len(ids), 3))
        self._numbers[:] = 0.0, 1.0, 0.0
        for token_id, bias in params.logit_bias.items():
            self._numbers[self._places[token_id], 0] = bias
        for token_id in seen:
            self._numbers[self._places[token_id], 1] = params.repetition_penalty

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Return whether a sequence with these parameters ever has an entry."""
        penalties = params.presence_penalty, params.frequency_penalty
        return bool(params.logit_bias) or any(penalties) or params.repetition_penalty != 1.0

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 ``(N,)`` distinct ids, and float64 ``(N, 3)`` as of `moe.sampling.draws.edited`."""
        count = len(self._places)
        return self._ids[:count].copy(), self._numbers[:count].copy()

    def add(self, token_id: int) -> None:
        """The token was generated."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                more = max(64, place // 4)
                self._ids = np.append(self._ids, np.zeros(more, np.int64))
                self._numbers = np.append(self._numbers, np.zeros((more, 3)), axis=0)
            self._ids[place] = token_id
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        params = self._params
        self._numbers[place, 1] = params.repetition_penalty
        self._numbers[place, 2] = params.frequency_penalty * count + params.presence_penalty

    def fork(self) -> _Edits:
        """An independent copy."""
        twin = copy(self)
        twin._places, twin._counts = self._places.copy(), self._counts.copy()
        twin._ids, twin._numbers = self._ids.copy(), self._numbers.copy()
        return twin


def sample_batch(samplers: Sequence[Sampler], logits: Sequence[Tensor]) -> list[Token | Exception]:
    """The next token of each sequence, or what `Sampler.sample` would raise for it.

    Args:
        samplers: each once; they advance by their tokens.
        logits: (V,) of each, of one dtype and device.
    """
    found = NextTokens(samplers, [logits_V[None] for logits_V in logits]).read()
    return [one.error or one.tokens[0] for one in found]


class Verified(NamedTuple):
    """The result of a step for a sequence.

    Attributes:
        tokens: the accepted drafted tokens and one of the model's own; none with an error.
        error: why no token can be drawn from the first row: `LogitsError`, `StructureError`, or
            `MaskLateError`, after which the call can be repeated.
        logits_TV: given.
        known: the position of the largest logit of each row that was looked at.
    """

    tokens: list[Token]
    error: Exception | None
    logits_TV: Tensor
    known: list[int]

    def likeliest(self, start: int) -> list[int]:
        """The position of the largest logit of each row from ``start`` on."""
        known, rest_TV = self.known[start:], self.logits_TV[max(start, len(self.known)) :]
        return [*known, *peaks(rest_TV)[0]] if len(rest_TV) else known


def verify(
    samplers: Sequence[Sampler], guesses: Sequence[Guesses], logits: Sequence[Tensor]
) -> list[Verified]:
    """The next tokens of sequences with drafts: the drafted ones as long as they are right, and one
    of the model's own.

    A drafted token is right if the sequence draws it, which it does at temperature 0 and with a
    seed as without a draft; one with a proposal if rejection sampling accepts it, which keeps the
    distribution. If a later row fails, acceptance ends before it, and the next step meets it as its
    first row.

    On a device all rows are drawn at once, with one readback. A CPU draws a row only when the
    drafted tokens before it have been accepted, as nothing waits there.

    Args:
        samplers: each once; they advance by their tokens.
        guesses: of each, any number.
        logits: ``(guesses + 1, V)`` of each, behind its last token and behind each drafted one; of
            one dtype and device.
    """
    if not any(guesses):
        return NextTokens(samplers, logits).read()
    each = [_Verification(*one) for one in zip(samplers, guesses, logits, strict=True)]
    while wave := [(one, rows) for one in each if (rows := one.next_rows())]:
        drawn = iter(
            draw_batch(
                [one.next_logits(len(rows)) for one, rows in wave],
                [row for _, rows in wave for row in rows],
            )
        )
        for one, rows in wave:
            one.take(list(islice(drawn, len(rows))))
    return [one.finish() for one in each]


class NextTokens:
    """The next token of each sequence, which a device goes on to draw until they are read.

    Args:
        samplers: each once; they advance when the tokens are read.
        logits: ``(1, V)`` of each, of one dtype and device.
        place: see `Sampler.row`.
    """

    def __init__(
        self, samplers: Sequence[Sampler], logits: Sequence[Tensor], place: int = 0
    ) -> None:
        self._samplers, self._logits = samplers, logits
        self._rows: list[Row | Exception] = []
        for sampler in samplers:
            try:
                self._rows.append(sampler.row(place))
            except Exception as error:  # of its structure
                self._rows.append(error)
        pairs = zip(logits, self._rows, strict=True)
        known = [row for row in self._rows if isinstance(row, Row)]
        self._draws = Draws([own for own, row in pairs if isinstance(row, Row)], known)

    @property
    def ids_B(self) -> Tensor:
        """``(B,)`` int64 on the device; see `Draws`. For sequences without structures."""
        return self._draws.ids_B

    def read(self, dropped: Collection[Sampler] = ()) -> list[Verified]:
        """The outcome of each sequence; waits for the device.

        Args:
            dropped: these get no token, and stay as they are.
        """
        drawn = enumerate(self._draws.read())
        redrawn, found = self._draws.redrawn, list[Verified]()
        for sampler, row, own in zip(self._samplers, self._rows, self._logits, strict=True):
            if isinstance(row, Exception):
                found.append(Verified([], row, own, []))
                continue
            at, (token, likeliest) = next(drawn)
            if sampler in dropped:
                found.append(Verified([], None, own, [likeliest]))
                continue
            sampler.redrawn = at in redrawn
            if isinstance(token, Exception):
                found.append(Verified([], token, own, [likeliest]))
                continue
            try:
                found.append(Verified([sampler.accept(token)], None, own, [likeliest]))
            except Exception as error:  # of its structure
                found.append(Verified([], error, own, [likeliest]))
        return found


def _reading_waits(logits: Tensor) -> bool:
    """Return whether a result of these logits is known to the host only after a wait."""
    return not logits.is_cpu


class _Verification:
    """One sequence's part of `verify`."""

    def __init__(self, sampler: Sampler, guesses: Guesses, logits_TV: Tensor) -> None:
        assert len(logits_TV) == len(guesses) + 1, (logits_TV.shape, len(guesses))
        self._sampler, self._guesses, self._logits_TV = sampler, guesses, logits_TV
        self._rows = sampler.rows(guesses)
        at_once = sampler.is_argmax or _reading_waits(logits_TV)
        self._at_once = len(logits_TV) if at_once else 1
        self._tokens: list[Token] = []
        self._known: list[int] = []
        self._over = False
        self._error: Exception | None = None

    def next_rows(self) -> list[Row]:
        """Return the rows to draw next; empty if there is no more."""
        rows: list[Row] = []
        try:
            while not self._over and len(rows) < self._at_once:
                rows.append(next(self._rows))
        except StopIteration:
            self._over = not rows
        except Exception as error:  # of its structure; rows before it are drawn all the same
            self._error = error
        return rows

    def next_logits(self, count: int) -> Tensor:
        """``(count, V)`` of the same rows."""
        start = len(self._known)
        return self._logits_TV[start : start + count]

    def take(self, drawn: Sequence[Drawn]) -> None:
        """The outcome of the same rows."""
        self._known += [one.likeliest for one in drawn]
        for token, _ in drawn:
            if isinstance(token, LogitsError):
                self._over, self._error = True, token
                return
            place = len(self._tokens)
            self._tokens.append(token)
            if place == len(self._guesses) or token.id != self._guesses[place][0]:
                self._over = True
                return

    def finish(self) -> Verified:
        accepted: list[Token] = []
        try:
            for token in self._tokens:
                accepted.append(self._sampler.accept(token))
        except Exception as error:  # of its structure
            self._error = error
        why_none = None if accepted else self._error
        return Verified(accepted, why_none, self._logits_TV, self._known)


def _new_random() -> random.Random:
    """A new generator, seeded from Python's global one."""
    return random.Random(random.getrandbits(128))
