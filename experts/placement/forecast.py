"""Which experts the coming steps will want: the last steps, bent towards what is to be expected.

Several guesses of each expert's share of the load run side by side: averages that forget at
different speeds, and a trend, the fast one carried on in the direction in which it leaves the slow
one. The guess that has been least wrong of late is believed.

Of prompts that are being read or wait, the tokens are known, and a table may say what these are
expected to bring. What it would have said of the last steps is held against what came: by that it
is corrected, and by as much as it was still wrong, what it says of the coming ones may be.

Layers that a step visits are counted together: of one layer numpy's calls would cost rank 0 more
than its arithmetic, while the other ranks wait.

Legend: S steps, E experts (of the layer with the most), G guesses, L layers, V of them visited.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_KEEP_G1 = 0.5 ** (1 / np.array(HALF_LIVES))[:, None]
_TINY = 1e-300


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
    """Of all layers.

    Args:
        experts_L: how many each layer has.

    Attributes:
        steps_L: of each layer, that were observed.
    """

    def __init__(self, experts_L: Sequence[int]) -> None:
        self._experts_L, layers, most = list(experts_L), len(experts_L), max(experts_L, default=0)
        self.steps_L: Ints = np.zeros(layers, np.int64)
        self._last_LSE: Floats = np.zeros((layers, WINDOW, most))  # step s is at s % WINDOW
        self._levels_LGE: Floats = np.zeros((layers, len(HALF_LIVES), most))
        self._errors_LG: Floats = np.zeros((layers, len(HALF_LIVES) + 1))

    def observe(self, tokens_LE: Ints) -> None:
        """Add a step: tokens of each expert, on all ranks together; layers without any had none."""
        visited = np.flatnonzero(tokens_LE.any(1))
        tokens_VE, steps_V = tokens_LE[visited], self.steps_L[visited]
        total_V1, levels_VGE = tokens_VE.sum(1, keepdims=True), self._levels_LGE[visited]
        off_VGE = _guesses(levels_VGE) - (tokens_VE / total_V1)[:, None]
        missed_VG = (off_VGE**2).sum(2) * total_V1  # a share of few tokens says little
        missed_VG[steps_V == 0] = 0.0
        forget = 0.5 ** (1 / ERROR_HALF_LIFE)
        self._errors_LG[visited] = forget * self._errors_LG[visited] + missed_VG
        self._levels_LGE[visited] = _KEEP_G1 * levels_VGE + (1 - _KEEP_G1) * tokens_VE[:, None]
        self._last_LSE[visited, steps_V % WINDOW] = tokens_VE
        self.steps_L[visited] += 1

    def believed(self, layer: int) -> int:
        """The number of the guess that is believed: of `HALF_LIVES`, or behind them the trend."""
        return int(self._errors_LG[layer].argmin())

    def share_E(self, layer: int) -> Floats:
        """``(E,)`` expected share of the layer's load, whatever is known of tokens."""
        guesses_GE = _guesses(self._levels_LGE[layer : layer + 1])[0]
        return guesses_GE[self.believed(layer), : self._experts_L[layer]]

    def steps_SE(
        self, layer: int, foreseen: Foreseen | None = None, ahead: float = WINDOW
    ) -> Floats:
        """``(S, E)`` loads of steps as they may come, evenly spread over so many steps ahead."""
        window_SE = self._window_SE(layer)
        mean_E = window_SE.mean(0)
        expected_E = self.share_E(layer) * mean_E.sum()
        bent_E = np.divide(expected_E, mean_E, out=np.ones_like(mean_E), where=mean_E > 0)
        bent_E = bent_E.clip(1 / MOST_BENT, MOST_BENT)
        # An expert that the window has never seen comes as the forecast says, evenly.
        unknown_SE = np.where(mean_E > 0, window_SE * bent_E, expected_E)
        if foreseen is None or not len(foreseen.past_SE) or not len(foreseen.coming_SE):
            return unknown_SE
        at_S = (np.arange(len(unknown_SE)) * ahead / len(unknown_SE)).astype(np.int64)
        known_SE = _known(window_SE, foreseen, at_S.clip(None, len(foreseen.coming_SE) - 1))
        return np.where(at_S[:, None] < len(foreseen.coming_SE), known_SE, unknown_SE)

    def _window_SE(self, layer: int) -> Floats:
        """The last steps of a layer, the newest last."""
        steps = int(self.steps_L[layer])
        order_S = np.arange(max(0, steps - WINDOW), steps) % WINDOW
        return self._last_LSE[layer, order_S, : self._experts_L[layer]]


def _known(window_SE: Floats, foreseen: Foreseen, at_S: Ints) -> Floats:
    """These of the coming steps, corrected, each as far off as one of the last steps was."""
    seen_SE = window_SE[-len(foreseen.past_SE) :]
    past_SE = foreseen.past_SE[-len(seen_SE) :]
    counts_S = 0.5 ** (np.arange(len(seen_SE))[::-1] / CORRECTION_HALF_LIFE)
    doubt = DOUBT * seen_SE.mean()
    bend_E = (counts_S @ seen_SE + doubt) / (counts_S @ past_SE + doubt)
    off_SE = seen_SE - past_SE * bend_E
    coming_SE, from_S = foreseen.coming_SE[at_S] * bend_E, np.arange(len(at_S)) % len(off_SE)
    # Tokens differ for themselves: a step of four times as many is twice as far off.
    larger_S = np.sqrt(coming_SE.sum(1) / seen_SE.sum(1)[from_S])
    return (coming_SE + off_SE[from_S] * larger_S[:, None]).clip(0.0)


def _guesses(levels_VGE: Floats) -> Floats:
    """``(V, G, E)`` shares; zeros of layers that nothing is known of."""
    shares_VGE = levels_VGE / np.maximum(levels_VGE.sum(2, keepdims=True), _TINY)
    trend_VE = (2 * shares_VGE[:, 0] - shares_VGE[:, 1]).clip(0.0)
    trend_VE /= np.maximum(trend_VE.sum(1, keepdims=True), _TINY)
    return np.concatenate([shares_VGE, trend_VE[:, None]], axis=1)
