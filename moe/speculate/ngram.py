"""Drafts without a pass of the model: what followed earlier (`NGram`, prompt lookup), or what the
model predicted last (`Recycling`).

Both make chains by fixed rules, so a draft costs a few lookups; a tree of drafts would visit nearly
every expert. They learn their chances from every generated token, drafted or not: each one shows
whether the guess for its place was right. `Offers` asks all sources for drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from moe.sampling.sampler import Verified
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft, Mode

LONGEST, SHORTEST = 4, 2
"""Lengths of runs: the longest one at the end that occurred before predicts what follows."""
SIZES = (2, 3, 4, 6, 8, 12, 16, 32)
"""Least lengths of the kinds of runs whose chances are counted apart."""
MOST = 32
"""Most tokens of a draft."""
KINDS = [bisect(SIZES, size) - 1 for size in range(SIZES[-1] + MOST)]
"""Kind of a run by its length: the index in `SIZES`."""


class History:
    """The place where each run of tokens of one sequence occurred last.

    Attributes:
        size: length of the run that the last guess followed, rounded down to one of `SIZES`.
    """

    def __init__(self) -> None:
        self.size = 0
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each run, the place after it
        self._runs: list[tuple[int, ...]] = []  # at the end, longest first

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end. A run becomes known when a token follows it."""
        known, ends, runs = self._tokens, self._ends, self._runs
        for token in tokens:
            end = len(known)
            for run in runs:
                ends[run] = end
            known.append(token)
            last = tuple(known[-LONGEST:])
            runs = [last[skip:] for skip in range(len(last) - SHORTEST + 1)]
        self._runs = runs

    def following(self, limit: int) -> list[int]:
        """Return the tokens that followed the last occurrence of the longest known run at the end
        of the sequence.

        If that reaches the end of the sequence, it is repeated, as for a loop.
        """
        for run in self._runs:
            if run in self._ends:
                start = self._ends[run]
                self.size = self._reach(start, len(run))
                found = self._tokens[start : start + limit]
                return (found * limit)[:limit] if len(found) < limit else found
        return []

    def _reach(self, start: int, size: int) -> int:
        """The longest of `SIZES` of which as many tokens before ``start`` equal the last ones."""
        tokens = self._tokens
        for longer in SIZES[SIZES.index(size) + 1 :]:
            if longer > start or tokens[start - longer : start] != tokens[-longer:]:
                break
            size = longer
        return size


JUDGED = 16
"""After a rest, guesses are only judged on this many of the last tokens generated meanwhile."""
LEAST = 0.2
"""Probability of the first token below which no draft is offered."""
FIRST, FADE = 0.3, 0.25
"""Probability that a token is followed as the last time: at first, and the weight of each time."""
BINS = 8
"""Kinds of such probabilities, each with a count of how often guesses were right."""


class Chances:
    """The probability that guesses of each kind are right, over about the last hundred.

    Args:
        known: assumed by kind at first.

    Attributes:
        known: by kind.
    """

    KEEP = 0.99

    def __init__(self, known: Sequence[float]) -> None:
        self.known = list(known)
        self._right, self._all = [2.0 * each for each in known], [2.0] * len(known)

    def count(self, kind: int, right: bool) -> None:
        """Count one more guess."""
        self._right[kind] = self.KEEP * self._right[kind] + right
        self._all[kind] = self.KEEP * self._all[kind] + 1.0
        self.known[kind] = self._right[kind] / self._all[kind]


State = TypeVar("State")
"""The state that a source keeps for one sequence."""


class ModelFree(ABC, Generic[State]):
    """A source of drafts for one sequence at a time, from its tokens so far.

    Attributes:
        new_state: makes the state of a sequence of which nothing has been read.
    """

    mode: Mode
    new_state: Callable[[], State]

    @abstractmethod
    def take(self, state: State, tokens: Sequence[int]) -> None:
        """The sequence has these further tokens; the first call brings its prompt."""

    @abstractmethod
    def following(self, state: State, limit: int) -> Draft:
        """At most ``limit`` tokens that may follow; `PLAIN` if it has no guess."""

    def learn(self, draft: Draft, accepted: int, verified: Verified) -> None:
        """Learn from the verification of a draft of any mode; `take` brings its tokens later."""
        return None


Guess = tuple[Sequence[int], Sequence[int]]
"""Tokens that were expected to come next, and the kind of the run before each."""


@dataclass
class NGramState:
    """State of `NGram` for one sequence."""

    history: History = field(default_factory=History)
    guess: Guess = (), ()


