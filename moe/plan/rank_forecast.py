"""One rank, several that share the experts, or as many independent replicas: what each would do.

The least time of a decode step, as in `moe.plan.decode_speed`: bytes over bandwidths, every way
waiting for the others. Ranks of a node share its memory bandwidth and its disk. Under expert
parallelism ranks exchange ids, rows and results at each layer. Arithmetic, and waiting for anything
but these, is not in it. Legend: R ranks, B sequences of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experts.dispatch import rows_go_along
from experts.placement import slots_for
from moe.plan.decode_speed import Locality
from moe.plan.rank_plan import Machine, Needs, RankPlan
from moe.plan.rank_traffic import Traffic


def exchanges(ranks: int, slots: float, near: bool) -> int:
    """Of a layer: ids, rows and results, or rows along with the ids."""
    return 2 if rows_go_along(ranks, slots, near) else 3


@dataclass(frozen=True)
class RankForecast:
    """Of arrangements of one model.

    Attributes:
        needs: of the model.
        machine: that the ranks run on.
        ranks_a_node: at most.
        locality: of its routing.
        traffic_of: of a batch on so many ranks.
    """

    needs: Needs
    machine: Machine
    ranks_a_node: int
    locality: Locality
    traffic_of: Callable[[int, int], Traffic]

    def plans(self, ranks: int, batches: Sequence[int]) -> list[RankPlan]:
        """1 to ``ranks`` ranks (powers of two and the last), then as many independent replicas."""
        powers = (2**power for power in range(ranks.bit_length()))
        counts = sorted({ranks, *powers})
        found = [self.shared(count, batches) for count in counts]
        return found + [self.replicas(ranks, batches)] * (ranks > 1)

    def shared(self, ranks: int, batches: Sequence[int]) -> RankPlan:
        """Ranks that share the experts."""
        sizes, on_node = self.needs.sizes, min(ranks, self.ranks_a_node)
        share = sizes.layers * slots_for(sizes.experts, ranks, self.needs.replicas) // ranks
        slots, rank_bytes = self._memory(share, on_node)
        seconds, traffic = {}, Traffic(0.0, 0.0, 1.0, 0.0, 0.0)
        for batch in batches:
            traffic = self.traffic_of(batch, ranks)
            hits = 1.0 if slots == share else self.locality.hit_ratio(batch, slots * ranks)
            read_by_all = traffic.distinct_all * on_node / ranks
            ways = self._reading(on_node, traffic.distinct, read_by_all, hits)
            if ranks > 1:
                ways["exchange"] = self._exchange(traffic, batch / ranks, ranks, on_node)
            seconds[batch] = ways
        rows = traffic.pairs + traffic.slots
        return RankPlan(
            name=f"{ranks} ranks" if ranks > 1 else "1 rank",
            ranks=ranks,
            nodes=-(-ranks // self.ranks_a_node),
            rank_bytes=rank_bytes,
            slots=slots,
            resident=slots / share,
            exchanged_bytes=sizes.layers * rows * self.needs.row_bytes,
            imbalance=traffic.imbalance,
            seconds=seconds,
        )

    def replicas(self, ranks: int, batches: Sequence[int]) -> RankPlan:
        """Ranks that know nothing of each other; each may be asked for every expert."""
        total = self.needs.sizes.total
        slots, rank_bytes = self._memory(total, min(ranks, self.ranks_a_node))
        seconds = {}
        for batch in batches:
            own = -(-batch // ranks)
            on_node = min(-(-batch // own), self.ranks_a_node)
            distinct = self.locality.distinct(own)
            hits = 1.0 if slots == total else self.locality.hit_ratio(own, slots)
            seconds[batch] = self._reading(on_node, distinct, on_node * distinct, hits)
        return RankPlan(
            name=f"{ranks} replicas",
            ranks=ranks,
            nodes=-(-ranks // self.ranks_a_node),
            rank_bytes=rank_bytes,
            slots=slots,
            resident=slots / total,
            exchanged_bytes=0.0,
            imbalance=1.0,
            seconds=seconds,
        )

    def _memory(self, wanted: int, on_node: int) -> tuple[int, int]:
        """Experts that a rank has in memory, of those wanted, and all its bytes."""
        needs, available = self.needs, self.machine.available_bytes
        used, each = needs.fixed_bytes, needs.sizes.expert_bytes
        slots = wanted
        if available is not None:
            slots = max(min((available // on_node - used) // each, wanted), 0)
        return slots, used + slots * each

    def _reading(
        self, on_node: int, distinct: float, read_by_all: float, hits: float
    ) -> dict[str, float]:
        """Seconds of a step of a node.

        Args:
            distinct: experts of a layer that the rank reads which reads most.
            read_by_all: those that all ranks of the node read.
            hits: share of them that is in memory.
        """
        sizes, speeds = self.needs.sizes, self.machine.speeds
        expert_bytes = sizes.layers * sizes.expert_bytes
        moved = on_node * (sizes.trunk_bytes + distinct * expert_bytes)
        ways = {"memory": moved / speeds.memory}
        if hits < 1:
            missed = (1 - hits) * read_by_all * expert_bytes
            ways["disk"] = missed / speeds.disk if speeds.disk else float("inf")
        return ways

    def _exchange(self, traffic: Traffic, tokens: float, ranks: int, on_node: int) -> float:
        """Seconds of all exchanges of a step: rows out to ranks, results of slots back."""
        link, network = self.machine.link, self.machine.network
        sent = tokens * (traffic.pairs + traffic.slots) * self.needs.row_bytes
        far = (ranks - on_node) / (ranks - 1)
        near_s = (1 - far) * sent / link.bytes_per_s
        far_s = far * sent * on_node / network.bytes_per_s
        latency = network.seconds if far else link.seconds
        latency *= exchanges(ranks, self.needs.sizes.top_k, near=not far)
        return self.needs.sizes.layers * (latency + near_s + far_s)
