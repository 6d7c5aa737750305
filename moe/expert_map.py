"""Which experts are where, and how many tokens went to each: what one draws to watch them.

`expert_layout` says what changes seldom, `expert_activity` what changes with every step. Both are
cheap enough to be asked once a second, and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.placement import Placement
from kernels import QuantizedExperts
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from offload.layer import LayerExperts, OffloadedExperts
from offload.offloaded import PLACES, Offloaded, bytes_in
from routing.statistics import RoutingStatistics

ELSEWHERE = "rank"
"""Only other ranks hold the expert."""
PART_TOKENS = 64
"""Tokens of a part of `expert_choices`: running sequences wait for it."""


def expert_layout(
    layers: Sequence[LayerExperts], offloaded: Offloaded | None, placements: Sequence[Placement]
) -> dict[str, Any]:
    """Return the facts that change seldom, for JSON: what digits in ``where`` mean; for each layer,
    the bits of each expert and the ranks that hold it (null on one rank).

    Args:
        placements: of each layer; empty on one rank.
    """
    bits = [_bits_of(layer) for layer in layers] if offloaded is None else offloaded.bits
    ranks: Sequence[list[list[int]] | None] = [_ranks_of(placement) for placement in placements]
    ranks = ranks or [None] * len(layers)
    return {
        "places": [*PLACES, ELSEWHERE],
        "layers": [
            {"bits": list(own), "ranks": held} for own, held in zip(bits, ranks, strict=True)
        ],
    }


def expert_activity(
    statistics: RoutingStatistics, offloaded: Offloaded | None, placements: Sequence[Placement]
) -> list[dict[str, Any]]:
    """Return the facts that each step changes, for JSON: for each layer the ``tokens`` of this rank
    that each expert got since loading, and ``where`` each expert is, as one digit."""
    tokens_LE = statistics.tokens_of_all().tolist()
    counts = statistics.num_experts
    whole, elsewhere = PLACES.index("memory"), len(PLACES)
    places_LE = (
        np.full((len(counts), max(counts, default=0)), whole, np.uint8)
        if offloaded is None
        else offloaded.places()
    )
    for layer, placement in enumerate(placements):
        absent_E = placement.copies_ER[:, 0] == 0
        if offloaded is not None:
            absent_E &= places_LE[layer, : len(absent_E)] == 0
        places_LE[layer, : len(absent_E)][absent_E] = elsewhere
    return [
        {"tokens": tokens[:count], "where": _digits(places_E[:count])}
        for count, tokens, places_E in zip(counts, tokens_LE, places_LE, strict=True)
    ]


def expert_choices(
    backbone: Backbone,
    experts: MoELayers,
    token_ids: Sequence[int],
    locked: Callable[[], AbstractContextManager[object]],
) -> Iterator[list[list[list[int]]]]:
    """Read tokens part by part; of each part, for each MoE layer and token the experts that it went
    to. Other steps may run between two parts.

    It counts as any reading does, in statistics and in the expert cache.

    Args:
        locked: held while a part is read.
    """
    cache = backbone.new_cache(len(token_ids))
    part = PART_TOKENS if backbone.can_cut else len(token_ids)
    for begin in range(0, len(token_ids), part):
        with locked(), torch.inference_mode():
            chosen = _read(backbone, experts, Work(token_ids[begin : begin + part], cache))
        yield chosen


def _read(backbone: Backbone, experts: MoELayers, work: Work) -> list[list[list[int]]]:
    """Read tokens; of each MoE layer and token, the experts that it went to."""
    chosen: list[list[list[int]]] = [[] for _ in experts.layers]

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        for call in calls:
            ids_NK = call.routing.expert_ids.tolist()
            chosen[layer] += [[expert for expert in ids if expert >= 0] for ids in ids_NK]
        return experts.run(layer, calls)

    lanes = backbone.lanes([work])
    run_lanes(lanes, run)
    for lane in lanes:
        lane.result()
    return chosen


def cache_counters(offloaded: Offloaded) -> dict[str, Any]:
    """Totals of the cache that kernels read, and bytes that came from disk, for JSON."""
    total = offloaded.cache.statistics.total
    return {
        "hits": total.hits,
        "misses": total.misses,
        "late": total.late,
        "prefetches": total.prefetches,
        "evictions": total.evictions,
        "stall_seconds": total.stall_seconds,
        "disk_bytes": bytes_in(offloaded.tiers[-1].cache.statistics.total),
        "slots": offloaded.cache.slots,
    }


def _bits_of(layer: LayerExperts) -> list[int]:
    assert not isinstance(layer, OffloadedExperts), "a cache's experts have their bits in its store"
    if isinstance(layer, QuantizedExperts):
        return [layer.bits_of(expert) for expert in range(layer.num_experts)]
    return [8 * layer.gate_up_EGH.element_size()] * layer.num_experts


def _ranks_of(placement: Placement) -> list[list[int]]:
    """The ranks that hold each expert."""
    return [np.flatnonzero(held_R).tolist() for held_R in placement.copies_ER]


def _digits(places_E: NDArray[np.uint8]) -> str:
    return (places_E + ord("0")).astype(np.uint8).tobytes().decode("ascii")
