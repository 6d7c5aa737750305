"""Sequences that are read in any order and company have transformers' logits at every position."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.models.tiny import tiny_model
from moe import MoE
from moe.kv.cache import KVCache
from moe.network.backbone import SHORT
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from routing import Phase
from tests.amounts import deep_except

KINDS = {
    "qwen3_moe": "grouped queries",
    "gpt_oss": "windows and sinks",
    "deepseek_v3": "latent attention",
    "qwen3_next": "gated delta rule",
    "kimi_linear": "KDA and latent attention",
    "granitemoehybrid": "Mamba 2",
    "jamba": "Mamba",
    "lfm2_moe": "short convolutions",
    "minimax": "lightning attention",
    "deepseek_v32": "sparse attention",
    "deepseek_v4": "attention to compressed entries, in cache layers of its own",
    "glm5_next": "attention to pools of keys",
    "qwen4_exp_text": "attention to normed means of keys, positions of all tokens, n-grams",
    "jetmoe": "attention experts that a token chooses, keys repeated over them",
    "inkling2_loop_text": "biases by position, convolutions in attention, layers that run again",
}
LENGTH, SEQUENCES, TOLERANCE = 48, 3, 2e-4
TOKENS = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()


@cache
def expected(kind: str) -> Tensor:
    """``(LENGTH, V)`` of transformers' forward over all tokens at once."""
    model = tiny_model(kind)
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


class Sequences:
    """Sequences of one model, each of which has read a beginning of `TOKENS`."""

    def __init__(self, model: MoE, kind: str, data: st.DataObject) -> None:
        self.model, self.kind, self.data = model, kind, data
        self.caches = [self.fresh() for _ in range(SEQUENCES)]

    def fresh(self) -> KVCache:
        made = self.model.backbone.new_cache(LENGTH + 2 * SHORT)
        assert isinstance(made, KVCache)
        return made

    def some(self, least: int) -> list[KVCache]:
        """Sequences that can go on, and have read something if they must have."""
        able = [c for c in self.caches if least <= c.length < LENGTH]
        return self.data.draw(st.lists(st.sampled_from(able), unique_by=id)) if able else []

    def run(self, work: list[Work], phase: Phase) -> list[Tensor]:
        with torch.inference_mode():
            lanes = self.model.backbone.lanes(work, phase)
            run_lanes(lanes, self.model.experts.run)
        return [rows for lane in lanes for rows in lane.result()]

    def check(self, logits: Tensor, start: int, count: int) -> None:
        wanted = expected(self.kind)[start : start + count]
        assert (logits[:count] - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp_min(1)

    def read_prompts(self) -> None:
        work = []
        for own in self.some(0):
            size = self.data.draw(st.integers(1, LENGTH - own.length))
            kept = sorted(self.data.draw(st.sets(st.integers(1, size), max_size=2)))
            part = TOKENS[own.length : own.length + size]
            work.append(Work(part, own, all_logits=True, snapshots=kept))
        starts = [item.cache.length for item in work]
        for item, start, rows in zip(work, starts, self.run(work, "prefill"), strict=True):
            self.check(rows, start, len(item.token_ids))

    def decode(self) -> None:
        """Right tokens, and behind them drafts that are rejected."""
        work, right = [], []
        for own in self.some(1):
            count = self.data.draw(st.integers(1, min(4, LENGTH - own.length)))
            drafted = self.data.draw(st.lists(st.integers(3, 127), max_size=4))
            tokens = [*TOKENS[own.length : own.length + count], *drafted]
            work.append(Work(tokens, own, all_logits=True))
            right.append((own, own.length, count))
        for (own, start, count), rows in zip(right, self.run(work, "decode"), strict=True):
            self.check(rows, start, count)
            own.cut(start + count)

    def draft(self) -> None:
        """Passes of a draft, all of which is forgotten."""
        drafting = [(own, own.length) for own in self.some(1)]
        for own, _ in drafting:
            own.mark()
        for _ in range(self.data.draw(st.integers(1, 3))):
            tokens = [self.data.draw(st.integers(3, 127)) for _ in drafting]
            self.run(
                [Work([t], own) for t, (own, _) in zip(tokens, drafting, strict=True)], "decode"
            )
        for own, start in drafting:
            own.cut(start)

    def fork(self) -> None:
        """As a sequence that begins like another one."""
        at = self.data.draw(st.integers(0, SEQUENCES - 1))
        own = self.caches[self.data.draw(st.integers(0, SEQUENCES - 1))]
        length = own.longest_fork(self.data.draw(st.integers(0, own.length)))
        self.caches[at] = own.fork(LENGTH + 2 * SHORT, length) if length else self.fresh()


@pytest.mark.parametrize("kind", deep_except(["deepseek_v3", "qwen3_next"], KINDS))
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_logits_do_not_depend_on_how_tokens_are_read(
    tiny_moe: Callable[[str], MoE], kind: str, data: st.DataObject
) -> None:
    model = tiny_moe(kind)
    assert model.backbone.can_cut, model.notices
    sequences = Sequences(model, kind, data)
    ways = [sequences.read_prompts, sequences.decode, sequences.draft, sequences.fork]
    for _ in range(data.draw(st.integers(1, 8))):
        data.draw(st.sampled_from(ways))()
