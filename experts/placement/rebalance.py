"""Between steps: keep experts where they are, or a new placement for a layer where that pays.

Rank 0 tells what every step routed, and asks before each step. One layer at a time is repacked in
the background for the loads that are forecast, and only where the time that levelled ranks save
within the horizon is more than reading the moved experts takes; while nothing surely pays, that is
tried ever more rarely. Each answer has an epoch: all ranks apply it before the same step. Ranks are
those of the present group, so none that was lost is named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experts.placement.background import Background, RepackJob
from experts.placement.forecast import Foreseen, LoadForecast
from experts.placement.packing import Repacked
from experts.placement.placement import Floats, Ints, Placement, step_costs

LEAST_STEPS = 8
"""Steps of a layer before it is first repacked, and between two times."""
PATIENCE, MOST_REST = 8, 4
"""Answers that bring nothing for sure before the next question waits twice as long as one, and
doublings of that. On a full machine even a process as nice as can be is in the ranks' way."""
RATE_HALF_LIFE = 64.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moves:
    """New placements of the layers that change, to be applied by all ranks before one step."""

    epoch: int
    placements: Mapping[int, Placement]


class Repacker(Protocol):
    """Whoever computes; see `Background`."""

    @property
    def busy(self) -> bool: ...

    def submit(self, job: RepackJob) -> None: ...

    def result(self) -> Repacked | None: ...

    def close(self) -> None: ...


class StepRate:
    """How long steps take, and how much longer by each token that a rank serves at a layer."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens squared, tokens times seconds

    def observe(self, tokens: float, seconds: float) -> None:
        self._sums *= 0.5 ** (1 / RATE_HALF_LIFE)
        self._sums += (1.0, tokens, seconds, tokens**2, tokens * seconds)

    @property
    def seconds_a_step(self) -> float:
        return float(self._sums[2] / self._sums[0])

    @property
    def seconds_a_token(self) -> float:
        """The slope of a line through the steps; half the mean where all are of one size."""
        count, tokens, seconds, squares, products = self._sums.tolist()
        at_most = seconds / tokens
        spread = squares * count - tokens**2
        if spread <= 0.01 * tokens**2:
            return float(at_most / 2)
        slope = (products * count - tokens * seconds) / spread
        return float(min(max(slope, 0.01 * at_most), at_most))


class Rebalancer:
    """Of all layers.

    Attributes:
        epoch: of the last `Moves`.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        *,
        seconds_LE: Sequence[Floats],
        horizon_s: float,
        missing: Callable[[int], float] | None = None,
        foreseen: Callable[[int, float], Foreseen | None] | None = None,
        repacker: Repacker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            placements: in force, of each layer.
            seconds_LE: that a rank takes to read each expert of each layer.
            horizon_s: seconds within which a move must pay.
            missing: of a layer, share of the experts visited that have to be read, in [0, 1].
            foreseen: of a layer and so many steps to come, what tokens that are known let expect;
                asked when the layer is about to be repacked.
            clock: seconds.
        """
        self.epoch = 0
        self._ended = False
        self._repacker = Background() if repacker is None else repacker
        self._clock = clock
        self._seconds_LE, self._missing = list(seconds_LE), missing
        self._horizon_s, self._foreseen = horizon_s, foreseen
        self.reset(placements)

    def reset(self, placements: Sequence[Placement]) -> None:
        """Begin anew with these, for a new group of ranks: what is being computed is dropped."""
        self._placements = list(placements)
        self._forecast = LoadForecast([one.num_experts for one in placements])
        self._asked_at = [0] * len(placements)
        self._asked: tuple[int, Placement] | None = None
        self._rate = StepRate()
        self._next = self._in_vain = 0
        self._asked_s = self._rests_until_s = 0.0

    def observe(self, tokens_LE: Ints, seconds: float) -> None:
        """Add a step.

        Args:
            tokens_LE: of each expert on all ranks together, zeros for layers that nobody visited
                and behind a layer's last expert.
            seconds: that the step took.
        """
        if served := int(tokens_LE.sum()):
            self._forecast.observe(tokens_LE)
            self._rate.observe(served / self._placements[0].ranks, seconds)

    def poll(self) -> Moves | None:
        """What all ranks must apply before the next step; None to keep everything."""
        try:
            found = self._repacker.result()
        except OSError as error:
            _log.warning("experts stay where they are from now on: %s", error)
            self._ended = True
            return None
        moves = None
        if found is not None and self._asked is not None:
            layer, before = self._asked
            self._asked = None
            self._rest_after(in_vain=not found.sure)
            if self._placements[layer] is before and found.placement != before:
                self._placements[layer] = found.placement
                self.epoch += 1
                moves = Moves(self.epoch, {layer: found.placement})
        if not (self._repacker.busy or self._ended or self._clock() < self._rests_until_s):
            self._ask()
        return moves

    def close(self) -> None:
        self._repacker.close()

    def _rest_after(self, *, in_vain: bool) -> None:
        """Ask nothing for a while, the longer the more answers have brought nothing for sure."""
        most = PATIENCE + MOST_REST
        self._in_vain = min(self._in_vain + 1, most) if in_vain else self._in_vain // 2
        times = 2 ** (self._in_vain - PATIENCE) if self._in_vain > PATIENCE else 0
        now_s = self._clock()
        self._rests_until_s = now_s + times * (now_s - self._asked_s)

    def _ask(self) -> None:
        """Have the next layer repacked that has seen enough steps since it last was."""
        layers = len(self._placements)
        for layer in [*range(self._next, layers), *range(self._next)]:
            seen = int(self._forecast.steps_L[layer])
            turn = seen - self._asked_at[layer]
            if turn < LEAST_STEPS:
                continue
            self._asked_at[layer], self._next = seen, (layer + 1) % layers
            steps = max(self._horizon_s / self._rate.seconds_a_step, 1.0)
            read_E = self._seconds_LE[layer] / self._rate.seconds_a_token
            # Where moves cost nothing, what comes after the layer's next turn is of no concern.
            ahead = steps if read_E.any() else float(turn)
            foreseen = None if self._foreseen is None else self._foreseen(layer, ahead)
            missing = 0.0 if self._missing is None else self._missing(layer)
            self._asked, self._asked_s = (layer, self._placements[layer]), self._clock()
            costs_SE = step_costs(self._forecast.steps_SE(layer, foreseen, ahead), missing * read_E)
            self._repacker.submit(RepackJob(costs_SE, self._placements[layer], read_E / steps))
            return
