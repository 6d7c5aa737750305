"""Steps in which nobody looks for drafts: they are timed, and nothing else is done."""

from __future__ import annotations

from collections.abc import Sequence

from moe.engine.sequence import RunningSequence
from moe.speculate.draft import Controller, Heard
from moe.speculate.model_free import ModelFree

HEARD, JUDGED = 2, 16
"""Sequences of a batch, and their last tokens, on which drafts are judged that nobody asked for."""


class Rests:
    """Counts and times them, and tells the controller behind them what drafts would have brought.

    Args:
        model_free: drafts that cost nothing.
        max_depth: tokens of a draft at most.
    """

    def __init__(self, model_free: Sequence[ModelFree], max_depth: int) -> None:
        self._model_free, self._max_depth = model_free, max_depth
        self._batch = self._left = self._turn = 0
        self._seconds: list[float] = []  # of steps that nobody has been told of

    def begin(self, controller: Controller, sequences: Sequence[RunningSequence]) -> bool:
        """Whether a step of these is one."""
        batch = len(sequences)
        if self._left == 0 or batch != self._batch:
            if self._seconds:
                controller.rested(self._batch, self._seconds, self._judged(sequences))
                self._seconds = []
            self._left, self._batch = controller.rests(batch), batch
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def over(self, seconds: float) -> None:
        """It took so long; nan where a prompt was read in it."""
        self._seconds.append(seconds)

    def _judged(self, sequences: Sequence[RunningSequence]) -> list[Heard]:
        """Of some sequences, other ones each time."""
        self._turn += 1
        start = self._turn * HEARD % len(sequences)
        return [
            Heard(sequence, source.mode, source.judge(sequence, self._max_depth, JUDGED))
            for sequence in sequences[start : start + HEARD]
            for source in self._model_free
        ]
