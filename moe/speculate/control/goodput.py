"""Which depths bring the most tokens a second, and what may be lost by finding out.

Expected tokens over predicted seconds (SmartSpec's goodput, MoESD's speed-up; ALGORITHMS.md 5 and
17). Depth 0 is always among the choices: plain decoding is the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

CUTS = 12
"""Ways to divide the drafted tokens of a batch that are compared."""
GRANT = 2.0
"""Steps that trials may lose before their share of the time allows it."""
CAUTION = 1.02
RESTRAINT = 8.0
"""Further caution by share of the time that drafting has lost of late."""
MOST_CAUTION = 1.2
RECENT = 0.998

Depths = tuple[int, ...]
Chain = Sequence[float]
"""Of one sequence: the probability of each position that it and all before it are accepted."""


@dataclass(frozen=True)
class Option:
    """Depths of all sequences of a step, and what is expected of them."""

    depths: Depths
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def best_option(chains: Sequence[Chain], seconds: Callable[[Depths], float]) -> Option:
    """The depths with the highest goodput, among those that take likelier tokens first.

    Args:
        chains: what each sequence may draft.
        seconds: predicted for a step with such depths.
    """
    accepted = [list(accumulate(chain, initial=0.0)) for chain in chains]
    best = option_of((0,) * len(chains), accepted, seconds)
    for depths in _candidates(chains):
        option = option_of(depths, accepted, seconds)
        if option.goodput > best.goodput:
            best = option
    return best


def option_of(
    depths: Depths, accepted: Sequence[Sequence[float]], seconds: Callable[[Depths], float]
) -> Option:
    """What is expected: of each sequence the accepted tokens, and one that the model adds.

    Args:
        accepted: tokens expected of each sequence by its depth, from depth 0 on.
    """
    tokens = float(len(depths))
    for depth, own in zip(depths, accepted, strict=True):
        tokens += own[depth]
    return Option(depths, tokens, seconds(depths))


def _candidates(chains: Sequence[Chain]) -> Iterator[Depths]:
    for depth in range(1, max(map(len, chains), default=0) + 1):
        yield tuple(min(depth, len(chain)) for chain in chains)
    if len(chains) == 1:
        return
    tokens = sorted(
        (-survival, position, index)
        for index, chain in enumerate(chains)
        for position, survival in enumerate(chain)
    )
    depths, every = [0] * len(chains), max(len(tokens) // CUTS, 1)
    for taken, (_, position, index) in enumerate(tokens, 1):
        depths[index] = position + 1
        if taken % every == 0:
            yield tuple(depths)


class Ledger:
    """What drafting has gained against plain decoding, and what trials have lost.

    Attributes:
        trials: made.
    """

    def __init__(self, share: float) -> None:
        self.trials = 0
        self._share = share
        self._seconds = self._lost = self._grant = 0.0
        self._recent = self._saved = 0.0

    @property
    def gain(self) -> float:
        """Time that plain decoding would have taken of late over the time that was taken."""
        return 1.0 + self._saved / self._recent if self._recent else 1.0

    @property
    def caution(self) -> float:
        """How much better than plain decoding drafting must look; more where it has lost."""
        loss = max(0.0, -self._saved / self._recent) if self._recent else 0.0
        return min(CAUTION + RESTRAINT * loss, MOST_CAUTION)

    def affords(self, loss: float) -> bool:
        """Whether a trial may lose so many seconds."""
        return self._lost + loss <= self._grant + self._share * self._seconds

    def note(self, seconds: float, plain_seconds: float) -> None:
        """A step took so long; decoding as many tokens plainly, it would have been so long."""
        self._grant = self._grant or GRANT * seconds
        self._seconds += seconds
        self._recent = RECENT * self._recent + seconds
        self._saved = RECENT * self._saved + plain_seconds - seconds

    def tried(self, lost: float) -> None:
        """A trial lost so many seconds against the best that was known; below 0 for a gain."""
        self.trials += 1
        self._lost = max(0.0, self._lost + lost)
