"""Drafts that need no model: what followed before (prompt lookup), or what the model last thought.

Both are chains and both are by rule, so a draft costs a few look-ups and verifying it costs no
acceptance. ALGORITHMS.md 19: a tree of drafts would touch nearly every expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe.sequence import RunningSequence
from moe.speculate.draft import PLAIN, Draft, Mode

LONGEST, SHORTEST = 4, 2
"""Last tokens that must have been seen before, tried in this order."""


class ModelFree(Protocol):
    """Drafts for one sequence at a time."""

    @property
    def mode(self) -> Mode: ...

    def offer(self, sequence: RunningSequence, limit: int) -> Draft:
        """At most ``limit`` tokens that may follow; `PLAIN` where it knows nothing."""
        ...

    def learn(
        self, sequence: RunningSequence, draft: Draft, accepted: int, logits_TV: Tensor
    ) -> None:
        """What the model made of a draft of any mode.

        Args:
            logits_TV: of the sequence's last token and of each drafted one.
        """
        ...


class History:
    """Where each run of tokens of one sequence was last seen."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each run, the place behind it

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end. A run becomes known when a token follows it."""
        for token in tokens:
            known, end = self._tokens, len(self._tokens)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(known[-size:])] = end
            known.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def following(self, limit: int) -> tuple[list[int], int]:
        """What followed the longest known run that the sequence ends with, and the run's length.

        Where that leads to the end of the sequence it goes round, as what repeats itself does.
        """
        tokens = self._tokens
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            start = self._ends.get(tuple(tokens[-size:]))
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + index % period] for index in range(limit)], size
        return [], 0


class NGram:
    """Prompt lookup: what followed the last tokens when the sequence had them before.

    Confidence is how often drafts behind runs of that length have proved right, per token.
    """

    mode = Mode("ngram")

    def __init__(self) -> None:
        self._histories: WeakKeyDictionary[RunningSequence, History] = WeakKeyDictionary()
        self._sizes: WeakKeyDictionary[RunningSequence, int] = WeakKeyDictionary()
        self._right = dict.fromkeys(range(SHORTEST, LONGEST + 1), 1.0)
        self._tried = dict.fromkeys(range(SHORTEST, LONGEST + 1), 2.0)

    def offer(self, sequence: RunningSequence, limit: int) -> Draft:
        history = self._histories.setdefault(sequence, History())
        read = len(sequence.prompt_token_ids)
        if len(history) < read:
            history.extend(sequence.prompt_token_ids[len(history) :])
        history.extend(sequence.token_ids[len(history) - read :])
        tokens, size = history.following(limit)
        if not tokens:
            return PLAIN
        self._sizes[sequence] = size
        return Draft.sure(self.mode, tokens, [self._right[size] / self._tried[size]] * len(tokens))

    def learn(
        self, sequence: RunningSequence, draft: Draft, accepted: int, logits_TV: Tensor
    ) -> None:
        if draft.mode == self.mode:
            size = self._sizes[sequence]
            self._right[size] += accepted
            self._tried[size] += min(accepted + 1, len(draft.tokens))


class Recycling:
    """Token Recycling (ALGORITHMS.md 19): what the model last thought would follow a token.

    Args:
        vocab_size: V.

    The table is shared by all sequences. Confidence is the probability that it was thought with.
    """

    mode = Mode("recycling")

    def __init__(self, vocab_size: int) -> None:
        self._successor = torch.full((vocab_size,), -1)
        self._chance = torch.zeros(vocab_size)

    def offer(self, sequence: RunningSequence, limit: int) -> Draft:
        token = sequence.token_ids[-1]
        tokens: list[int] = []
        confidence: list[float] = []
        while len(tokens) < limit and (following := int(self._successor[token])) >= 0:
            tokens.append(following)
            confidence.append(float(self._chance[token]))
            token = following
        return Draft.sure(self.mode, tokens, confidence) if tokens else PLAIN

    def learn(
        self, sequence: RunningSequence, draft: Draft, accepted: int, logits_TV: Tensor
    ) -> None:
        read = torch.tensor([sequence.token_ids[-1], *draft.tokens])
        chances, best = logits_TV.float().softmax(-1).max(-1)
        for index, token in enumerate(read.tolist()):  # in order: the last one counts
            self._successor[token], self._chance[token] = best[index], chances[index]
