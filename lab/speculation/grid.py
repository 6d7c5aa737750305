"""Which part of a model drafts best? Acceptance by resident experts, their bits, and their choice.

The shipped model at 8 bits verifies; the draft is the same planes with a part of the experts of
each layer and a part of the bits. Residents are those that a domain's text visits most
(``frequency``), those that it weighs most (``mass``), those that the prompt itself weighs most
(``prompt``), random ones, other ones for each prompt, or those that the tokens of the draft vote
for (``voted``: they have to be there then). Everything else is as in service: keys and values of
the context are the model's own, those of a draft are thrown away. Legend: E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality import changed, nested
from benchmarks.speculation_contenders import Contender
from benchmarks.speculation_runs import MAX_DEPTH, Prompts, decode
from benchmarks.texts import TEXTS, heldout
from kernels import ExpertWeights, experts_forward
from lab.speculation.residents import Popularity, Resident, Voted, first
from moe import MoE
from moe.describe.routers import find_selectors
from moe.speculate import Speculator
from moe.speculate.draft import FixedDepth, Mode
from moe.speculate.elastic import ElasticDrafts

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
BITS = (2, 4, 8)
DEPTH = 4
HOT = 2000
"""Tokens of a domain, from its beginning, whose most frequent experts are resident."""
SELECTIONS = ("frequency", "random", "voted")
"""At every share and number of bits, where a share is not all."""
MORE = ("mass", "prompt")
PARTED = (0.25, 0.5)
"""Shares at which these are compared, too, at 4 bits."""


@dataclass(frozen=True)
class Point:
    """One cell of the grid."""

    selection: str
    share: float
    bits: int
    way: str = "planes"


class Grid:
    """Drafts of the shipped model with any part of it.

    Args:
        model: at 8 bits, all in memory.
        whole: the same model as it was before it was quantised, for other ways to cut bits.
    """

    def __init__(self, model: MoE, whole: MoE) -> None:
        self.model = model
        self._selectors = [found.selector for found in find_selectors(model.backbone)]
        begun = {name: model.codec.encode(heldout(name))[:HOT] for name in TEXTS}
        self._popular = {name: Popularity.of(model, ids) for name, ids in begun.items()}
        self._whole = [e for e in whole.experts.layers if isinstance(e, ExpertWeights)]

    def measure(
        self, point: Point, count: int, new_tokens: int, temperature: float
    ) -> dict[str, Any]:
        """Acceptance of one cell, over so many prompts of each domain.

        ``by_prompt`` has tokens verified and accepted of each prompt, the same ones in every cell.
        """
        contender, layers = Contender(point.selection, None, DEPTH), self._layers(point)
        for text in TEXTS:
            for index, prompt in enumerate(Prompts(self.model, text).take(count)):
                drafts = self._drafts(point, layers, text, prompt, index)
                run = decode(self.model, drafts, [prompt], new_tokens, temperature)
                contender.runs.append(run)
        acceptance, length = contender.drafted()
        alone = [Contender("", None, DEPTH, [run]).drafted()[0] for run in contender.runs]
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
            "by_prompt": [round(each, 4) for each in alone],
        }

    def _drafts(
        self, point: Point, layers: Sequence[Any], text: str, prompt: Sequence[int], index: int
    ) -> Speculator:
        """A draft for one prompt of a domain."""
        voted = point.selection == "voted"
        mode = Mode(
            "elastic",
            bits=point.bits if point.way == "planes" else None,
            rules=(Voted(point.share),) if voted else (),
        )
        served = Resident(layers, experts_forward, self._selectors)
        if not voted and point.share < 1:
            served.masks = self._masks(point, text, prompt, index)
        elastic = ElasticDrafts(self.model.backbone, served)
        return Speculator(FixedDepth(mode, DEPTH), {"elastic": elastic}, [], MAX_DEPTH)

    def _layers(self, point: Point) -> Sequence[Any]:
        if point.way == "planes":
            return self.model.experts.layers
        centred = point.way == "centred"
        return [
            changed(e, lambda w: nested(w, point.bits, 64, centred=centred)) for e in self._whole
        ]

    def _masks(
        self, point: Point, text: str, prompt: Sequence[int], index: int
    ) -> Sequence[Tensor]:
        """Of each layer, the residents."""
        popular = self._popular[text]
        values = popular.counts if point.selection == "frequency" else popular.mass
        if point.selection == "prompt":
            values = Popularity.of(self.model, prompt).mass
        elif point.selection == "random":
            draw = torch.Generator().manual_seed(1000 * TEXTS.index(text) + index)
            values = [torch.rand(len(value), generator=draw) for value in values]
        return [first(value, point.share) for value in values]


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


def points(quick: bool) -> Iterator[Point]:
    """The cells, and the ways to read a prefix of the bits."""
    for share in (0.25, 1.0) if quick else SHARES:
        for bits in (4,) if quick else BITS:
            chosen = SELECTIONS if share < 1 else SELECTIONS[:1]
            for selection in (*chosen, *(MORE if share in PARTED and bits == 4 else ())):
                yield Point(selection, share, bits)
    for bits in (4,) if quick else (2, 4):
        for way in ("centred", "truncated"):
            yield Point("frequency", 1.0, bits, way)
