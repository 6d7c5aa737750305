"""Where a layered batch sleeps: no step is longer than a chunk, and no pause is in vain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.engine.prefill_mode import LayerWork, layer_group_pauses
from moe.settings import PrefillSettings

DEMO = Path(__file__).parents[3] / "examples/demo-model"

WORK = st.builds(
    LayerWork,
    backbone=st.floats(0.1, 10),
    pair=st.floats(0, 0.01),
    expert=st.floats(0.1, 10),
    top_k=st.integers(1, 8),
)
PROMPTS = st.lists(
    st.builds(
        lambda start, size: range(start, start + size), st.integers(0, 50), st.integers(1, 3000)
    ),
    min_size=1,
    max_size=4,
)


def chunk_cost(work: LayerWork, positions: list[tuple[int, int]]) -> float:
    """Of tokens given as (prompt, position), each compared with all keys of its prompt so far."""
    ends = {prompt: position + 1 for prompt, position in positions}
    return sum(work.backbone + work.experts + work.pair * ends[prompt] for prompt, _ in positions)


@given(WORK, st.integers(1, 1024), PROMPTS, st.integers(1, 60))
def test_no_stage_is_longer_than_the_longest_chunk(
    work: LayerWork, group: int, prompts: list[range], layers: int
) -> None:
    pauses = layer_group_pauses(work, group, prompts, layers)
    assert list(pauses) == sorted(set(pauses) & set(range(layers)))
    tokens = [(index, position) for index, prompt in enumerate(prompts) for position in prompt]
    if len(tokens) <= group:
        assert not pauses
    chunks = [tokens[start : start + group] for start in range(0, len(tokens), group)]
    limit = layers * max(chunk_cost(work, chunk) for chunk in chunks)
    attention = sum(work.backbone + work.pair * (position + 0.5) for _, position in tokens)
    experts = len(tokens) * work.experts
    parts = [attention, experts] * layers
    edges = [0, *(2 * layer + 1 for layer in pauses), len(parts)]
    stages = [sum(parts[start:end]) for start, end in pairwise(edges)]
    assert max(stages) <= max(limit, attention + experts) * (1 + 1e-6)
    for stage, pause in zip(stages, pauses, strict=False):
        if pause < layers - 1:
            assert stage + attention + experts > limit * (1 - 1e-6), "the pause is in vain"


@pytest.mark.parametrize("tokens", [512, 1000, 2048, 8192])
def test_with_even_work_the_stages_are_those_of_the_paper(tokens: int) -> None:
    """``G = ceil(tokens / 512)`` of arXiv 2510.08055, and one more where it does not come out."""
    work = LayerWork(backbone=8, pair=0, expert=1, top_k=8)
    stages = len(layer_group_pauses(work, 512, [range(tokens)], num_layers=48)) + 1
    assert -(-tokens // 512) <= stages <= -(-tokens // 512) + 1


def test_short_prompts_do_not_pay_for_each_other_s_keys() -> None:
    work = LayerWork(backbone=1, pair=0.001, expert=1, top_k=1)
    one = layer_group_pauses(work, 512, [range(8192)], num_layers=48)
    assert len(one) < len(layer_group_pauses(work, 512, [range(256)] * 32, num_layers=48)) <= 48


@pytest.mark.parametrize("bits", [None, 4])
def test_a_model_s_work_is_that_of_its_matrices(bits: int | None) -> None:
    settings = {"expert_bits": bits, "trunk_bits": bits, "head_bits": bits}
    model = MoE.from_pretrained(DEMO, profile={"lossless": False, "model": settings})
    config, work = model.config, LayerWork.of(model.backbone.model, model.experts.layers)
    heads, own = config.num_attention_heads, config.head_dim
    keys = config.num_key_value_heads
    projections = config.hidden_size * own * (2 * heads + 2 * keys)
    router = config.hidden_size * config.num_experts
    assert work.backbone == 2 * (projections + router)
    assert work.pair == 4 * heads * own
    assert work.expert == 6 * config.hidden_size * config.moe_intermediate_size
    assert work.top_k == config.num_experts_per_tok


def test_experts_of_a_token_are_known_by_whatever_name(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("aria_text")
    assert not hasattr(model.config, "num_experts_per_tok")
    assert (
        LayerWork.of(model.backbone.model, model.experts.layers).top_k == model.config.moe_topk == 2
    )


def test_a_wave_may_sleep_before_the_first_experts(tiny_moe: Callable[[str], MoE]) -> None:
    """One token a group: a stage for each part of the model, and the same logits."""
    model = tiny_moe("qwen3_moe")
    prefill = PrefillSettings(mode="layered", group_tokens=1)
    profile = model.profile.profile.model_copy(update={"prefill": prefill})
    engine = Engine(model.backbone, model.experts, profile)
    prompt = [3 + index for index in range(40)]
    group = model.request(prompt, SamplingParams(max_new_tokens=1, temperature=0.0))
    engine.submit(group)
    num_steps = 0
    while not engine.idle:
        engine.step()
        num_steps += 1
    assert num_steps == len(model.experts.layers) + 1
    assert group.sequences[0].token_ids == [int(torch.argmax(model.logits(prompt)[-1]))]
