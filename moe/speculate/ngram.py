"""Drafts that need no model: what followed before (prompt lookup), or what the model last thought.

Both are chains and by rule, so a draft costs a few look-ups; a tree of drafts would touch nearly
every expert. How probable a token is they know from all tokens that came, drafted or not: each
one says whether the guess before it was right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from moe.sampling.sampler import peaks
from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft, Mode

LONGEST, SHORTEST = 4, 2
"""Last tokens that must have been seen before, tried in this order."""
SIZES = (2, 3, 4, 6, 8, 12, 16, 32)
"""Lengths of runs that are told apart."""
MOST = 32
"""Tokens of a draft at most."""
KINDS = [bisect(SIZES, size) - 1 for size in range(SIZES[-1] + MOST)]
"""Of a run by its length, the place in `SIZES`."""


class History:
    """Where each run of tokens of one sequence was last seen.

    Attributes:
        size: of the run behind which the last guess was found, as `SIZES` tell them apart.
    """

    def __init__(self) -> None:
        self.size = 0
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each run, the place behind it
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
        """What followed the longest known run that the sequence ends with, where it was last.

        At the end of the sequence it goes round, as what repeats itself does.
        """
        for run in self._runs:
            if run in self._ends:
                start = self._ends[run]
                self.size = self._reach(start, len(run))
                found = self._tokens[start : start + limit]
                return (found * limit)[:limit] if len(found) < limit else found
        return []

    def _reach(self, start: int, size: int) -> int:
        """How far back what is before ``start`` is like the end, where so many tokens are."""
        tokens = self._tokens
        for longer in SIZES[SIZES.index(size) + 1 :]:
            if longer > start or tokens[start - longer : start] != tokens[-longer:]:
                break
            size = longer
        return size


JUDGED = 16
"""Tokens of those that have come since nobody looked, the last ones, that guesses are judged on."""
LEAST = 0.2
"""Probability of the first token below which nobody wants a draft."""
FIRST, FADE = 0.3, 0.25
"""How probably a token is followed as the time before: at first, and weight of each time."""
BINS = 8
"""In which that is compared with how often it was so."""


class Chances:
    """How often guesses of several kinds have been right, the last hundred or so of each.

    Args:
        known: by kind, before any has been seen.

    Attributes:
        known: by kind.
    """

    KEEP = 0.99

    def __init__(self, known: Sequence[float]) -> None:
        self.known = list(known)
        self._right, self._all = [2.0 * each for each in known], [2.0] * len(known)

    def count(self, kind: int, right: bool) -> None:
        """One more."""
        self._right[kind] = self.KEEP * self._right[kind] + right
        self._all[kind] = self.KEEP * self._all[kind] + 1.0
        self.known[kind] = self._right[kind] / self._all[kind]


Own = TypeVar("Own")
"""What is known of one sequence."""


class ModelFree(ABC, Generic[Own]):
    """Drafts for one sequence at a time, from the tokens that it has.

    Attributes:
        text: makes what is known of a sequence of which nothing has been read.
    """

    mode: Mode
    text: Callable[[], Own]

    @abstractmethod
    def take(self, own: Own, tokens: Sequence[int]) -> None:
        """A sequence goes on with these tokens, those of its prompt at first."""

    @abstractmethod
    def following(self, own: Own, limit: int) -> Draft:
        """At most ``limit`` tokens that may follow; `PLAIN` where it knows nothing."""

    def learn(self, draft: Draft, accepted: int, logits_TV: Tensor) -> None:
        """What the model made of a draft of any mode; its own tokens are taken in later.

        Args:
            logits_TV: of the sequence's last token and of each drafted one.
        """
        return None


Guess = tuple[Sequence[int], Sequence[int]]
"""Tokens that were expected to come next, and of each the kind of the run behind it."""


@dataclass
class Past:
    """Of a sequence."""

    history: History = field(default_factory=History)
    guess: Guess = (), ()


class NGram(ModelFree[Past]):
    """Prompt lookup: what followed the last tokens when the sequence had them before.

    Confidence is how often what followed a run of that length has followed again; with each right
    token the run is longer by one.
    """

    mode, text = Mode("ngram"), Past

    def __init__(self) -> None:
        self._chances = Chances([size / (size + 2) for size in SIZES])

    def take(self, own: Past, tokens: Sequence[int]) -> None:
        place = max(len(tokens) - JUDGED, 0)
        if place:
            own.history.extend(tokens[:place])
            self.following(own, JUDGED)
        while place < len(tokens):
            judged = self._judge(own.guess, tokens[place:])
            own.history.extend(tokens[place : place + judged])
            place += judged
            if place < len(tokens):
                self.following(own, JUDGED)

    def _judge(self, guess: Guess, came: Sequence[int]) -> int:
        """Count what was right; tokens up to the first that was not foreseen, at least one."""
        judged = 0
        for token, kind, actual in zip(*guess, came, strict=False):
            judged += 1
            self._chances.count(kind, token == actual)
            if token != actual:
                break
        return judged or 1

    def following(self, own: Past, limit: int) -> Draft:
        history, known = own.history, self._chances.known
        tokens = history.following(limit) if limit > 0 else []
        kinds = KINDS[history.size : history.size + len(tokens)]
        own.guess = tokens, kinds
        if not tokens or known[kinds[0]] < LEAST:
            return PLAIN
        return Draft.sure(self.mode, tokens, [known[kind] for kind in kinds])


@dataclass
class Last:
    """Attributes:
    token: the last one; None before any.
    """

    token: int | None = None


class Recycling(ModelFree[Last]):
    """Token Recycling: what the model last thought would follow a token.

    The table is shared by all sequences. Confidence is how often a token has been followed as it
    was the time before, and how often that has proved right.
    """

    mode, text = Mode("recycling"), Last

    def __init__(self) -> None:
        self._successor: dict[int, tuple[int, float]] = {}
        self._chances = Chances([kind / BINS for kind in range(BINS + 1)])

    def learn(self, draft: Draft, accepted: int, logits_TV: Tensor) -> None:
        if accepted < len(draft.tokens):
            thought, _ = peaks(logits_TV[accepted + 1 :])
            for token, following in zip(draft.tokens[accepted:], thought, strict=True):
                self._follow(token, following)

    def take(self, own: Last, tokens: Sequence[int]) -> None:
        last, said = own.token, own.token is not None  # a prompt is somebody else's text
        for token in tokens:
            if last is not None:
                known = self._follow(last, token)
                if said and known is not None:
                    self._chances.count(int(known[1] * BINS), known[0] == token)
            last = token
        own.token = last

    def _follow(self, token: int, following: int) -> tuple[int, float] | None:
        """A token has been followed by another; what was known of it."""
        known = self._successor.get(token)
        chance = FIRST if known is None else known[1] + FADE * ((known[0] == following) - known[1])
        self._successor[token] = following, chance
        return known

    def following(self, own: Last, limit: int) -> Draft:
        tokens, confidence = list[int](), list[float]()
        token, known = own.token, self._chances.known
        while len(tokens) < limit and token in self._successor:
            token, chance = self._successor[token]
            tokens.append(token)
            confidence.append(known[int(chance * BINS)])
            if confidence[0] < LEAST:
                return PLAIN
        return Draft.sure(self.mode, tokens, confidence) if tokens else PLAIN


class Offers:
    """Asked in steps that draft nothing, too: what it takes is taken of plain decoding."""

    def __init__(self, sources: Sequence[ModelFree[Any]]) -> None:
        self.sources = list(sources)
        self._texts: WeakKeyDictionary[RunningSequence, _Text] = WeakKeyDictionary()
        self._asked: Sequence[RunningSequence] = ()  # the last time
        self._read: list[_Text] = []  # theirs

    def of(
        self, sequences: Sequence[RunningSequence], limits: Sequence[int]
    ) -> list[Sequence[Draft]]:
        """Of each sequence the drafts of at most so many tokens."""
        if sequences != self._asked:
            self._asked, self._read = list(sequences), [self._text(each) for each in sequences]
        offers = list[Sequence[Draft]]()
        for sequence, text, limit in zip(sequences, self._read, limits, strict=True):
            said = sequence.token_ids
            tokens = said[text.read :] if text.read >= 0 else sequence.prompt_token_ids + said
            text.read = len(said)
            own = []
            for source, known in zip(self.sources, text.known, strict=True):
                source.take(known, tokens)
                draft = source.following(known, limit)
                if draft.tokens:
                    own.append(draft)
            offers.append(own)
        return offers

    def _text(self, sequence: RunningSequence) -> _Text:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text([source.text() for source in self.sources])
        return text


class _Text:
    """Of a sequence.

    Attributes:
        known: what each source knows of it.
        read: its tokens that they have been told of, behind those of the prompt; below 0: nothing.
    """

    __slots__ = ("known", "read")

    def __init__(self, known: list[Any]) -> None:
        self.known, self.read = known, -1
