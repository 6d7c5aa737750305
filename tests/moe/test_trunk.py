"""Real architectures through lanes: whatever happens to other lanes, a lane gives its own logits.

The oracle is transformers' own forward of the same weights, one sequence at a time.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe import MoE
from moe.network.backbone import Backbone
from moe.network.lanes import Lane, LaneState, run_lanes
from moe.network.packed_pass import Work
from tests.amounts import deep_except

ARCHITECTURES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
TOLERANCE = 1e-5  # to the same engine's pass over one sequence
FIDELITY = 1e-4  # to transformers
ITSELF = 10
"""At most so many times as far as transformers' cached steps are from its own pass over the prompt:
a delta rule over random weights amplifies rounding: for one prompt in a hundred, to 4e-4 there."""


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """Transformers' own model."""

    @cache
    def model(model_type: str) -> Any:
        path = tiny_checkpoint(model_type)
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    return model


@pytest.fixture(scope="module")
def reference(theirs: Callable[[str], Any]) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Logits ``(T, V)`` of transformers' own eager forward."""

    @cache
    def logits(model_type: str, token_ids: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            rows: Tensor = theirs(model_type)(torch.tensor([token_ids]), use_cache=False).logits[0]
        return rows

    return logits


def by_steps(model: Any, token_ids: list[int]) -> Tensor:
    """The same, token by token, from transformers' own cache."""
    rows, past = list[Tensor](), None
    with torch.no_grad():
        for token_id in token_ids:
            found = model(torch.tensor([[token_id]]), past_key_values=past, use_cache=True)
            past = found.past_key_values
            rows.append(found.logits[0, -1])
    return torch.stack(rows)


def prompt_lane(backbone: Backbone, token_ids: list[int]) -> Lane[list[Tensor]]:
    work = Work(token_ids, backbone.new_cache(len(token_ids)), all_logits=True)
    return backbone.lanes([work])[0]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 4))
def test_lanes_do_not_change_results(
    model_type: str,
    seed: int,
    count: int,
    tiny_moe: Callable[[str], MoE],
    reference: Callable[[str, tuple[int, ...]], Tensor],
    theirs: Callable[[str], Any],
) -> None:
    """Random lengths, staggered starts, pauses at random layers, cancellations.

    Each lane gives the logits of its own separate pass, and those of transformers.
    """
    choose = random.Random(seed)
    model = tiny_moe(model_type)
    backbone, experts = model.backbone, model.experts
    prompts = [choose.choices(range(3, 128), k=choose.randint(1, 20)) for _ in range(count)]
    lanes: list[Lane[list[Tensor]]] = []
    with torch.inference_mode():
        for prompt in prompts:
            lanes.append(prompt_lane(backbone, prompt))
            pauses = {lane: choose.randint(0, len(experts.layers)) for lane in lanes}
            run_lanes(lanes, experts.run, pause_at=pauses)
            if choose.random() < 0.3:
                choose.choice(lanes).cancel()
        run_lanes(lanes, experts.run)
    for prompt, lane in zip(prompts, lanes, strict=True):
        if lane.state is not LaneState.CANCELLED:
            logits = lane.result()[0]
            alone = model.logits(prompt)
            torch.testing.assert_close(logits, alone, atol=TOLERANCE, rtol=1e-5)
            expected, bound = reference(model_type, tuple(prompt)), FIDELITY
            if not torch.allclose(logits, expected, atol=bound, rtol=bound):
                steps = by_steps(theirs(model_type), prompt)
                bound = max(bound, ITSELF * float((steps - expected).abs().max()))
            torch.testing.assert_close(logits, expected, atol=bound, rtol=FIDELITY)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_prompts_and_steps_of_several_sequences_in_one_pass(
    model_type: str,
    tiny_moe: Callable[[str], MoE],
    reference: Callable[[str, tuple[int, ...]], Tensor],
) -> None:
    """One sequence is in the middle of decoding while another's prompt is read."""
    model = tiny_moe(model_type)
    backbone = model.backbone
    first, second = list(range(10, 24)), list(range(50, 40, -1))
    caches = [backbone.new_cache(20), backbone.new_cache(20)]
    with torch.inference_mode():
        (prompt,) = run_pass(model, [Work(first[:9], caches[0], all_logits=True)])
        steps = [[prompt], []]
        step, prompt = run_pass(
            model, [Work(first[9:10], caches[0]), Work(second[:6], caches[1], all_logits=True)]
        )
        steps[0].append(step)
        steps[1].append(prompt)
        for tokens in zip(first[10:], second[6:], strict=True):
            work = [Work([token], cache) for token, cache in zip(tokens, caches, strict=True)]
            for logits, rows in zip(steps, run_pass(model, work), strict=True):
                logits.append(rows)
    for token_ids, logits in zip((first, second), steps, strict=True):
        expected = reference(model_type, tuple(token_ids))
        torch.testing.assert_close(torch.cat(logits), expected, atol=FIDELITY, rtol=FIDELITY)


def run_pass(model: MoE, work: list[Work]) -> list[Tensor]:
    lanes = model.backbone.lanes(work)
    run_lanes(lanes, model.experts.run)
    return [rows for lane in lanes for rows in lane.result()]


def test_a_cancelled_pass_leaves_the_sequence_as_it_was(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    backbone = model.backbone
    cache_, fresh = backbone.new_cache(20), backbone.new_cache(20)
    with torch.inference_mode():
        run_pass(model, [Work([5, 6, 7], cache_)])
        lane = backbone.lanes([Work([8, 9], cache_)])[0]
        run_lanes([lane], model.experts.run, pause_at={lane: 2})
        lane.cancel()
        assert cache_.length == 3
        (after,) = run_pass(model, [Work([11], cache_)])
        (expected,) = run_pass(model, [Work([5, 6, 7, 11], fresh)])
    torch.testing.assert_close(after, expected, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize(
    "model_type",
    deep_except(["qwen3_moe", "qwen3_next"], ["qwen3_moe", "qwen3_next", "minimax", "deepseek_v4"]),
)
def test_a_sequence_that_nobody_holds_is_freed(
    tiny_moe: Callable[[str], MoE], model_type: str
) -> None:
    """Where memory is short, that of the last prompts is wanted first."""
    model = tiny_moe(model_type)
    backbone, experts = model.backbone, model.experts
    cache = backbone.new_cache(8)
    with torch.inference_mode():
        run_lanes(backbone.lanes([Work([5, 6, 7], cache)]), experts.run)
    freed = weakref.ref(cache)
    del cache
    assert freed() is None


def test_packing_is_refused_with_a_reason(
    tiny_moe: Callable[[str], MoE],
    tiny_checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moe.describe.probe._tolerance", lambda _: -1.0)
    differs = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"))
    monkeypatch.undo()
    assert differs.status()["packing"]["enabled"] is False
    assert differs.notices[0].startswith(
        "each sequence runs in a pass of its own, and prompts are neither cut nor kept for others "
        "that begin alike: "
    )
    assert tiny_moe("qwen3_moe").status()["packing"]["enabled"] is True
