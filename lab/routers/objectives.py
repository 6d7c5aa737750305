"""Auxiliary losses of routers: balance, locality, sparsity, budgets.

Each function takes what routers returned for a batch and gives a scalar. Legend: B sequences,
S tokens of each, T = B * S, E experts, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

from lab.routers.router import LabRouter
from routing import Routing

_SHARPNESS = 100.0
CHUNK = 64


class Routed(NamedTuple):
    """One call of a router."""

    router: LabRouter
    logits: Tensor  # (T, E), or (T, 3) of a choice of sizes
    routing: Routing


@contextmanager
def watched_routers(model: nn.Module) -> Iterator[list[Routed]]:
    """A list that gets each call of a router, in the order of layers; the caller clears it."""
    calls: list[Routed] = []

    def keep(module: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        assert isinstance(module, LabRouter)
        logits, weights, ids = outputs
        calls.append(Routed(module, logits, Routing.from_router(ids, weights, module.num_experts)))

    hooks = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, LabRouter)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def switch_loss(routed: Routed) -> Tensor:
    """Load times mean probability, 1 where both are level (arXiv 2101.03961)."""
    experts = routed.router.num_experts
    tokens = routed.routing.tokens_per_expert(experts)
    return experts * (tokens / tokens.sum() * routed.logits.softmax(-1).mean(0)).sum()


def locality_loss(logits: Tensor, sequences: int) -> Tensor:
    """Neighbouring tokens should activate the same experts (BlockFFN); logits ``(B * S, E)``."""
    active = torch.sigmoid(_SHARPNESS * logits).unflatten(0, (sequences, -1))
    return binary_cross_entropy(active[:, :-1], active[:, 1:].detach())


def chunk_loss(logits: Tensor) -> Tensor:
    """Expected share of experts that a chunk of tokens activates at least once.
    Chunks must not cross sequences: S is a multiple of `CHUNK`."""
    positive = logits.relu()
    shares = positive / positive.sum(-1, keepdim=True).clamp_min(1e-9)
    unused = torch.log1p(-shares.clamp_max(1 - 1e-6)).unflatten(0, (-1, CHUNK)).sum(1)
    return 1 - unused.exp().mean()


def budget_loss(logits: Tensor, big: float) -> Tensor:
    """Keeps the mean probability of the big block, over all tokens and layers, at ``big``."""
    return (logits.softmax(-1)[:, 0].mean() - big).square()
