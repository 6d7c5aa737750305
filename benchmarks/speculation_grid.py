"""Which part of a model drafts best? Acceptance by resident experts, their bits, and their choice.

The shipped model at 8 bits verifies; the draft is the same planes with a part of the experts of
each layer and a part of the bits: those that a domain's text visits most, random ones, or those
that the tokens of the draft itself vote for (which have to be there then). Everything else is as in
service: keys and values of the context are the model's own, those of a draft are thrown away.
Legend: E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.predict import TEXTS, heldout
from benchmarks.quality import changed, nested
from benchmarks.speculation_runs import MAX_DEPTH, Contender, Prompts, decode
from kernels import ExpertWeights, experts_forward
from kernels.reference import AnyExperts
from moe import MoE
from moe.kv import Work
from moe.lanes import run_lanes
from moe.selection import find_selectors
from moe.speculate import Speculator
from moe.speculate.draft import Mode
from moe.speculate.elastic import ElasticDrafts
from moe.speculate.fixed import FixedDepth
from moe.speculate.layers import DraftLayers
from routing import Routing
from routing.routing import select_top_k

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
BITS = (2, 4, 8)
DEPTH = 4
HOT = 2000
"""Tokens of a domain, from its beginning, whose most frequent experts are resident."""
SELECTIONS = ("frequency", "random", "voted")


@dataclass(frozen=True)
class Point:
    """One cell of the grid."""

    selection: str
    share: float
    bits: int
    way: str = "planes"


class Resident(DraftLayers):
    """Draft layers of which only some experts are there; see `DraftLayers`."""

    masks: Sequence[Tensor] | None = None

    def _allowed(self, layer: int, routing: Routing, held: AnyExperts) -> Tensor | None:
        return super()._allowed(layer, routing, held) if self.masks is None else self.masks[layer]


class Grid:
    """Drafts of the shipped model with any part of it.

    Args:
        model: at 8 bits, all in memory.
        whole: the same model as it was before it was quantised, for other ways to cut bits.
    """

    def __init__(self, model: MoE, whole: MoE | None = None) -> None:
        self._model = model
        self._selectors = [found.selector for found in find_selectors(model._trunk)]
        begun = {name: model.codec.encode(heldout(name))[:HOT] for name in TEXTS}
        self._frequencies = {name: frequencies(model, ids) for name, ids in begun.items()}
        self._whole: list[ExpertWeights] = []
        if whole is not None:
            self._whole = [e for e in whole._experts.layers if isinstance(e, ExpertWeights)]

    def drafts(self, point: Point, text: str) -> Speculator:
        """A draft in which the most frequent experts are those of one domain."""
        voted = point.selection == "voted"
        mode = Mode(
            "elastic",
            bits=point.bits if point.way == "planes" else None,
            core="vote" if voted else "all",
            share=point.share if voted else 1.0,
        )
        layers = Resident(self._layers(point), experts_forward, self._selectors)
        if not voted:
            layers.masks = [
                self._mask(counts, point, 100 * TEXTS.index(text) + index)
                for index, counts in enumerate(self._frequencies[text])
            ]
        elastic = ElasticDrafts(self._model._trunk, layers)
        return Speculator(FixedDepth(mode, DEPTH), elastic, [], MAX_DEPTH)

    def _layers(self, point: Point) -> Sequence[Any]:
        if point.way == "planes":
            return self._model._experts.layers
        centred = point.way == "centred"
        return [
            changed(e, lambda w: nested(w, point.bits, 64, centred=centred)) for e in self._whole
        ]

    def _mask(self, counts: Tensor, point: Point, seed: int) -> Tensor:
        seats = max(1, round(point.share * len(counts)))
        if point.selection == "random":
            counts = torch.rand(len(counts), generator=torch.Generator().manual_seed(seed))
        mask = torch.zeros(len(counts), dtype=torch.bool)
        mask[select_top_k(counts[None], seats)[0]] = True
        return mask

    def measure(
        self, point: Point, count: int, new_tokens: int, temperature: float
    ) -> dict[str, Any]:
        """Acceptance of one cell, over so many prompts of each domain."""
        contender = Contender(point.selection, None, DEPTH)
        for text in TEXTS:
            drafts = self.drafts(point, text)
            for prompt in Prompts(self._model, text).take(count):
                run = decode(self._model, drafts, [prompt], new_tokens, temperature)
                contender.runs.append(run)
        acceptance, length = contender.drafted()
        return {
            "selection": point.selection,
            "resident": point.share,
            "bits": point.bits,
            "way": point.way,
            "temperature": temperature,
            "acceptance": round(acceptance, 4),
            "accepted_length": round(length, 3),
            "draft_bytes_per_token": round(contender.a_token("draft_bytes")),
            "target_bytes_per_token": round(contender.a_token("memory_bytes")),
            "by_position": _by_position(contender),
        }


def _by_position(contender: Contender) -> list[float]:
    verified, accepted = [0] * MAX_DEPTH, [0] * MAX_DEPTH
    for run in contender.runs:
        for mode in run.figures["modes"].values():
            for position, counts in enumerate(mode["by_position"]):
                verified[position] += counts["verified"]
                accepted[position] += counts["accepted"]
    reached = [verified[0], *accepted[:-1]]
    pairs = zip(accepted, reached, verified, strict=True)
    return [round(a / min(r, v), 4) for a, r, v in pairs if v and r]


def frequencies(model: MoE, ids: Sequence[int]) -> list[Tensor]:
    """``(E,)`` of each layer: how often a text visits each expert."""
    model.reset_stats()
    cache = model._trunk.new_cache(len(ids))
    with torch.inference_mode():
        run_lanes(model._trunk.lanes([Work(ids, cache)]), model._experts.run)
    statistics = model._experts.statistics
    layers = range(len(model._experts.layers))
    return [statistics.tokens_per_expert(layer).float() for layer in layers]


def points(quick: bool) -> Iterator[Point]:
    """The cells, and the ways to read a prefix of the bits."""
    for share in (0.25, 1.0) if quick else SHARES:
        for bits in (4,) if quick else BITS:
            for selection in SELECTIONS if share < 1 else SELECTIONS[:1]:
                yield Point(selection, share, bits)
    for bits in (4,) if quick else (2, 4):
        for way in ("centred", "truncated"):
            yield Point("frequency", 1.0, bits, way)
