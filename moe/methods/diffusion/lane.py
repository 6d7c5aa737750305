"""Lanes of models that write whole blocks (`moe.network.block_diffusion`).

`BlockLane` is a sequence that is being written: the model's generation code sleeps in it, from the
prompt to the last block. What it is to read is read by a `PromptLane`. `CanvasLane` is one pass
over a canvas, for those who ask what the model says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe.network.block_cache import BlockCache
from moe.network.denoise import CanvasCall, Result
from moe.network.lanes import Lane, LaneRandom, LaneState, current_lane
from moe.sampling.batch import Token
from routing import Phase


class BlockLane(Lane[None]):
    """A sequence that is being written, over all of its passes.

    Attributes:
        cache: what its code sees of keys and values. Whoever runs it gives it the rows of the
            sequence, and may take them away while the lane rests: then they are read again.
        passes: forward passes so far, by phase; the prompt's are its reader's.
        asked: the step of refinement that it rests for; None: it rests before or behind a pass of
            its own.
        error: why a block of it could not be read; None: nothing went wrong there.
    """

    can_rest = True

    def __init__(
        self,
        forward: Callable[[], None],
        random: LaneRandom,
        cache: BlockCache,
        prompt: list[int],
        num_new: int,
        call: CanvasCall,
    ) -> None:
        super().__init__(forward, "denoise", random=random)
        self.cache, self._call = cache, call
        self.passes: dict[Phase, int] = {"prefill": 0, "denoise": 0}
        self.asked: CanvasCall | None = None
        self.error: Exception | None = None
        self._num_prompt, self._end = len(prompt), len(prompt) + num_new
        self._written = list(prompt)
        self._scores: list[Token] | None = None
        self._final: list[Token] = []
        self._ran = False

    def unread(self, canvas_length: int) -> list[int]:
        """The tokens that are to be read next: the prompt, or the next block that its rows lack;
        empty: none, as behind the last block."""
        assert self.cache.rows is not None
        if len(self._written) >= self._end:
            return []
        length = self.cache.rows.length
        blocks = max(length - self._num_prompt, -1) // canvas_length + 1
        return self._written[length : self._num_prompt + blocks * canvas_length]

    def begin_pass(self) -> None:
        """Called by the model before each pass of its own: only one is run at a time."""
        if self._ran:
            self.rest()
        self._ran = True
        self.passes["denoise"] += 1

    def take_reading(self) -> BlockCache:
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
        self.passes["denoise"] += 1
        if isinstance(call.result, Exception):
            raise call.result
        assert call.result is not None, "woken without a result"
        self._scores = call.scores
        return call.result

    def add_final(self, token_ids: Sequence[int]) -> None:
        """Called by the model with each final block: the likeliest tokens of the last pass."""
        scores, self._scores = self._scores, None
        self._final += map(Token, token_ids) if scores is None else scores
        self._written += token_ids
        self.rest()

    def rest(self) -> None:
        super().rest()
        self._ran = False

    def take_final(self) -> list[Token]:
        """Tokens that became final since the last call."""
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


class CanvasLane(Lane[list[Tensor]]):
    """Reads a text, and a canvas behind it."""

    can_rest = True  # it never runs on its caller's stack


def begin_pass(phase: Phase, *_: Any) -> None:
    """A hook before each pass of a model: of what reads, or of what refines."""
    lane = current_lane()
    if isinstance(lane, CanvasLane):
        lane.phase = phase
    elif isinstance(lane, BlockLane) and phase == "denoise":
        lane.begin_pass()
