"""A controller for a model: how large its experts are, where they lie, and what reads them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from kernels import QuantizedExperts
from kernels.planes import PREFIX_BITS
from moe.loading.hub import experts_per_token
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.speculate.control.controller import AutoController
from moe.speculate.control.coverage import Counts, Sizes
from moe.speculate.control.steps import StepCosts
from moe.speculate.draft import Mode
from offload.layer import OffloadedExperts, held_experts

MEMORY, DISK = 12e9, 1e9
"""Bytes a second that are assumed until steps have been measured; their proportion matters."""
OPERATIONS = 1e11
"""The same of multiplications."""


def make_controller(
    backbone: Backbone, experts: MoELayers, modes: Sequence[Mode], max_depth: int
) -> AutoController:
    """One that knows nothing yet but sizes."""
    layers = experts.layers
    top_k = float(experts_per_token(backbone.model.config))
    total = sum(layer.num_experts for layer in layers)
    first = layers[0]
    slots = first.cache.slots if isinstance(first, OffloadedExperts) else total
    visits = top_k * len(layers)
    size = sum(layer.expert_bytes for layer in layers) / len(layers)
    others = trunk_bytes(backbone)
    prices = (
        others / MEMORY,
        (others + visits * size) / OPERATIONS,
        size / MEMORY,
        size / DISK,
    )
    whole = others + visits * size
    relative = {
        mode: (others + visits * size * _share(mode, layers, top_k)) / whole for mode in modes
    }
    costs = StepCosts(Sizes(total, visits, slots), prices, relative)
    return AutoController(modes, max_depth, costs, ExpertCounts(experts))


def trunk_bytes(backbone: Backbone) -> int:
    """Bytes that every pass reads: all weights but experts and the embeddings of the input."""
    model, head = backbone.model, backbone.model.get_output_embeddings()
    skipped = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not getattr(head, "weight", None)
    }
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if id(t) not in skipped)


def _share(mode: Mode, layers: Sequence[object], top_k: float) -> float:
    """Of the bytes of a token's experts that a draft of this mode reads."""
    held = held_experts(layers[0])  # type: ignore[arg-type]
    bits = PREFIX_BITS[len(held.planes[0]) - 1] if isinstance(held, QuantizedExperts) else 16
    share = min((mode.bits or bits) / bits, 1.0) * (1 - mode.skipped)
    return share * min((mode.experts or top_k) / top_k, 1.0)


class ExpertCounts:
    """Distinct experts of steps, and the missing ones among them, as a cache of experts counts
    them. Where all are in memory nothing is counted: what steps took says enough, and to count
    what routing statistics have put off takes longer than a step.
    """

    def __init__(self, experts: MoELayers) -> None:
        caches = [layer.cache for layer in experts.layers if isinstance(layer, OffloadedExperts)]
        self._layers = caches[0].statistics.layers if caches else ()
        self._before = 0.0, 0.0

    def start(self) -> None:
        """A step begins, or several that are counted together."""
        self._before = self._total()

    def read(self) -> Counts | None:
        """What has been visited since; None where it was not counted, or statistics began anew."""
        pairs = zip(self._total(), self._before, strict=True)
        distinct, missing = (now - before for now, before in pairs)
        return (distinct, missing) if distinct > 0 <= missing else None

    def _total(self) -> Counts:
        missing = sum(layer.misses for layer in self._layers)
        return float(missing + sum(layer.hits for layer in self._layers)), float(missing)
