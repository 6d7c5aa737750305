"""Routing that `lab.simulation` replays: the shipped model's on texts, and drawn one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.dispatch_cost import drawn
from benchmarks.offload_routing import Record
from benchmarks.placement import ROOT, TEXTS
from lab.simulation.costs import Floats
from lab.simulation.published import EXPERTS, TOP_K
from lab.simulation.simulator import Ints
from moe import MoE
from routing import PolicyChain

TOKENS = 96
"""Of a rank and step."""
SPREAD = 0.6
"""Standard deviation of the logarithm of an expert's popularity."""
CHUNK = 512


@dataclass(frozen=True)
class Routed:
    """Routing to replay: of each layer ``(T, K)`` expert ids."""

    name: str
    experts: int
    layers: Sequence[Ints]

    def tokens(self, count: int, shift: int) -> list[Ints]:
        """So many tokens of each layer; with another shift, up to 1, all others."""
        return [ids[shift::2][:count] for ids in self.layers]

    def loads(self, shift: int) -> list[Floats]:
        """Of each layer ``(E,)``."""
        return [
            np.bincount(ids[shift::2].reshape(-1), minlength=self.experts).astype(np.float64)
            for ids in self.layers
        ]


def drawn_routing(ranks: int) -> Routed:
    """By log-normal popularity, enough for so many ranks."""
    layers = [drawn(2 * TOKENS * ranks, EXPERTS, TOP_K, SPREAD, seed) for seed in range(2)]
    return Routed("drawn", EXPERTS, layers)


def text_routing(ranks: int) -> Routed:
    """The shipped model's on held-out texts."""
    model, record = MoE.from_pretrained(ROOT / "examples/demo-model"), Record()
    model.experts.set_policies(PolicyChain((record,)))
    needed = 2 * TOKENS * ranks
    for name in TEXTS:
        ids = model.codec.encode((ROOT / f"tests/data/heldout_{name}.txt").read_text())
        for start in range(0, needed // len(TEXTS) + 1, CHUNK):
            model.batch_logits([ids[start : start + CHUNK]])
    trace = np.random.default_rng(0).permutation(record.trace)  # steps mix sequences
    return Routed("texts", model.experts.layers[0].num_experts, list(trace.transpose(1, 0, 2)))
