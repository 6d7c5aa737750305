"""Self-speculation: the next tokens are drafted cheaply and verified by the whole model.

A drafted token is only kept if the model itself would have chosen it, so speculation changes how
fast tokens come and not which. The nouns of this package:

- `Mode`, `Draft`, `Controller` (`draft`): a way to draft, its tokens, and what decides how far;
  `DraftRule`: what a method leaves out of elastic drafts;
- `Speculator`: drafts for a step's sequences, verifies, and reports;
- `NGram`, `Recycling` (`ngram`): model-free drafts from the text so far;
- `PassDrafts` (`passes`): drafts by passes of a network, one token a pass;
- `ElasticDrafts` (`elastic`): by the model itself with fewer experts and bits;
- `MtpDrafts` (`mtp`): by the multi-token-prediction layer that a checkpoint brings;
- `AutoController` (`controller`), `StepTimes`, `Account`: mode ``auto``, its predicted times, and
  its bound on losses;
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernels import Forward, QuantizedExperts
from moe.decode.step import DecodeStep
from moe.describe.routers import find_selectors
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers, Selector
from moe.network.mtp import MtpHead
from moe.settings import SpeculationSettings
from moe.speculate.controller import AutoController
from moe.speculate.draft import Controller, DraftRule, FixedDepth, Mode, Source
from moe.speculate.elastic import DraftLayers, ElasticDrafts
from moe.speculate.mtp import MtpDrafts
from moe.speculate.ngram import ModelFree, NGram, Recycling
from moe.speculate.passes import PassDrafts
from moe.speculate.speculator import Speculator
from offload.layer import LayerExperts, OffloadedExperts, held_experts

FEW = 2
"""Experts of a token in the leanest elastic mode of ``auto``."""

__all__ = ["SPECULATION_OFF", "Speculation", "Speculator", "enable_speculation"]


@dataclass(frozen=True)
class Speculation:
    """The speculator, or the reason why there is none."""

    speculator: Speculator | None
    reason: str

    @property
    def notices(self) -> list[str]:
        """Warnings for a user who asked for drafts."""
        if self.speculator is not None or self is SPECULATION_OFF:
            return []
        return [f"no tokens are drafted: {self.reason}"]


SPECULATION_OFF = Speculation(None, "speculation.mode is off")


def enable_speculation(
    settings: SpeculationSettings,
    backbone: Backbone,
    experts: MoELayers,
    forward: Forward,
    mtp: MtpHead | str = "it was loaded without",
    step: DecodeStep | None = None,
    rules: Sequence[DraftRule] = (),
) -> Speculation:
    """Build the speculator that the settings ask for, if this model can take drafts back.

    Args:
        forward: what runs a layer's experts.
        mtp: the multi-token-prediction layer that the model brings, or why there is none.
        step: the model's decode step, which may run drafts as well; None: it has none.
        rules: of all elastic drafts.
    """
    if settings.mode == "off":
        return SPECULATION_OFF
    if not backbone.packed:
        return Speculation(
            None, "sequences have passes of their own, whose state cannot be taken back"
        )
    if settings.mode == "mtp" and isinstance(mtp, str):
        return Speculation(None, mtp)
    mode = Mode("elastic", settings.bits, settings.experts, tuple(rules))
    why_not = _as_costly_as_the_model(mode, experts.layers)
    if settings.mode == "elastic" and why_not:
        return Speculation(None, why_not)
    automatic = settings.mode == "auto"
    modes = [mode] if settings.mode == "elastic" else []
    if automatic:
        modes = [
            each for each in variants(mode) if not _as_costly_as_the_model(each, experts.layers)
        ]
    passes: dict[Source, PassDrafts] = {}
    if modes:
        layers = _draft_layers(mode, backbone, experts, forward)
        passes["elastic"] = ElasticDrafts(backbone, layers, experts.prefetch_early, step)
    if isinstance(mtp, MtpHead) and settings.mode in ("mtp", "auto"):
        backbone.keep_hidden(for_head=True)
        passes["mtp"] = MtpDrafts(mtp)
        modes = [Mode("mtp"), *modes]
    sources: list[ModelFree[Any]] = []
    if settings.mode == "recycling":
        sources = [Recycling()]
    elif settings.mode in ("ngram", "auto"):
        sources = [NGram()]
    known = [*modes, *(source.mode for source in sources)]
    controller: Controller = (
        AutoController(modes) if automatic else FixedDepth(known[0], settings.max_depth)
    )
    names = ", ".join(each.name for each in known)
    speculator = Speculator(controller, passes, sources, settings.max_depth)
    reason = f"drafts by {'one of ' * automatic}{names}"
    if automatic and isinstance(mtp, str):
        reason += f"; no multi-token prediction: {mtp}"
    return Speculation(speculator, reason)


def variants(mode: Mode) -> list[Mode]:
    """Elastic modes of ``auto``: the profile's, one with 2 bits, and one with fewer experts."""
    fewer = replace(mode, experts=FEW if mode.experts is None else max(1, mode.experts // 2))
    return list(dict.fromkeys([mode, replace(mode, bits=2), fewer]))


def _draft_layers(
    mode: Mode, backbone: Backbone, experts: MoELayers, forward: Forward
) -> DraftLayers:
    layers = experts.layers
    selectors: list[Selector | None] = [None] * len(layers)
    if mode.rules or any(isinstance(layer, OffloadedExperts) for layer in layers):
        selectors = [found.selector for found in find_selectors(backbone)]
    return DraftLayers(layers, forward, selectors)


def _as_costly_as_the_model(mode: Mode, layers: Sequence[LayerExperts]) -> str:
    """Why a draft pass would cost as much as the model's own; empty if it is cheaper."""
    held = [held_experts(layer) for layer in layers]
    coarser = mode.bits is not None and any(
        isinstance(one, QuantizedExperts) and one.at_most(mode.bits).planes[0] != one.planes[0]
        for one in held
    )
    fewer = mode.experts is not None or mode.rules
    if coarser or fewer or any(isinstance(layer, OffloadedExperts) for layer in layers):
        return ""
    return (
        "an elastic draft would be the whole model, as experts are all in memory and whole, or of "
        f"no more than {mode.bits} bits; set model.expert_bits to 8, or "
        "speculation.experts"
    )