class NGram(ModelFree[NGramState]):
    """Prompt lookup: what followed the last tokens at their previous occurrence in the sequence.

    Confidence is how often what followed a run of that length has followed again; each further
    token of a draft has a run that is longer by one.
    """

    mode, new_state = Mode("ngram"), NGramState

    def __init__(self) -> None:
        self._chances = Chances([size / (size + 2) for size in SIZES])

    def take(self, state: NGramState, tokens: Sequence[int]) -> None:
        place = max(len(tokens) - JUDGED, 0)
        if place:
            state.history.extend(tokens[:place])
            self.following(state, JUDGED)
        while place < len(tokens):
            judged = self._judge(state.guess, tokens[place:])
            state.history.extend(tokens[place : place + judged])
            place += judged
            if place < len(tokens):
                self.following(state, JUDGED)

    def _judge(self, guess: Guess, came: Sequence[int]) -> int:
        """Count right guesses; the number of tokens up to the first wrong one, at least one."""
        judged = 0
        for token, kind, actual in zip(*guess, came, strict=False):
            judged += 1
            self._chances.count(kind, token == actual)
            if token != actual:
                break
        return judged or 1

    def following(self, state: NGramState, limit: int) -> Draft:
        history, known = state.history, self._chances.known
        tokens = history.following(limit) if limit > 0 else []
        kinds = KINDS[history.size : history.size + len(tokens)]
        state.guess = tokens, kinds
        if not tokens or known[kinds[0]] < LEAST:
            return PLAIN
        return Draft.sure(self.mode, tokens, [known[kind] for kind in kinds])


@dataclass
class RecyclingState:
    """State of `Recycling` for one sequence.

    Attributes:
        token: the last one; None before any.
    """

    token: int | None = None


class Recycling(ModelFree[RecyclingState]):
    """Token Recycling: what the model last predicted to follow a token.

    All sequences share the table. It keeps how often each token has been followed by the same one
    as the last time; confidence is how often guesses with about that frequency were right.
    """

    mode, new_state = Mode("recycling"), RecyclingState

    def __init__(self) -> None:
        self._successor: dict[int, tuple[int, float]] = {}
        self._chances = Chances([kind / BINS for kind in range(BINS + 1)])

    def learn(self, draft: Draft, accepted: int, verified: Verified) -> None:
        if accepted < len(draft.tokens):
            thought = verified.likeliest(accepted + 1)
            for token, following in zip(draft.tokens[accepted:], thought, strict=True):
                self._follow(token, following)

    def take(self, state: RecyclingState, tokens: Sequence[int]) -> None:
        last, said = state.token, state.token is not None  # the model has not written the prompt
        for token in tokens:
            if last is not None:
                known = self._follow(last, token)
                if said and known is not None:
                    self._chances.count(int(known[1] * BINS), known[0] == token)
            last = token
        state.token = last

    def _follow(self, token: int, following: int) -> tuple[int, float] | None:
        """``following`` has come after a token; returns the table's entry before that."""
        known = self._successor.get(token)
        chance = FIRST if known is None else known[1] + FADE * ((known[0] == following) - known[1])
        self._successor[token] = following, chance
        return known

    def following(self, state: RecyclingState, limit: int) -> Draft:
        tokens, confidence = list[int](), list[float]()
        token, known = state.token, self._chances.known
        while len(tokens) < limit and token in self._successor:
            token, chance = self._successor[token]
            tokens.append(token)
            confidence.append(known[int(chance * BINS)])
            if confidence[0] < LEAST:
                return PLAIN
        return Draft.sure(self.mode, tokens, confidence) if tokens else PLAIN


class Offers:
    """Asks all sources for drafts. Steps that then draft nothing pay for it, too, so it is fast."""

    def __init__(self, sources: Sequence[ModelFree[Any]]) -> None:
        self.sources = list(sources)
        self._known: WeakKeyDictionary[RunningSequence, _SourceStates] = WeakKeyDictionary()
        self._asked: Sequence[RunningSequence] = ()  # in the last call
        self._states: list[_SourceStates] = []  # of these sequences

    def of(
        self, sequences: Sequence[RunningSequence], limits: Sequence[int]
    ) -> list[Sequence[Draft]]:
        """Return the drafts of each sequence, of at most ``limits`` tokens."""
        if sequences != self._asked:
            self._asked, self._states = list(sequences), [self._of(each) for each in sequences]
        offers = list[Sequence[Draft]]()
        for sequence, states, limit in zip(sequences, self._states, limits, strict=True):
            made, read = sequence.token_ids, states.read
            tokens = made[read:] if read >= 0 else sequence.prompt_token_ids + made
            states.read = len(made)
            drafts = []
            for source, state in zip(self.sources, states.by_source, strict=True):
                source.take(state, tokens)
                draft = source.following(state, limit)
                if draft.tokens:
                    drafts.append(draft)
            offers.append(drafts)
        return offers

    def _of(self, sequence: RunningSequence) -> _SourceStates:
        states = self._known.get(sequence)
        if states is None:
            states = _SourceStates([source.new_state() for source in self.sources])
            self._known[sequence] = states
        return states


class _SourceStates:
    """The states that all sources keep for one sequence.

    Attributes:
        by_source: state of each source.
        read: number of generated tokens that they have taken; -1 before the prompt.
    """

    __slots__ = ("by_source", "read")

    def __init__(self, by_source: list[Any]) -> None:
        self.by_source, self.read = by_source, -1
