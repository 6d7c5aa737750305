"""Which experts the coming steps will want: the last steps, bent towards what is to be expected.

Several guesses of each expert's share of the load run side by side: averages that forget at
different speeds, and a trend, the fast one carried on in the direction in which it leaves the slow
one. The guess that has been least wrong of late is believed.

Of prompts that are being read or wait, the tokens are known, and a table may say what these are
expected to bring. What it would have said of the last steps is held against what came: by that it
is corrected, and by as much as it was still wrong, what it says of the coming ones may be.

Legend: S steps, E experts, G guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experts.placement.placement import Floats, Ints

WINDOW = 48
"""Steps that are kept: how far a step's loads lie from what is expected is taken from them."""
HALF_LIVES = (4.0, 16.0, 64.0)
"""Steps after which a guess has forgotten half."""
ERROR_HALF_LIFE = 32.0
MOST_BENT = 4.0
"""An expert's share may be taken for this many times more, or less, than in the window."""
CORRECTION_HALF_LIFE, DOUBT = 16.0, 2.0
"""Steps after which what came counts half, and average steps that a correction must outweigh."""


@dataclass(frozen=True)
class Foreseen:
    """What tokens alone let expect of a layer.

    Attributes:
        past_SE: of the last steps that were observed, the newest last.
        coming_SE: of those to come, the soonest first, as far as their tokens are known.
    """

    past_SE: Floats
    coming_SE: Floats


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

    @property
    def share_E(self) -> Floats:
        """``(E,)`` expected share of the load, whatever is known of tokens."""
        return self._guesses()[self.believed]

    def steps_SE(self, foreseen: Foreseen | None = None, ahead: float = WINDOW) -> Floats:
        """``(S, E)`` loads of steps as they may come, evenly spread over so many steps ahead."""
        mean_E = self._window_SE.mean(0)
        expected_E = self.share_E * mean_E.sum()
        bent_E = np.divide(expected_E, mean_E, out=np.ones_like(mean_E), where=mean_E > 0)
        bent_E = bent_E.clip(1 / MOST_BENT, MOST_BENT)
        # An expert that the window has never seen comes as the forecast says, evenly.
        unknown_SE = np.where(mean_E > 0, self._window_SE * bent_E, expected_E)
        if foreseen is None or not len(foreseen.past_SE) or not len(foreseen.coming_SE):
            return unknown_SE
        at_S = (np.arange(len(unknown_SE)) * ahead / len(unknown_SE)).astype(np.int64)
        known_SE = self._known(foreseen, at_S.clip(None, len(foreseen.coming_SE) - 1))
        return np.where(at_S[:, None] < len(foreseen.coming_SE), known_SE, unknown_SE)

    def _known(self, foreseen: Foreseen, at_S: Ints) -> Floats:
        """These of the coming steps, corrected, each as far off as one of the last steps was."""
        seen_SE = self._window_SE[-len(foreseen.past_SE) :]
        past_SE = foreseen.past_SE[-len(seen_SE) :]
        counts_S = 0.5 ** (np.arange(len(seen_SE))[::-1] / CORRECTION_HALF_LIFE)
        doubt = DOUBT * seen_SE.mean()
        bend_E = (counts_S @ seen_SE + doubt) / (counts_S @ past_SE + doubt)
        off_SE = seen_SE - past_SE * bend_E
        coming_SE, from_S = foreseen.coming_SE[at_S] * bend_E, np.arange(len(at_S)) % len(off_SE)
        # Tokens differ for themselves: a step of four times as many is twice as far off.
        larger_S = np.sqrt(coming_SE.sum(1) / seen_SE.sum(1)[from_S])
        return (coming_SE + off_SE[from_S] * larger_S[:, None]).clip(0.0)

    def _guesses(self) -> Floats:
        """``(G, E)`` shares."""
        levels_GE = self._levels_GE / self._levels_GE.sum(1, keepdims=True)
        trend_E = (2 * levels_GE[0] - levels_GE[1]).clip(0.0)
        return np.concatenate([levels_GE, trend_E[None] / trend_E.sum()])
