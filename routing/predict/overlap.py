"""Which of the waiting sequences to run together: those whose experts are the same.

A step reads each expert once, whoever needs it, so sequences that need the same ones cost less
together (ExpertFlow's token scheduling; Read-ME's expert-aware batching).
Everybody who has waited long enough goes first, in order, so nobody starves.
Legend: S waiting sequences, U units (experts of all layers).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from routing.predict.base import Floats


def choose_batch(
    needs: Floats, room: int, waited: Sequence[int], patience: int, running: Floats | None = None
) -> list[int]:
    """Sequences to take now, in the order in which they were chosen.

    Who has been passed over ``patience`` times comes first, in the order of the queue, so nobody is
    passed over more often; then, one by one, who adds the fewest expected units to those there are
    already. With nothing to go by that is the first in the queue.

    Args:
        needs: ``(S, U)`` probability that a sequence needs a unit, in order of the queue.
        room: how many may be taken.
        waited: of each sequence, how many times others from behind it were taken before it.
        patience: most times that may happen.
        running: ``(U,)`` probability that a unit is needed anyway, by sequences that run already.
    """
    count = min(room, len(needs))
    if count == 0:
        return []
    chosen = [index for index in range(len(needs)) if waited[index] >= patience][:count]
    if not chosen and running is None:
        chosen = [0]
    absent = np.ones(needs.shape[1], np.float32) if running is None else 1 - running
    for index in chosen:
        absent = absent * (1 - needs[index])
    left = [index for index in range(len(needs)) if index not in chosen]
    while len(chosen) < count:
        added = needs[left] @ absent
        best = left.pop(int(np.argmin(added)))  # the first of equals: they stay in order
        chosen.append(best)
        absent = absent * (1 - needs[best])
    return chosen


def expected_units(needs: Floats) -> float:
    """Distinct units that sequences ``(S, U)`` are expected to need in one step."""
    return float((1 - np.prod(1 - needs, 0)).sum())
