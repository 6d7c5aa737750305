"""`Contrast`: both readings of a pass, and the difference of their logits.

Legend: T rows, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from moe.describe.routers import find_selectors
from moe.errors import ProfileError
from moe.kv.cache import KVCache
from moe.loading.hub import experts_per_token
from moe.methods.contrast import ContrastSettings
from moe.network.backbone import Backbone, Forward
from moe.network.lanes import ExpertCall
from moe.network.moe_layer import MoELayers, Selector
from moe.network.packed_pass import Work
from moe.settings import Profile
from routing import Routing
from routing.policies.base import keep


class TwinKV(KVCache):
    """KV cache of a sequence, with that of its weak reading."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.weak = KVCache(capacity)

    def prompt_read(self) -> None:
        super().prompt_read()
        self.weak.policy, self.weak.length = self.policy, self.length
        self.weak.prompt_read()

    def fork(self, capacity: int, length: int) -> TwinKV:
        copy = super().fork(capacity, length)
        assert isinstance(copy, TwinKV)
        copy.weak = self.weak.fork(capacity, length)
        return copy


@dataclass(frozen=True)
class Contrast:
    """Runs both readings and combines their logits.

    Args:
        strength: share of the weak logits that is subtracted (the paper's beta).
        floor: share of the likeliest token's probability below which no token is drawn (alpha).
        rank: of the weak reading's expert; 0 is the router's first choice.
        selectors: of each MoE layer; needed if routers choose at most ``rank`` experts.
    """

    strength: float
    floor: float
    rank: int
    selectors: Sequence[Selector | None] = ()
    name = "self-contrast"
    readings = 2

    @property
    def cache_type(self) -> type[KVCache]:
        return TwinKV

    def read(self, forward: Forward, work: Sequence[Work]) -> list[Tensor]:
        """Contrasted logits ``(T, V)`` of each piece of work, from one pass over both readings."""
        weak = [replace(item, cache=_twin(item).weak) for item in work]
        for item, other in zip(work, weak, strict=True):
            other.cache.length = item.cache.length
        logits = forward([*work, *weak])
        pairs = zip(logits[: len(work)], logits[len(work) :], strict=True)
        return [self.combine(strong, other) for strong, other in pairs]

    def combine(self, strong_TV: Tensor, weak_TV: Tensor) -> Tensor:
        """``(T, V)``: ``(1 + strength) strong - strength weak`` where the strong logit is above the
        floor, else ``-inf``."""
        scores = (1 + self.strength) * strong_TV - self.strength * weak_TV
        least = strong_TV.amax(-1, keepdim=True) + log(self.floor)
        return scores.masked_fill(strong_TV < least, -torch.inf)

    def __call__(self, layer: int, call: ExpertCall) -> ExpertCall:
        """The same call with one expert for each row of its second half, the weak readings."""
        half = call.routing.num_tokens // 2
        strong, weak = call.routing.split([half, half])
        if self.rank < weak.top_k:
            order = weak.weights.argsort(dim=1, descending=True, stable=True)
            kept = torch.zeros_like(weak.weights, dtype=torch.bool)
            weak = keep(weak, kept.scatter(1, order[:, self.rank, None], True))
        else:
            weak = self._select(layer, call.hidden_states[half:])
        return replace(call, routing=Routing.concat([strong, weak]))

    def _select(self, layer: int, rows_TH: Tensor) -> Routing:
        selector = self.selectors[layer]
        assert selector is not None
        scores_TE = selector.scores(rows_TH)
        order = scores_TE.argsort(dim=1, descending=True, stable=True)
        allowed = torch.zeros_like(scores_TE, dtype=torch.bool)
        allowed.scatter_(1, order[:, self.rank, None], True)
        return selector.select(scores_TE, allowed, 1)


def enable(profile: Profile, backbone: Backbone, experts: MoELayers) -> None:
    """Read every token twice from now on.

    Raises:
        ProfileError: this model cannot be read in that way.
    """
    settings: ContrastSettings = profile.methods.contrast
    name = type(backbone.model).__name__
    if not backbone.packed:
        raise ProfileError(
            f"methods.contrast reads two views of a sequence in one pass, and {name} keeps a "
            "state for which that is not possible; set methods.contrast.strength: 0"
        )
    fewest = min(layer.num_experts for layer in experts.layers)
    if settings.rank >= fewest:
        raise ProfileError(
            f"methods.contrast.rank is {settings.rank}, but a layer of {name} has "
            f"{fewest} experts, ranks 0 to {fewest - 1}; give one of these"
        )
    top_k = experts_per_token(backbone.model.config)
    selectors: list[Selector | None] = []
    if settings.rank >= top_k:
        found = find_selectors(backbone)
        selectors = [each.selector for each in found]
        for index, each in enumerate(found):
            if each.selector is None:
                raise ProfileError(
                    f"methods.contrast.rank is {settings.rank}, beyond the {top_k} "
                    f"experts that {name} chooses, and its router's rule is not known (MoE layer "
                    f"{index}: {each.reason}); give a rank below {top_k}"
                )
    contrast = Contrast(settings.strength, settings.floor, settings.rank, selectors)
    experts.set_transform(contrast)
    backbone.set_reader(contrast)


def _twin(item: Work) -> TwinKV:
    assert isinstance(item.cache, TwinKV)
    return item.cache
