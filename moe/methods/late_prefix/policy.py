"""`LatePrefix`: the missing-expert policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moe.settings import Profile
from routing.routing import UNUSED


@dataclass(frozen=True)
class LatePrefix:
    """A prefix of the bits does for experts whose part in every token's result is small.

    Attributes:
        bits: of a prefix.
        share: of a token's router weight whose experts are read whole, in [0, 1]; at 0 prefixes do
            for all, at 1 only for experts without weight.
    """

    bits: int
    share: float

    @classmethod
    def of(cls, profile: Profile) -> LatePrefix:
        settings = profile.methods.late_prefix
        return cls(settings.bits, settings.share)

    def light(self, ids_TK: Tensor, weights_TK: Tensor) -> list[int]:
        """The experts, ascending, that no token needs whole. Of equal weights the one in the
        earlier slot counts as heavier.

        Args:
            ids_TK: on the CPU.
        """
        ids = ids_TK.numpy()
        weights = np.where(ids == UNUSED, 0.0, np.abs(weights_TK.double().cpu().numpy()))
        order = np.argsort(-weights, axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, axis=1)
        weights = np.take_along_axis(weights, order, axis=1)
        before = np.cumsum(weights, axis=1) - weights
        heavy = before < self.share * weights.sum(axis=1, keepdims=True)
        light: list[int] = np.setdiff1d(ids[~heavy], np.append(ids[heavy], UNUSED)).tolist()
        return light
