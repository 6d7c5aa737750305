"""Which experts the coming steps will want: the last steps, bent towards what is to be expected.

Several guesses of each expert's share of the load run side by side: averages that forget at
different speeds, and a trend, the fast one carried on in the direction in which it leaves the slow
one. The guess that has been least wrong of late is believed. Prompts that are waiting count with
what a predictor expects of them, where there is one.

Legend: S steps, E experts, G guesses.
"""

from __future__ import annotations

import numpy as np

from experts.placement.placement import Floats, Ints

WINDOW = 48
"""Steps that are kept: how far a step's loads lie from their mean is taken from them."""
HALF_LIVES = (4.0, 16.0, 64.0)
"""Steps after which a guess has forgotten half."""
ERROR_HALF_LIFE = 32.0
MOST_BENT = 4.0
"""An expert's share may be taken for this many times more, or less, than in the window."""


class LoadForecast:
    """Of one layer.

    Attributes:
        steps: that were observed.
    """

    def __init__(self, num_experts: int) -> None:
        self.steps = 0
        self._window_SE: Floats = np.zeros((0, num_experts))
        self._levels_GE: Floats = np.zeros((len(HALF_LIVES), num_experts))
        self._errors_G: Floats = np.zeros(len(HALF_LIVES) + 1)

    def observe(self, tokens_E: Ints) -> None:
        """Add a step: tokens of each expert, on all ranks together."""
        total = float(tokens_E.sum())
        if total == 0:
            return
        if self.steps:
            missed_G = ((self._guesses() - tokens_E / total) ** 2).sum(1)
            self._errors_G *= 0.5 ** (1 / ERROR_HALF_LIFE)
            self._errors_G += missed_G * total  # a share of few tokens says little
        keep_G = 0.5 ** (1 / np.array(HALF_LIVES))
        self._levels_GE *= keep_G[:, None]
        self._levels_GE += (1 - keep_G[:, None]) * tokens_E
        self._window_SE = np.concatenate([self._window_SE[1 - WINDOW :], tokens_E[None]])
        self.steps += 1

    @property
    def believed(self) -> int:
        """The number of the guess that is believed: of `HALF_LIVES`, or behind them the trend."""
        return int(self._errors_G.argmin())

    def share_E(self, arriving_E: Floats | None = None) -> Floats:
        """``(E,)`` expected share of the load; prompts that arrive count by their tokens."""
        share_E: Floats = self._guesses()[self.believed]
        if arriving_E is None or not arriving_E.sum():
            return share_E
        known = float(self._window_SE.sum())
        return (share_E * known + arriving_E) / (known + arriving_E.sum())

    def steps_SE(self, arriving_E: Floats | None = None) -> Floats:
        """``(S, E)`` loads of steps as they may come: the window with the expected shares."""
        mean_E = self._window_SE.mean(0)
        expected_E = self.share_E(arriving_E) * mean_E.sum()
        bent_E = np.divide(expected_E, mean_E, out=np.ones_like(mean_E), where=mean_E > 0)
        bent_E = bent_E.clip(1 / MOST_BENT, MOST_BENT)
        # An expert that the window has never seen comes as the forecast says, evenly.
        return np.where(mean_E > 0, self._window_SE * bent_E, expected_E)

    def _guesses(self) -> Floats:
        """``(G, E)`` shares."""
        levels_GE = self._levels_GE / self._levels_GE.sum(1, keepdims=True)
        trend_E = (2 * levels_GE[0] - levels_GE[1]).clip(0.0)
        return np.concatenate([levels_GE, trend_E[None] / trend_E.sum()])
