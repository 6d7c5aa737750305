"""The lanes of models that write canvases (`moe.methods.diffusion.driver`).

A `CanvasLane` writes a sequence: the model's generation code sleeps in it, from the prompt to the
last canvas. A `PromptLane` reads what it is to read. A `TrialLane` makes one pass over a canvas,
for those who ask what the model predicts there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe.methods.diffusion.cache_view import CacheView
from moe.methods.diffusion.denoise import CanvasCall, Result
from moe.network.lanes import Lane, LaneRandom, LaneState, current_lane
from moe.sampling.batch import Token
from routing import Phase


class CanvasLane(Lane[None]):
    """Writes a sequence, over all of its passes.

    Attributes:
        cache: what its code sees of keys and values. Whoever runs it gives it the rows of the
            sequence, and may take them away while the lane rests: then they are read again.
        passes: forward passes so far, by phase; the prompt's are its reader's.
        asked: the step of refinement that it rests for; None: it rests before or after a pass of
            its own.
        error: why a canvas of it could not be read; None: nothing went wrong there.
    """

    can_rest = True

    def __init__(
        self,
        forward: Callable[[], None],
        random: LaneRandom,
        cache: CacheView,
        prompt: list[int],
        num_new: int,
        call: CanvasCall,
    ) -> None:
        super().__init__(forward, "decode", random=random)
        self.cache, self._call = cache, call
        self.passes: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self.asked: CanvasCall | None = None
        self.error: Exception | None = None
        self._num_prompt, self._end = len(prompt), len(prompt) + num_new
        self._written = list(prompt)
        self._scores: list[Token] | None = None
        self._final: list[Token] = []
        self._ran = False

    def unread(self, canvas_length: int) -> list[int]:
        """The tokens that are to be read next: the prompt, or the next canvas that its rows lack;
        empty: none, as after the last canvas."""
        assert self.cache.rows is not None
        if len(self._written) >= self._end:
            return []
        length = self.cache.rows.length
        canvases = max(length - self._num_prompt, -1) // canvas_length + 1
        return self._written[length : self._num_prompt + canvases * canvas_length]

    def begin_pass(self) -> None:
        """Called by the model before each pass of its own: only one is run at a time."""
        if self._ran:
            self.rest()
        self._ran = True
        self.passes["decode"] += 1

    def take_reading(self) -> CacheView:
        """Called by the model to read: what was to be read has been, by other lanes."""
        assert self.cache.rows is not None
        self.cache.length = self.cache.rows.length
        return self.cache

    def ask(self, given: dict[str, Any]) -> Result:
        """Called by the model: rest until a step of refinement is done.

        Args:
            given: the arguments of the model's own function.
        """
        self.asked = call = replace(self._call, given=given)
        self.rest()
        self.asked = None
        self.passes["decode"] += 1
        if isinstance(call.result, Exception):
            raise call.result
        assert call.result is not None, "woken without a result"
        self._scores = call.scores
        return call.result

    def add_final(self, token_ids: Sequence[int]) -> None:
        """Called by the model with each final canvas: the likeliest tokens of the last pass."""
        scores, self._scores = self._scores, None
        self._final += map(Token, token_ids) if scores is None else scores
        self._written += token_ids
        self.rest()

    def rest(self) -> None:
        super().rest()
        self._ran = False

    def take_final(self) -> list[Token]:
        """The tokens that became final since the last call."""
        final, self._final = self._final, []
        return final

    @property
    def ended(self) -> bool:
        """Nothing is left to do: it is done, or has failed."""
        return self.finished or self.error is not None

    def proceed(self) -> None:
        """Go on up to the next step of refinement that it asks for, or MoE layer, or its end."""
        if self.state is LaneState.READY:
            self.start()
        elif self.state is LaneState.RESTING:
            self.wake()

    def result(self) -> None:
        if self.error is not None:
            raise self.error
        super().result()


class PromptLane(Lane[list[Tensor]]):
    """Reads tokens by the model's generation code, which ends there. It never runs on its caller's
    stack, as the code asks for its lane."""

    can_rest = True


class TrialLane(Lane[list[Tensor]]):
    """Reads a text, and a canvas after it."""

    can_rest = True  # it never runs on its caller's stack


def begin_pass(phase: Phase, *_: Any) -> None:
    """A hook before each pass of a model: of what reads, or of what refines."""
    lane = current_lane()
    if isinstance(lane, TrialLane):
        lane.phase = phase
    elif isinstance(lane, CanvasLane) and phase == "decode":
        lane.begin_pass()
