"""Whole layers ahead: who asks for nearly all experts of a layer will ask for those of the next.

A prompt does. While the next layer's attention is computed nothing is asked for, and the disk would
rest; so the first of its experts are read by then, into slots that are worth less.
"""

from __future__ import annotations

from offload.cache import ExpertCache

NEARLY_ALL = 0.9
"""Share of a layer's experts that a call asks for."""
SLOTS_SHARE = 8
"""One of so many slots may be filled ahead."""


def read_ahead(cache: ExpertCache, layer: int, asked: int) -> None:
    """Begin to read what the next layer lacks, where this one's call wanted nearly everything.

    Args:
        layer: whose call is over.
        asked: how many of its experts the call wanted.
    """
    experts, following = cache.sizes.experts, layer + 1
    if following == len(experts) or asked < NEARLY_ALL * experts[layer]:
        return
    most = max(1, cache.slots // SLOTS_SHARE)
    for expert in cache.absent(following, range(experts[following]))[:most]:
        if not cache.prefetch(following, expert, value=asked / experts[layer]):
            return
