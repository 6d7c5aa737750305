"""Whole, chunked and layered prefill give the same logits and tokens, whatever else happens.

Arrivals, cancellations, priorities, shared beginnings of prompts (prefix hits) and memory (so that
sequences are preempted) are random. The oracle is each sequence by itself: one pass over its
prompt, and one over each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.engine.prefill_batch import SequenceGroup
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertsRunner, run_lanes
from moe.network.packed_pass import Work
from moe.sampling.sampler import NextTokens, Sampler
from moe.sequence import Delta, RunningSequence
from tests.amounts import deep_except

ARCHITECTURES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
MODES = ("whole", "chunked", "layered", "auto")
TOLERANCE = 1e-5
RECURRENT = 4e-4
"""The same of recurrent layers, which sum in the order of a pass. Their states magnify last bits:
at single tokens transformers' own float32 is 7e-5 from float64, and each side errs."""
COMMON = [(i * 37) % 125 + 3 for i in range(40)]


@dataclass(frozen=True)
class Request:
    """``shared`` tokens of a common beginning and ``own`` ones; times are in steps."""

    shared: int
    own: list[int]
    new: int
    n: int
    arrives: int
    cancelled_after: int | None
    priority: int

    @property
    def cancelled_at(self) -> int | None:
        return None if self.cancelled_after is None else self.arrives + self.cancelled_after

    @property
    def num_kv(self) -> int:
        """Memory without which it would be refused."""
        prompt = self.shared + len(self.own)
        return max(prompt + self.new, self.n * (prompt + 1))

    def group(self, model: MoE) -> SequenceGroup:
        params = SamplingParams(max_new_tokens=self.new, temperature=0.0, ignore_eos=True, n=self.n)
        return model.request(COMMON[: self.shared] + self.own, params, priority=self.priority)


REQUESTS = st.lists(
    st.builds(
        Request,
        shared=st.sampled_from([0, 17, 34, 34]),
        own=st.lists(st.integers(3, 127), min_size=1, max_size=12),
        new=st.integers(1, 12),
        n=st.sampled_from([1, 1, 2]),
        arrives=st.sampled_from([0, 1, 3, 20, 22]),
        cancelled_after=st.sampled_from([None, None, 1, 4]),
        priority=st.integers(-1, 1),
    ),
    min_size=2,
    max_size=6,
)


@dataclass
class SamplerSpy:
    """Remembers the logits of every token."""

    sequence: RunningSequence
    sampler: Sampler
    logits: list[Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    @torch.inference_mode()
    def expected(self, backbone: Backbone, run_experts: ExpertsRunner) -> list[Tensor]:
        """``(V,)`` logits that each token is drawn from when nobody else is there."""
        sequence, rows = self.sequence, []
        cache = backbone.new_cache(sequence.capacity)
        for ids in (sequence.prompt_token_ids, *([token] for token in sequence.token_ids[:-1])):
            (lane,) = backbone.lanes([Work(ids, cache)])
            run_lanes([lane], run_experts)
            rows.append(lane.result()[0][-1])
        return rows


class SpiedTokens(NextTokens):
    """Lets spies remember what their tokens are drawn from."""

    def __init__(self, spies: list[SamplerSpy], logits: list[Tensor], place: int = 0) -> None:
        for spy, logits_TV in zip(spies, logits, strict=True):
            spy.logits.append(logits_TV[-1].clone())
        super().__init__([spy.sampler for spy in spies], logits, place)


def engine_of(model: MoE, **changes: dict[str, Any]) -> Engine:
    """An engine over a loaded model with some settings changed."""
    profile = model.profile.profile
    sections = {
        name: getattr(profile, name).model_copy(update=keys) for name, keys in changes.items()
    }
    return Engine(model.backbone, model.experts, profile.model_copy(update=sections))


def serve(model: MoE, engine: Engine, requests: list[Request]) -> list[SequenceGroup]:
    """Everything that happens in one engine; at the end nothing is left in it."""
    groups = [request.group(model) for request in requests]
    for group in groups:
        for sequence in group.sequences:
            spy = SamplerSpy(sequence, sequence.sampler)
            sequence.sampler = spy  # type: ignore[assignment]
    with patch("moe.engine.in_flight.NextTokens", SpiedTokens):
        _run(engine, groups, requests)
    return groups


def _run(engine: Engine, groups: list[SequenceGroup], requests: list[Request]) -> None:
    for clock in range(500):
        for group, request in zip(groups, requests, strict=True):
            if clock == request.arrives:
                engine.submit(group)
            if clock == request.cancelled_at:
                engine.cancel(group)
        if clock > 30 and engine.idle:
            break
        assert all(isinstance(outcome, Delta) for _, outcome in engine.step())
    assert engine.idle
    prefixes = engine.scheduler.prefixes
    assert engine.scheduler.num_used_tokens() == (prefixes.num_tokens if prefixes else 0)
    assert all(s.cache is None for group in groups for s in group.sequences)


@pytest.mark.parametrize("model_type", deep_except(["qwen3_moe"], ARCHITECTURES))
@settings(max_examples=12)
@given(
    requests=REQUESTS,
    mode=st.sampled_from(MODES),
    spare=st.none() | st.integers(0, 12),
    prefix_tokens=st.sampled_from([0, 100]),
)
def test_every_mode_gives_the_logits_of_each_sequence_alone(
    model_type: str,
    requests: list[Request],
    mode: str,
    spare: int | None,
    prefix_tokens: int,
    tiny_moe: Callable[[str], MoE],
) -> None:
    """``spare``: tokens of memory beyond what the largest request needs; None for no limit."""
    model = tiny_moe(model_type)
    largest = max(request.num_kv for request in requests)
    kv_tokens = None if spare is None else largest + spare
    engine = engine_of(
        model,
        prefill={"mode": mode, "wave_tokens": 40, "chunk_tokens": 14, "group_tokens": 12},
        memory={"kv_tokens": kv_tokens, "prefix_tokens": prefix_tokens},
        engine={"priority_steps": 4},
    )
    for group, request in zip(serve(model, engine, requests), requests, strict=True):
        for sequence in group.sequences:
            if request.cancelled_after is None:
                assert len(sequence.token_ids) == request.new
            if not sequence.token_ids:
                continue
            spy = sequence.sampler
            assert isinstance(spy, SamplerSpy)
            expected = torch.stack(spy.expected(model.backbone, model.experts.run))
            near = RECURRENT if model.backbone.recurrent else TOLERANCE
            torch.testing.assert_close(torch.stack(spy.logits), expected, atol=near, rtol=near)
            # Greedy; where two logits are as good as equal, either is.
            chosen = expected.gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
            assert bool((chosen >= expected.amax(1) - near).all())
