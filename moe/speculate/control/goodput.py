"""Which depths bring the most tokens a second.

Expected tokens over predicted seconds (SmartSpec's goodput, MoESD's speed-up).
Depth 0 is always among the choices: plain decoding is the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

CUTS = 12
"""Ways to divide the drafted tokens of a batch that are compared."""

Depths = tuple[int, ...]
Chain = Sequence[float]
"""Of one sequence: the probability of each position that it and all before it are accepted."""


class Option(NamedTuple):
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
