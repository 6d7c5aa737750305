"""What arrangements of ranks are compared by, and which one to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe.plan.decode_speed import Sizes, Speeds
from moe.plan.link_speed import Link

WORTH = 1.05
"""More than one rank is recommended where it is faster by this factor."""


@dataclass(frozen=True)
class Machine:
    """What ranks run on; nodes are alike.

    Attributes:
        speeds: of one node.
        available_bytes: memory of one node; None where that is not known.
        link: between ranks of a node.
        network: between nodes.
    """

    speeds: Speeds
    available_bytes: int | None
    link: Link
    network: Link


@dataclass(frozen=True)
class Needs:
    """What a model takes.

    Attributes:
        sizes: of its experts.
        fixed_bytes: of every rank, whatever it holds: trunk, activations, reserve, the fewest keys
            and values.
        row_bytes: of one token's activations on the way.
        replicas: further copies as a share of all experts.
    """

    sizes: Sizes
    fixed_bytes: int
    row_bytes: int
    replicas: float


@dataclass(frozen=True)
class RankPlan:
    """What one arrangement would do.

    Attributes:
        name: what it is.
        ranks, nodes: processes, and machines that they are on.
        rank_bytes: memory of a rank.
        slots: experts in the memory of a rank.
        resident: share of the experts it may be asked for that are in its memory.
        exchanged_bytes: of a token, there and back over all layers, at the largest batch.
        imbalance: the heaviest rank's load over the mean, at the largest batch.
        seconds: of a step by batch and by way.
    """

    name: str
    ranks: int
    nodes: int
    rank_bytes: int
    slots: int
    resident: float
    exchanged_bytes: float
    imbalance: float
    seconds: Mapping[int, Mapping[str, float]]

    @property
    def fits(self) -> bool:
        return all(sum(ways.values()) < float("inf") for ways in self.seconds.values())

    def tokens_per_second(self, batch: int) -> float:
        """0 where it does not fit."""
        return batch / sum(self.seconds[batch].values())

    def as_dict(self) -> dict[str, Any]:
        rates = {str(batch): self.tokens_per_second(batch) for batch in self.seconds}
        seconds = {
            batch: {way: value for way, value in ways.items() if value < float("inf")}
            for batch, ways in self.seconds.items()
        }
        return asdict(self) | {"seconds": seconds, "fits": self.fits, "tokens_per_second": rates}


def recommend(plans: Sequence[RankPlan], batch: int) -> tuple[RankPlan, str] | None:
    """The fastest at a batch, unless fewer ranks are nearly as fast, and why; None: none fits."""
    plans = [plan for plan in plans if plan.fits]
    if not plans:
        return None
    best = max(plans, key=lambda plan: plan.tokens_per_second(batch))
    rate = best.tokens_per_second(batch)
    near = [plan for plan in plans if plan.tokens_per_second(batch) * WORTH >= rate]
    chosen = min(near, key=lambda plan: (plan.ranks, plan is not best))
    if chosen is best and len(plans) > 1:
        others = (plan for plan in plans if plan is not best)
        second = max(others, key=lambda plan: plan.tokens_per_second(batch))
        gain = rate / second.tokens_per_second(batch)
        return best, f"the fastest at {batch} sequences, {gain:.2f} times {second.name}"
    if chosen is best:
        return best, "the only arrangement that fits"
    less = 1 - chosen.tokens_per_second(batch) / rate
    return chosen, f"{best.name} would be only {less / (1 - less):.0%} faster at {batch} sequences"
