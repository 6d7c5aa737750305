"""Rebalancing: between steps, move experts of a layer to other ranks where that pays.

Rank 0 reports the routed tokens of every step and asks for moves before each one. One layer at a
time is repacked, in a background process, for the loads that are expected (`LoadForecast`). A new
placement is taken only if level ranks save more time within the horizon than reading the moved
experts takes; while no gain is certain, the search rests ever longer. Each answer has an epoch: all
ranks apply it before the same step. Ranks are those of the present group.

Legend: S steps, E experts (of the layer with the most), L layers, V of them visited in a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experts.placement.background import Background, RepackJob
from experts.placement.packing import Repacked
from experts.placement.placement import Floats, Ints, Placement, step_costs

LEAST_STEPS = 8
"""Steps of a layer before it is first repacked, and between two repackings."""
PATIENCE, MOST_REST = 8, 4
"""Answers without a certain gain before the search rests as long as the last one took, and how
often that rest may double. On a busy machine even a process of lowest priority slows the ranks."""
RATE_HALF_LIFE = 64.0
LOAD_WINDOW = 48
"""Steps whose loads are kept."""
CORRECTION_HALF_LIFE, DOUBT = 16.0, 2.0
"""Correction of token loads: steps after which an observation counts half, and the number of
average steps by which the correction is drawn towards 1."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moves:
    """New placements of the layers that change; all ranks apply them before the same step."""

    epoch: int
    placements: Mapping[int, Placement]


class Repacker(Protocol):
    """Runs `repack`; see `Background`."""

    @property
    def busy(self) -> bool: ...

    def submit(self, job: RepackJob) -> None: ...

    def result(self) -> Repacked | None: ...

    def close(self) -> None: ...


class StepRate:
    """The time of a step, and the time that each token adds which a rank serves at a layer."""

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
        """The slope of a line through the steps; half the mean if all have one size."""
        count, tokens, seconds, squares, products = self._sums.tolist()
        at_most = seconds / tokens
        spread = squares * count - tokens**2
        if spread <= 0.01 * tokens**2:
            return float(at_most / 2)
        slope = (products * count - tokens * seconds) / spread
        return float(min(max(slope, 0.01 * at_most), at_most))


