"""`Routing`: a routing decision as a value.

Routers produce one, policies map one to another, and nothing downstream knows which router or
policy ran. Legend: T tokens, K slots a token (top_k), E experts of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNUSED = -1
_LAST = torch.iinfo(torch.int64).max


class RoutingError(ValueError):
    """A routing or a routing policy is invalid; the message says why."""


@dataclass(frozen=True)
class Routing:
    """Which experts each token visits, and with what weight.

    Attributes:
        expert_ids: ``(T, K)`` int64 in ``[0, E)``, ascending in each row: the order in which the
            experts' outputs are summed. Unused slots hold ``UNUSED`` (-1) and come last.
        weights: ``(T, K)`` float32, with the router's normalisation and scaling; 0 in unused slots.
    """

    expert_ids: Tensor
    weights: Tensor

    @classmethod
    def from_router(cls, top_k_index: Tensor, top_k_weights: Tensor, num_experts: int) -> Routing:
        """The routing that a transformers router returned.

        Ids outside ``[0, num_experts)`` are transformers' sentinels for "no expert here" and become
        unused slots.

        Args:
            top_k_index: ``(T, K)`` integer expert ids.
            top_k_weights: ``(T, K)`` routing weights, any floating dtype.
            num_experts: E of the layer.
        """
        expert_ids = top_k_index.long()
        weights = top_k_weights.float()
        outside = (expert_ids < 0) | (expert_ids >= num_experts)
        return cls(
            expert_ids.masked_fill(outside, UNUSED), weights.masked_fill(outside, 0.0)
        ).ascending()

    def ascending(self) -> Routing:
        """The same decision with each row's slots in ascending order."""
        keys = self.expert_ids.where(self.expert_ids != UNUSED, _LAST)
        order = keys.argsort(dim=1)
        return Routing(self.expert_ids.gather(1, order), self.weights.gather(1, order))

    @property
    def num_tokens(self) -> int:
        return self.expert_ids.shape[0]

    @property
    def top_k(self) -> int:
        """Slots a token; the number of experts it visits is at most this."""
        return self.expert_ids.shape[1]

    def validate(self, num_experts: int) -> Routing:
        """Return self, or raise `RoutingError` naming the invariant that does not hold.

        For code that builds routings (policies, predictors, tests); the step loop does not call it.
        """
        if self.expert_ids.ndim != 2 or self.expert_ids.shape != self.weights.shape:
            raise RoutingError(
                "expert_ids and weights must both be (T, K); got "
                f"{tuple(self.expert_ids.shape)} and {tuple(self.weights.shape)}"
            )
        if self.expert_ids.dtype != torch.int64 or self.weights.dtype != torch.float32:
            raise RoutingError(
                "expert_ids must be int64 and weights float32; got "
                f"{self.expert_ids.dtype} and {self.weights.dtype}"
            )
        unused = self.expert_ids == UNUSED
        inside = (self.expert_ids >= 0) & (self.expert_ids < num_experts)
        if not bool((unused | inside).all()):
            raise RoutingError(f"expert ids must be -1 or in [0, {num_experts})")
        if bool((self.weights[unused] != 0).any()):
            raise RoutingError("unused slots (id -1) must have weight 0")
        if not bool(torch.isfinite(self.weights).all()):
            raise RoutingError("routing weights must be finite")
        before, after = self.expert_ids[:, :-1], self.expert_ids[:, 1:]
        if bool(((before == after) & (after != UNUSED)).any()):
            raise RoutingError("a token may visit an expert only once")
        if bool(((after != UNUSED) & ((before == UNUSED) | (before > after))).any()):
            raise RoutingError("slots must be in ascending order of experts, unused ones last")
        return self

    def split(self, sizes: Sequence[int]) -> list[Routing]:
        """Cut along the token dimension into pieces of the given sizes."""
        ids, weights = self.expert_ids.split(list(sizes)), self.weights.split(list(sizes))
        return [Routing(i, w) for i, w in zip(ids, weights, strict=True)]

    @staticmethod
    def concat(parts: Sequence[Routing]) -> Routing:
        """Stack along the token dimension; narrower parts are padded with unused slots."""
        if len(parts) == 1:
            return parts[0]
        top_k = max(part.top_k for part in parts)
        padded = [part.pad(top_k) for part in parts]
        return Routing(
            torch.cat([part.expert_ids for part in padded]),
            torch.cat([part.weights for part in padded]),
        )

    def pad(self, top_k: int) -> Routing:
        """The same decision in ``top_k >= self.top_k`` slots."""
        extra = top_k - self.top_k
        if extra == 0:
            return self
        pad = torch.nn.functional.pad
        return Routing(
            pad(self.expert_ids, (0, extra), value=UNUSED), pad(self.weights, (0, extra), value=0.0)
        )

    def tokens_per_expert(self, num_experts: int) -> Tensor:
        """``(E,)`` int64: how many tokens visit each expert."""
        return counted(self.expert_ids.flatten() + 1, num_experts + 1)[1:]


def counted(values: Tensor, count: int) -> Tensor:
    """``(count,)`` int64: how often each number in ``[0, count)`` is among the int64 values.

    Unlike `torch.bincount`, it does not wait for a GPU to know the largest.
    """
    return values.new_zeros(count).scatter_add_(0, values, torch.ones_like(values))


def select_top_k(scores: Tensor, top_k: int) -> Tensor:
    """Ids of the ``top_k`` largest scores a row, largest first; ties go to the lower id.

    Args:
        scores: ``(T, E)``, finite or ``-inf``.
        top_k: between 1 and E.

    Returns:
        ``(T, top_k)`` int64. `torch.topk` leaves the order of ties open; a stable sort does not.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
