"""Steps that have been launched, up to their tokens: `StepInFlight`.

A device computes behind the host. So where a step does nothing but decode, and its tokens are drawn
on the device, the engine launches the next one before it reads them: that takes them from where
they are drawn, and the host appends, streams and schedules while the device works. What the host
finds out late is taken back: a sequence that has ended was read a token too far, which is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe.kv.cache import SequenceCache
from moe.sampling.batch import Token
from moe.sampling.constraint import MaskLateError
from moe.sampling.sampler import Guesses, NextTokens, Verified, verify
from moe.sequence import RunningSequence
from moe.speculate.draft import Draft
from moe.speculate.speculator import Speculator

Outcome = tuple[RunningSequence, list[Token] | Exception]
"""A sequence and its next tokens, or the error that ended it."""
Lost = Callable[[], Exception | None]
"""Reads back from the device why logits mean nothing, if they do."""


class StepInFlight(Protocol):
    """A step that has been launched.

    Attributes:
        tokens: of each sequence that a next step can go on with before this one is read, its next
            token: ``(1,)`` int64 on the device. Empty where no step can.
    """

    @property
    def tokens(self) -> Mapping[RunningSequence, Tensor]: ...

    def outcomes(self) -> list[Outcome]:
        """The next tokens of every sequence that gets some; waits for the device. Once."""

    def drop(self, sequences: Collection[RunningSequence]) -> None:
        """Forget what has been launched for these behind the step before: their caches are again as
        they were."""

    @property
    def is_empty(self) -> bool:
        """Nothing is left to come of it."""


class Finished(NamedTuple):
    """A step whose tokens are known: nothing runs ahead of it."""

    known: list[Outcome]

    @property
    def tokens(self) -> Mapping[RunningSequence, Tensor]:
        return {}

    def outcomes(self) -> list[Outcome]:
        return self.known

    def drop(self, sequences: Collection[RunningSequence]) -> None:
        raise AssertionError("it was launched behind no other")

    @property
    def is_empty(self) -> bool:
        return not self.known


class End(NamedTuple):
    """The place where the next tokens of a sequence are drawn.

    Attributes:
        rows: ``(T, V)`` logits of its last tokens, drafted ones included; or why there are none.
        draft: that was read with them, `PLAIN` or more; None where nothing was proposed.
        lost: where only the device knows whether an expert of another rank was missing: then the
            logits are NaN, so that it costs no readback as long as tokens can be drawn.
    """

    sequence: RunningSequence
    rows: Tensor | Exception
    draft: Draft | None = None
    lost: Lost | None = None

    @property
    def guesses(self) -> Guesses:
        return () if self.draft is None else self.draft.guesses


class DrawingStep:
    """A step whose tokens are drawn together: after the last row, or those of a draft that are
    right and one more. Caches are cut back to accepted tokens.

    A sequence gets no tokens while it has unread ones, or while its structure's mask is late; then
    it keeps its logits.

    Args:
        ends: of all sequences.
        speculator: hears what becomes of drafts.
        alone: no prompt was read beside them.
        runs_ahead: a next step can be launched before the tokens are read: it reads them where they
            are drawn.
        behind: of each sequence, its state and the length that this had before; given if the step
            was launched behind another one whose tokens were not known.
    """

    def __init__(
        self,
        ends: Sequence[End],
        speculator: Speculator | None = None,
        *,
        alone: bool = True,
        runs_ahead: bool = False,
        behind: Mapping[RunningSequence, tuple[SequenceCache, int]] | None = None,
    ) -> None:
        self._speculator, self._alone, self._runs_ahead = speculator, alone, runs_ahead
        self._behind = {} if behind is None else dict(behind)
        self._outcomes: dict[RunningSequence, list[Token] | Exception] = {}
        self._drawn: list[tuple[End, Tensor]] = []
        for end in ends:
            self._outcomes[end.sequence] = end.rows if isinstance(end.rows, Exception) else []
            # A preempted sequence has its next tokens already.
            if not isinstance(end.rows, Exception) and num_unread(end.sequence) <= 0:
                count = 1 + len(end.guesses)
                many = end.rows.shape[0] > count
                self._drawn.append((end, end.rows[-count:] if many else end.rows))
            elif end.lost is not None and (lost := end.lost()) is not None:
                self._outcomes[end.sequence] = lost
        self._next: NextTokens | Exception | None = None
        if not any(end.guesses for end, _ in self._drawn):
            self._next = self._begin(1 if behind else 0)

    @property
    def tokens(self) -> Mapping[RunningSequence, Tensor]:
        """See `StepInFlight`."""
        if not self._runs_ahead or not self._drawn or not isinstance(self._next, NextTokens):
            return {}
        sequences = (end.sequence for end, _ in self._drawn)
        tokens = zip(sequences, self._next.ids_B.split(1), strict=True)
        return {own: token for own, token in tokens if own in self._outcomes and _runs_ahead(own)}

    @property
    def is_empty(self) -> bool:
        """See `StepInFlight`."""
        return not self._outcomes

    def drop(self, sequences: Collection[RunningSequence]) -> None:
        """See `StepInFlight`."""
        for sequence in sequences:
            self._outcomes.pop(sequence, None)
            cache, length = self._behind.pop(sequence, (None, 0))
            if cache is not None and cache.length > length:
                cache.cut(length)

    @torch.inference_mode()
    def outcomes(self) -> list[Outcome]:
        """See `StepInFlight`."""
        try:
            verified = self._verified()
        except Exception as error:  # memory of the device, for one
            failed = {end.sequence: error for end, _ in self._drawn}
            self._outcomes = {own: failed.get(own, known) for own, known in self._outcomes.items()}
        else:
            for (end, rows), found in zip(self._drawn, verified, strict=True):
                if end.sequence in self._outcomes:
                    self._take(end, rows, found)
        if self._speculator is not None:
            self._speculator.finish(alone=self._alone)
        return [*self._outcomes.items()]

    def _begin(self, place: int) -> NextTokens | Exception:
        samplers = [end.sequence.sampler for end, _ in self._drawn]
        try:
            return NextTokens(samplers, [rows for _, rows in self._drawn], place)
        except Exception as error:  # as in `outcomes`
            return error

    def _verified(self) -> list[Verified]:
        """Return the verification of each sequence that draws."""
        if isinstance(self._next, Exception):
            raise self._next
        ends = [end for end, _ in self._drawn]
        samplers = [end.sequence.sampler for end in ends]
        if self._next is None:
            return verify(
                samplers, [end.guesses for end in ends], [rows for _, rows in self._drawn]
            )
        dropped = [end.sequence.sampler for end in ends if end.sequence not in self._outcomes]
        return self._next.read(dropped)

    def _take(self, end: End, rows: Tensor, found: Verified) -> None:
        """Note what becomes of a sequence that draws."""
        sequence = end.sequence
        if found.error is not None and end.lost is not None and (lost := end.lost()) is not None:
            self._outcomes[sequence] = lost
            return
        if found.error is None:
            sequence.hold(None)
            self._outcomes[sequence] = found.tokens
            if self._speculator is not None and end.draft is not None:
                self._speculator.accept(sequence, end.draft, found)
        elif not isinstance(found.error, MaskLateError):
            self._outcomes[sequence] = found.error
            return
        elif sequence.held_logits_V is None:
            sequence.hold(rows[0])
        if end.guesses:
            assert sequence.cache is not None
            sequence.cache.cut(sequence.cache.length - len(rows) + max(len(found.tokens), 1))


def num_unread(sequence: RunningSequence) -> int:
    """Tokens of a sequence that its cache lacks: the last; more if it was preempted."""
    assert sequence.cache is not None
    known = len(sequence.prompt_token_ids) + len(sequence.token_ids)
    return known - sequence.cache.length


def _runs_ahead(sequence: RunningSequence) -> bool:
    """Return whether a step can read the sequence's next token before the host does, and forget
    it."""
    cache = sequence.cache
    takes = cache is not None and cache.reusable and not cache.recurrent and cache.offset == 0
    return takes and not sequence.sampler.needs_tokens
