"""Predict decoding on one rank, on several that share the experts, and on independent replicas.

The prediction is the least time of a decode step, as in `decode_speed`: bytes over bandwidths,
without overlap. Ranks of a node share its memory bandwidth and its disk; ranks that share experts
exchange ids, rows and results at each layer. `traffic` counts these on routing decisions.
Computation and other waits are not counted.
Legend: R ranks, B sequences of all ranks (tokens of a step), S steps, L layers, K experts per
token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts.dispatch import should_inline_rows
from experts.dispatch.assignment import serving_ranks
from experts.placement import Placement, slots_for
from moe.commands.plan.decode_speed import (
    BATCHES,
    Bandwidths,
    DecodeSizes,
    Locality,
    UniformRouting,
)
from moe.commands.plan.speeds import Link

WORTHWHILE = 1.05
"""Speed-up that justifies more ranks."""
Ints = NDArray[np.int64]
STEPS, LAYERS = 24, 4
"""Most steps and layers that are sampled."""


def exchanges(ranks: int, slots: float, near: bool) -> int:
    """Exchanges of a layer: ids, rows and results, or 2 if rows go along with the ids."""
    return 2 if should_inline_rows(ranks, slots, near) else 3


@dataclass(frozen=True)
class EngineCosts:
    """Seconds of an engine's work.

    Attributes:
        step_s: of a decode step, by its number of sequences.
        chunk_s: of so many tokens of a prompt.
        chunk_tokens: most prompt tokens of a step.
        handover_s: of the keys and values of so many tokens on their way between two engines.
    """

    step_s: Callable[[int], float]
    chunk_s: Callable[[int], float]
    chunk_tokens: int
    handover_s: Callable[[int], float]

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds of a whole prompt."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        return whole * self.chunk_s(self.chunk_tokens) + (self.chunk_s(rest) if rest else 0.0)


@dataclass(frozen=True)
class RankAdvice:
    """A method's judgement of so many ranks.

    Attributes:
        name: of the method.
        advice: one line.
        simulated: the figures behind it, ready for JSON.
        assumption: what they take for granted, one line; empty: nothing.
    """

    name: str
    advice: str
    simulated: Sequence[Mapping[str, Any]] = ()
    assumption: str = ""


@dataclass(frozen=True)
class RankForecast:
    """Predicts the speed of one model on several ranks.

    Attributes:
        needs: of the model.
        machine: that the ranks run on.
        ranks_a_node: most ranks of a node.
        locality: of the model's routing.
        traffic_of: (batch, ranks) -> traffic.
    """

    needs: ModelNeeds
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
            paths = self._reading(on_node, traffic.distinct, read_by_all, hits)
            if ranks > 1:
                paths["exchange"] = self._exchange(traffic, batch / ranks, ranks, on_node)
            seconds[batch] = paths
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
        """Independent ranks; each needs all experts."""
        total = self.needs.sizes.total
        slots, rank_bytes = self._memory(total, min(ranks, self.ranks_a_node))
        seconds = {}
        for batch in batches:
            own = -(-batch // ranks)
            on_node = min(-(-batch // own), self.ranks_a_node)
            seconds[batch] = self._alone(self.locality, on_node, slots, own)
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

    def engine_costs(self, engines: int, prompts: PromptNeeds) -> EngineCosts | None:
        """Return the costs of reading and decoding on each of so many independent ranks; None if a
        rank does not fit. A chunk of a prompt is taken to visit every expert equally."""
        total, on_node = self.needs.sizes.total, min(engines, self.ranks_a_node)
        slots, _ = self._memory(total, on_node)
        uniform = UniformRouting(self.needs.sizes)
        network = self.machine.link if engines <= self.ranks_a_node else self.machine.network

        def chunk_s(tokens: int) -> float:
            paths = self._alone(uniform, on_node, slots, tokens)
            computing = on_node * tokens * prompts.flops_a_token / prompts.flops_per_s
            return max(paths.pop("memory"), computing) + sum(paths.values())

        @cache
        def step_s(batch: int) -> float:
            return sum(self._alone(self.locality, on_node, slots, min(batch, BATCHES[-1])).values())

        if not chunk_s(1) < float("inf"):
            return None

        def handover_s(tokens: int) -> float:
            return prompts.kv_bytes_a_token * tokens / network.bytes_per_s + network.seconds

        return EngineCosts(step_s, cache(chunk_s), prompts.chunk_tokens, handover_s)

    def _alone(self, locality: Locality, on_node: int, slots: int, tokens: int) -> dict[str, float]:
        """Seconds, by path, in which an independent rank reads the weights for so many tokens,
        beside others on its node that do the same."""
        hits = 1.0 if slots == self.needs.sizes.total else locality.hit_ratio(tokens, slots)
        distinct = locality.distinct(tokens)
        return self._reading(on_node, distinct, on_node * distinct, hits)

    def _memory(self, wanted: int, on_node: int) -> tuple[int, int]:
        """Return how many of the wanted experts fit in a rank's memory, and all bytes of the
        rank."""
        needs, available = self.needs, self.machine.available_bytes
        used, each = needs.fixed_bytes, needs.sizes.expert_bytes
        slots = wanted
        if available is not None:
            slots = max(min((available // on_node - used) // each, wanted), 0)
        return slots, used + slots * each

    def _reading(
        self, on_node: int, distinct: float, read_by_all: float, hits: float
    ) -> dict[str, float]:
        """Seconds of a node's step, by path.

        Args:
            distinct: experts of a layer read by the rank that reads most.
            read_by_all: experts of a layer read by all ranks of the node together.
            hits: share of them that is in memory.
        """
        sizes, speeds = self.needs.sizes, self.machine.speeds
        expert_bytes = sizes.layers * sizes.expert_bytes
        moved = on_node * (sizes.trunk_bytes + distinct * expert_bytes)
        paths = {"memory": moved / speeds.memory}
        if hits < 1:
            missed = (1 - hits) * read_by_all * expert_bytes
            paths["disk"] = missed / speeds.disk if speeds.disk else float("inf")
        return paths

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


@dataclass(frozen=True)
class Machine:
    """The nodes that ranks run on, all alike.

    Attributes:
        speeds: of one node.
        available_bytes: memory of one node; None if unknown.
        link: between ranks of a node.
        network: between nodes.
    """

    speeds: Bandwidths
    available_bytes: int | None
    link: Link
    network: Link


@dataclass(frozen=True)
class ModelNeeds:
    """The memory that a model needs on each rank.

    Attributes:
        sizes: of its experts.
        fixed_bytes: memory of every rank without experts: trunk, activations, reserve, the smallest
            KV cache.
        row_bytes: of one token's hidden state.
        replicas: additional copies, as a share of all experts.
    """

    sizes: DecodeSizes
    fixed_bytes: int
    row_bytes: int
    replicas: float


@dataclass(frozen=True)
class PromptNeeds:
    """The work of reading prompts.

    Attributes:
        flops_a_token: outside attention.
        flops_per_s: of a node.
        kv_bytes_a_token: of keys and values.
        chunk_tokens: most prompt tokens of a step.
    """

    flops_a_token: float
    flops_per_s: float
    kv_bytes_a_token: int
    chunk_tokens: int


@dataclass(frozen=True)
class RankPlan:
    """The prediction for one number of ranks.

    Attributes:
        name: for the table.
        ranks, nodes: processes, and machines that they run on.
        rank_bytes: memory of a rank.
        slots: experts in the memory of a rank.
        resident: share of the rank's experts that are in its memory.
        exchanged_bytes: sent and received for a token over all layers, at the largest batch.
        imbalance: the heaviest rank's load over the mean, at the largest batch.
        seconds: of a step, by batch and path.
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
        return all(sum(paths.values()) < float("inf") for paths in self.seconds.values())

    def tokens_per_second(self, batch: int) -> float:
        """0 if it does not fit."""
        return batch / sum(self.seconds[batch].values())

    def as_dict(self) -> dict[str, Any]:
        rates = {str(batch): self.tokens_per_second(batch) for batch in self.seconds}
        seconds = {
            batch: {path: value for path, value in paths.items() if value < float("inf")}
            for batch, paths in self.seconds.items()
        }
        return asdict(self) | {"seconds": seconds, "fits": self.fits, "tokens_per_second": rates}


