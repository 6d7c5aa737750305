"""`Skip`: the draft rule that leaves layers without experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.settings import Profile
from moe.speculate.draft import Kept
from routing import Routing


@dataclass(frozen=True)
class Skip:
    """Leaves out a share of the layers, from the middle; see `DraftRule`."""

    share: float

    @classmethod
    def of(cls, profile: Profile) -> Skip:
        """Make the rule of a profile."""
        return cls(profile.methods.skip_drafts.share)

    @property
    def name(self) -> str:
        return f"skip{self.share:g}"

    def skips(self, layers: int) -> frozenset[int]:
        """Return the middle layers; never the first or the last."""
        count = max(0, min(round(self.share * layers), layers - 2))
        start = (layers - count) // 2
        return frozenset(range(start, start + count))

    def allowed(
        self, routing: Routing, here_E: Tensor | None, num_experts: int, kept: Kept
    ) -> Tensor | None:
        return None
