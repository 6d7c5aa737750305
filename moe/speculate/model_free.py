"""Drafts that need no model: what followed before (prompt lookup), or what the model last thought.

Both are chains and by rule, so a draft costs a few look-ups. A tree of drafts would touch nearly
every expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

from torch import Tensor

from moe.engine.sequence import RunningSequence
from moe.sampling.candidates import peaks
from moe.speculate.draft import PLAIN, Draft, Judged, Mode
from moe.speculate.history import SIZES, History

FIRST, FADE = 0.3, 0.25
"""How probably a token is followed as the time before: at first, and weight of each time."""

Guess = tuple[list[int], list[float]]
"""Tokens that may follow, and how probable each is."""


class ModelFree(ABC):
    """Drafts for one sequence at a time, from the tokens that it has."""

    mode: Mode

    def __init__(self) -> None:
        self._read: WeakKeyDictionary[RunningSequence, int] = WeakKeyDictionary()

    def offer(self, sequence: RunningSequence, limit: int) -> Draft:
        """At most ``limit`` tokens that may follow; `PLAIN` where it knows nothing."""
        self._take(sequence, self._unread(sequence))
        tokens, confidence = self._following(sequence, limit)
        return Draft.sure(self.mode, tokens, confidence) if tokens else PLAIN

    def judge(self, sequence: RunningSequence, limit: int, last: int) -> list[Judged]:
        """What would have been drafted on the way through the tokens that have come since it was
        last asked, verification by verification, and would have been right.

        Args:
            last: new tokens, the last ones, that are drafted; those before are taken in only.
        """
        came, judged = self._unread(sequence), list[Judged]()
        place = max(0, len(came) - min(last, len(sequence.token_ids)))
        self._take(sequence, came[:place])
        while place < len(came):
            tokens, confidence = self._following(sequence, min(limit, len(came) - place))
            pairs = enumerate(zip(tokens, came[place:], strict=False))
            right = next((index for index, (a, b) in pairs if a != b), len(tokens))
            if tokens:
                self._count(sequence, len(tokens), right)
            judged.append((confidence, right))
            self._take(sequence, came[place : place + right + 1])
            place += right + 1
        return judged

    def learn(
        self, sequence: RunningSequence, draft: Draft, accepted: int, logits_TV: Tensor
    ) -> None:
        """What the model made of a draft of any mode; its own tokens are taken in later.

        Args:
            logits_TV: of the sequence's last token and of each drafted one.
        """
        if draft.mode == self.mode:
            self._count(sequence, len(draft.tokens), accepted)

    def _unread(self, sequence: RunningSequence) -> list[int]:
        """Tokens, those of the prompt included, that have come since this was last asked."""
        prompt, read = sequence.prompt_token_ids, self._read.get(sequence, 0)
        self._read[sequence] = len(prompt) + len(sequence.token_ids)
        if read >= len(prompt):
            return sequence.token_ids[read - len(prompt) :]
        return prompt[read:] + sequence.token_ids

    @abstractmethod
    def _take(self, sequence: RunningSequence, tokens: Sequence[int]) -> None:
        """The sequence goes on with these tokens."""

    @abstractmethod
    def _following(self, sequence: RunningSequence, limit: int) -> Guess:
        """What may follow the tokens that have been taken in."""

    @abstractmethod
    def _count(self, sequence: RunningSequence, drafted: int, right: int) -> None:
        """So many tokens of the last guess for a sequence were right."""


class NGram(ModelFree):
    """Prompt lookup: what followed the last tokens when the sequence had them before.

    Confidence is how often drafts behind runs of that length have proved right, per token.
    """

    mode = Mode("ngram")

    def __init__(self) -> None:
        super().__init__()
        self._histories: WeakKeyDictionary[RunningSequence, History] = WeakKeyDictionary()
        self._right, self._tried = dict.fromkeys(SIZES, 1.0), dict.fromkeys(SIZES, 2.0)

    def _take(self, sequence: RunningSequence, tokens: Sequence[int]) -> None:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = History()
        history.extend(tokens)

    def _following(self, sequence: RunningSequence, limit: int) -> Guess:
        history = self._histories[sequence]
        tokens = history.following(limit)
        if not tokens:
            return [], []
        return tokens, [self._right[history.size] / self._tried[history.size]] * len(tokens)

    def _count(self, sequence: RunningSequence, drafted: int, right: int) -> None:
        size = self._histories[sequence].size
        self._right[size] += right
        self._tried[size] += min(right + 1, drafted)


class Recycling(ModelFree):
    """Token Recycling: what the model last thought would follow a token.

    The table is shared by all sequences. Confidence is how often a token has been followed as it
    was the time before.
    """

    mode = Mode("recycling")

    def __init__(self) -> None:
        super().__init__()
        self._last: WeakKeyDictionary[RunningSequence, int] = WeakKeyDictionary()
        self._successor: dict[int, tuple[int, float]] = {}

    def learn(
        self, sequence: RunningSequence, draft: Draft, accepted: int, logits_TV: Tensor
    ) -> None:
        if accepted < len(draft.tokens):
            thought, _ = peaks(logits_TV[accepted + 1 :])
            for token, following in zip(draft.tokens[accepted:], thought, strict=True):
                self._follow(token, following)

    def _take(self, sequence: RunningSequence, tokens: Sequence[int]) -> None:
        known = [self._last[sequence], *tokens] if sequence in self._last else list(tokens)
        for token, following in pairwise(known):
            self._follow(token, following)
        if known:
            self._last[sequence] = known[-1]

    def _follow(self, token: int, following: int) -> None:
        before, chance = self._successor.get(token, (None, FIRST))
        if before is not None:
            chance += FADE * ((before == following) - chance)
        self._successor[token] = following, chance

    def _following(self, sequence: RunningSequence, limit: int) -> Guess:
        tokens, confidence, token = list[int](), list[float](), self._last[sequence]
        while len(tokens) < limit and token in self._successor:
            token, chance = self._successor[token]
            tokens.append(token)
            confidence.append(chance)
        return tokens, confidence

    def _count(self, sequence: RunningSequence, drafted: int, right: int) -> None:
        return None  # it is counted for each token, whoever drafts