def recommend(plans: Sequence[RankPlan], batch: int) -> tuple[RankPlan, str] | None:
    """The fastest plan at a batch size, or one of fewer ranks that is nearly as fast, and why;
    None if none fits."""
    plans = [plan for plan in plans if plan.fits]
    if not plans:
        return None
    best = max(plans, key=lambda plan: plan.tokens_per_second(batch))
    rate = best.tokens_per_second(batch)
    near = [plan for plan in plans if plan.tokens_per_second(batch) * WORTHWHILE >= rate]
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


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one layer in one step.

    Attributes:
        rows_RR: number of tokens that each rank sends to each rank, itself included.
        slots_RR: number of their expert slots that each rank serves.
        distinct_R: distinct experts that each rank reads.
    """

    rows_RR: Ints
    slots_RR: Ints
    distinct_R: Ints

    @property
    def served_R(self) -> Ints:
        """The load of each rank: the slots that it serves."""
        return np.asarray(self.slots_RR.sum(0))


def step_traffic(experts_TK: Ints, source_T: Ints, placement: Placement) -> StepTraffic:
    """The traffic of one step, with copies of experts chosen as the dispatcher does.

    Args:
        experts_TK: expert ids, -1 for unused slots.
        source_T: the rank of each token, ascending.
    """
    experts, ranks = placement.num_experts, placement.ranks
    serving_TK = serving_ranks(experts_TK, source_T, placement)
    token, slot = (serving_TK >= 0).nonzero()
    slots_TR = np.zeros((len(experts_TK), ranks), np.int64)
    np.add.at(slots_TR, (token, serving_TK[token, slot]), 1)
    rows_RR, slots_RR = np.zeros((2, ranks, ranks), np.int64)
    np.add.at(rows_RR, source_T, (slots_TR > 0).astype(np.int64))
    np.add.at(slots_RR, source_T, slots_TR)
    read_ER = np.zeros((experts, ranks), bool)
    read_ER[experts_TK[token, slot], serving_TK[token, slot]] = True
    return StepTraffic(rows_RR, slots_RR, read_ER.sum(0))


@dataclass(frozen=True)
class Traffic:
    """Mean traffic over layers and steps.

    Attributes:
        pairs: other ranks that a token is sent to.
        slots: slots of a token that other ranks serve.
        imbalance: the heaviest rank's slots over the mean.
        distinct: distinct experts of the rank that reads most.
        distinct_all: distinct experts of each rank, summed over all ranks.
    """

    pairs: float
    slots: float
    imbalance: float
    distinct: float
    distinct_all: float


def traffic(placements: Sequence[Placement], steps_SLBK: Ints) -> Traffic:
    """The traffic of steps ``steps_SLBK`` (expert ids) whose tokens are divided evenly among ranks,
    with a placement for each layer."""
    batch = steps_SLBK.shape[2]
    source = np.arange(batch) * placements[0].ranks // batch
    found = []
    for layer, placement in enumerate(placements):
        for experts_TK in steps_SLBK[:, layer]:
            step = step_traffic(experts_TK, source, placement)
            served_R = step.served_R
            away = [
                int(matrix.sum() - matrix.trace()) / batch
                for matrix in (step.rows_RR, step.slots_RR)
            ]
            uneven = served_R.max() / served_R.mean()
            found.append((*away, uneven, step.distinct_R.max(), step.distinct_R.sum()))
    return Traffic(*np.mean(found, axis=0).tolist())


def uniform_steps(sizes: DecodeSizes, batch: int) -> Ints:
    """``(S, L, B, K)`` expert ids of uniform routing."""
    rng = np.random.default_rng(0)
    width = max(round(sizes.top_k), 1)
    keys = rng.random((STEPS, min(sizes.layers, LAYERS), batch, sizes.experts))
    return np.argpartition(keys, width - 1, axis=3)[..., :width]


def loads_of(steps_SLBK: Ints, num_experts: int) -> list[NDArray[np.float64]]:
    """For each layer ``(S, E)``: tokens of each expert in each step."""
    counts = []
    for layer in range(steps_SLBK.shape[1]):
        steps = [ids[ids >= 0] for ids in steps_SLBK[:, layer]]
        counts.append(np.array([np.bincount(ids, minlength=num_experts) for ids in steps], float))
    return counts