class Rebalancer:
    """Decides about the placements of all layers; see above.

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
        token_loads: Callable[[int, float], TokenLoads | None] | None = None,
        repacker: Repacker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            placements: in force, of each layer.
            seconds_LE: seconds in which a rank reads each expert of each layer.
            horizon_s: seconds within which a move must pay.
            missing: of a layer, the share of visited experts that must be read, in [0, 1].
            token_loads: of a layer and a number of coming steps, the loads that known tokens
                predict; called when the layer is about to be repacked.
            repacker: for tests; None: a `Background`.
            clock: seconds.
        """
        self.epoch = 0
        self._ended = False
        self._repacker = Background() if repacker is None else repacker
        self._clock = clock
        self._seconds_LE, self._missing = list(seconds_LE), missing
        self._horizon_s, self._token_loads = horizon_s, token_loads
        self.reset(placements)

    def reset(self, placements: Sequence[Placement]) -> None:
        """Start over with these, for a new group of ranks; a repacking under way is dropped."""
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
            tokens_LE: tokens of each expert, of all ranks together; zeros for layers not visited
                and behind a layer's last expert.
            seconds: duration of the step.
        """
        if served := int(tokens_LE.sum()):
            self._forecast.observe(tokens_LE)
            self._rate.observe(served / self._placements[0].ranks, seconds)

    def poll(self) -> Moves | None:
        """The moves that all ranks must apply before the next step; None: no change."""
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
        """Rest after an answer, the longer the more answers had no certain gain."""
        most = PATIENCE + MOST_REST
        self._in_vain = min(self._in_vain + 1, most) if in_vain else self._in_vain // 2
        times = 2 ** (self._in_vain - PATIENCE) if self._in_vain > PATIENCE else 0
        now_s = self._clock()
        self._rests_until_s = now_s + times * (now_s - self._asked_s)

    def _ask(self) -> None:
        """Submit the next layer that has enough steps since its last repacking."""
        layers = len(self._placements)
        for layer in [*range(self._next, layers), *range(self._next)]:
            seen = int(self._forecast.steps_L[layer])
            since = seen - self._asked_at[layer]
            if since < LEAST_STEPS:
                continue
            self._asked_at[layer], self._next = seen, (layer + 1) % layers
            steps = max(self._horizon_s / self._rate.seconds_a_step, 1.0)
            read_E = self._seconds_LE[layer] / self._rate.seconds_a_token
            # If moves cost nothing, steps after the layer's next repacking do not matter.
            ahead = steps if read_E.any() else float(since)
            tokens = None if self._token_loads is None else self._token_loads(layer, ahead)
            missing = 0.0 if self._missing is None else self._missing(layer)
            self._asked, self._asked_s = (layer, self._placements[layer]), self._clock()
            costs_SE = step_costs(self._forecast.steps_SE(layer, tokens, ahead), missing * read_E)
            self._repacker.submit(RepackJob(costs_SE, self._placements[layer], read_E / steps))
            return


@dataclass(frozen=True)
class TokenLoads:
    """The loads of a layer that known tokens predict, by the token table of `moe calibrate`.

    Attributes:
        past_SE: for the last steps that were observed, the newest last.
        coming_SE: for those to come, the soonest first, as far as their tokens are known.
    """

    past_SE: Floats
    coming_SE: Floats


class LoadForecast:
    """The loads that are expected in coming steps: those of the last `LOAD_WINDOW` steps again, and
    before them those that known tokens predict.

    Args:
        experts_L: how many experts each layer has.

    Attributes:
        steps_L: observed steps of each layer.
    """

    def __init__(self, experts_L: Sequence[int]) -> None:
        self._experts_L, layers, most = list(experts_L), len(experts_L), max(experts_L, default=0)
        self.steps_L: Ints = np.zeros(layers, np.int64)
        self._last_LSE: Floats = np.zeros((layers, LOAD_WINDOW, most))  # step s at s % LOAD_WINDOW

    def observe(self, tokens_LE: Ints) -> None:
        """Add a step: tokens of each expert, of all ranks together; zeros for other layers."""
        visited = np.flatnonzero(tokens_LE.any(1))
        self._last_LSE[visited, self.steps_L[visited] % LOAD_WINDOW] = tokens_LE[visited]
        self.steps_L[visited] += 1

    def steps_SE(
        self, layer: int, tokens: TokenLoads | None = None, ahead: float = LOAD_WINDOW
    ) -> Floats:
        """``(S, E)`` loads of coming steps, evenly spread over ``ahead`` of them."""
        steps = int(self.steps_L[layer])
        order_S = np.arange(max(0, steps - LOAD_WINDOW), steps) % LOAD_WINDOW
        window_SE = self._last_LSE[layer, order_S, : self._experts_L[layer]]
        if tokens is None or not len(tokens.past_SE) or not len(tokens.coming_SE):
            return window_SE
        at_S = (np.arange(len(window_SE)) * ahead / len(window_SE)).astype(np.int64)
        known_SE = _corrected(window_SE, tokens, at_S.clip(None, len(tokens.coming_SE) - 1))
        return np.where(at_S[:, None] < len(tokens.coming_SE), known_SE, window_SE)


def _corrected(window_SE: Floats, tokens: TokenLoads, at_S: Ints) -> Floats:
    """The predicted loads of these coming steps, scaled for each expert by what past predictions
    missed, plus one past step's error each: placements are judged by single steps, not by means."""
    seen_SE = window_SE[-len(tokens.past_SE) :]
    past_SE = tokens.past_SE[-len(seen_SE) :]
    weights_S = 0.5 ** (np.arange(len(seen_SE))[::-1] / CORRECTION_HALF_LIFE)
    doubt = DOUBT * seen_SE.mean()
    factor_E = (weights_S @ seen_SE + doubt) / (weights_S @ past_SE + doubt)
    error_SE = seen_SE - past_SE * factor_E
    coming_SE, from_S = tokens.coming_SE[at_S] * factor_E, np.arange(len(at_S)) % len(error_SE)
    # The tokens of a step vary independently: four times as many are twice as far off.
    larger_S = np.sqrt(coming_SE.sum(1) / seen_SE.sum(1)[from_S])
    return (coming_SE + error_SE[from_S] * larger_S[:, None]).clip(0.0)
