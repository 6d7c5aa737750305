"""Which experts are in memory, for drafts that have no others: by what a text visits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe import MoE
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.packed_pass import Work
from moe.speculate.draft import Kept
from moe.speculate.elastic import DraftLayers
from routing import Routing
from routing.policies.base import by_expert
from routing.routing import UNUSED, select_top_k


class Resident(DraftLayers):
    """Draft layers of which only some experts are there; see `DraftLayers`."""

    masks: Sequence[Tensor] | None = None

    def _allowed(self, layer: int, routing: Routing) -> Tensor | None:
        return super()._allowed(layer, routing) if self.masks is None else self.masks[layer]


@dataclass(frozen=True)
class Voted:
    """The draft rule by which the tokens of a draft elect the residents themselves."""

    share: float

    @property
    def name(self) -> str:
        return f"voted{self.share:g}"

    def skips(self, layers: int) -> frozenset[int]:
        return frozenset()

    def allowed(
        self, routing: Routing, here_E: Tensor | None, num_experts: int, kept: Kept
    ) -> Tensor:
        weights_E = by_expert(routing, routing.weights, num_experts).sum(0)
        kept["votes"] = kept.get("votes", torch.zeros_like(weights_E)) + weights_E
        return first(kept["votes"], self.share)


@dataclass
class Popularity:
    """Of each layer ``(E,)``: how many rows visited each expert, and with what weight in all."""

    counts: list[Tensor]
    mass: list[Tensor]

    @classmethod
    def of(cls, model: MoE, ids: Sequence[int]) -> Popularity:
        """While a text is read."""
        layers = model.experts.layers
        found = cls(*([torch.zeros(e.num_experts) for e in layers] for _ in range(2)))

        def run(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor | Exception]:
            for call in calls:
                routing, count = call.routing, layers[layer].num_experts
                used = (routing.expert_ids != UNUSED).float()
                found.counts[layer] += by_expert(routing, used, count).sum(0)
                found.mass[layer] += by_expert(routing, routing.weights, count).sum(0)
            return model.experts.run(layer, calls)

        with torch.inference_mode():
            run_lanes(model.backbone.lanes([Work(ids, model.backbone.new_cache(len(ids)))]), run)
        return found


def first(value_E: Tensor, share: float) -> Tensor:
    """``(E,)`` bool: the share of all experts with the highest values, one at least."""
    chosen_E = torch.zeros(len(value_E), dtype=torch.bool)
    chosen_E[select_top_k(value_E[None], max(1, round(share * len(value_E))))[0]] = True
    return chosen_E
