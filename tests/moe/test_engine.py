"""Prefill modes, memory limits and cancellations never change what comes out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe import MoE, SamplingParams
from moe.errors import RequestError
from moe.lanes import Visit

GREEDY = SamplingParams(max_new_tokens=7, temperature=0.0, ignore_eos=True)
ARCHITECTURES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(["auto", "whole", "chunked", "layered"]),
    kv_tokens=st.sampled_from([None, 60]),
)
def test_every_prefill_mode_gives_the_tokens_of_each_prompt_alone(
    model_type: str,
    seed: int,
    mode: str,
    kv_tokens: int | None,
    tiny_moe: Callable[[str], MoE],
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    """Tiny waves, so that prompts are cut; little memory, so that sequences are preempted."""
    choose = random.Random(seed)
    plain = tiny_moe(model_type)
    prompts = [choose.choices(range(3, 128), k=choose.randint(1, 30)) for _ in range(4)]
    expected = [plain.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    small = {"wave_tokens": 20, "chunk_tokens": 10, "group_tokens": 6}
    model = MoE.from_pretrained(
        tiny_checkpoint(model_type),
        prefill={"mode": mode, **small},
        memory={"kv_tokens": kv_tokens},
    )
    assert [c.token_ids for c in model.generate(prompts, GREEDY)] == expected


def test_cancelling_between_steps_frees_all_and_disturbs_nobody(
    tiny_moe: Callable[[str], MoE], tiny_checkpoint: Callable[[str], Path]
) -> None:
    plain = tiny_moe("qwen3_moe")
    prompts = [list(range(3, 40)), list(range(60, 90)), [5, 6, 7]]
    expected = [c.token_ids for c in plain.generate(prompts, GREEDY)]
    model = MoE.from_pretrained(
        tiny_checkpoint("qwen3_moe"), prefill={"mode": "layered", "group_tokens": 20}
    )
    engine = model.engine()
    groups = [model.request(prompt, GREEDY) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    assert engine.step() == []  # the first stage of the wave
    engine.cancel(groups[1])
    while not engine.idle:
        engine.step()
    assert [g.sequences[0].token_ids for g in groups] == [expected[0], [], expected[2]]
    assert all(s.cache is None for g in groups for s in g.sequences)
    assert all(g.cache is None for g in groups if g is not groups[1])


def test_layered_prefill_reads_each_expert_once_and_never_stalls(
    tiny_moe: Callable[[str], MoE], tiny_checkpoint: Callable[[str], Path]
) -> None:
    """While a long prompt is read over several steps, the running sequence gets a token in each."""
    prompt = [(i * 37) % 125 + 3 for i in range(120)]

    def loads(**prefill: object) -> tuple[int, list[int]]:
        model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), prefill=prefill)
        engine = model.engine()
        params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
        running = model.request([5, 6, 7], params)
        engine.submit(running)
        engine.step()
        arriving = model.request(prompt, GREEDY)
        engine.submit(arriving)
        model.reset_stats()
        tokens = []
        while not arriving.sequences[0].token_ids:
            tokens.append(len(engine.step()))
        return sum(layer["expert_loads"] for layer in model.stats()["layers"]), tokens

    layered, layered_tokens = loads(mode="layered", group_tokens=30)
    chunked, chunked_tokens = loads(mode="chunked", chunk_tokens=31)
    assert layered_tokens == chunked_tokens == [1, 1, 1, 2]
    assert layered < 0.6 * chunked


def test_failing_experts_end_those_who_waited_there_and_nobody_else(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts fail once, while a prompt is read in the middle of its wave."""
    model = MoE.from_pretrained(
        tiny_checkpoint("qwen3_moe"), prefill={"mode": "layered", "group_tokens": 20}
    )
    engine = model.engine()
    running = model.request([5, 6, 7], GREEDY)
    engine.submit(running)
    engine.step()
    real, broken = engine.experts.run, [True]

    def fail_once(layer: int, visits: Sequence[Visit]) -> list[Tensor]:
        if layer == 1 and sum(len(visit.hidden_states) for visit in visits) > 10 and broken:
            broken.clear()
            raise OSError("an expert cannot be read")
        return real(layer, visits)

    monkeypatch.setattr(engine.experts, "run", fail_once)
    arriving, late = model.request(list(range(3, 63)), GREEDY), model.request([9, 8], GREEDY)
    engine.submit(arriving)
    outcomes = []
    while broken:
        outcomes += engine.step()
    engine.submit(late)
    while not engine.idle:
        outcomes += engine.step()
    failed = [s for s, outcome in outcomes if isinstance(outcome, OSError)]
    assert arriving.sequences[0] in failed
    assert arriving.sequences[0].token_ids == []
    assert late.sequences[0].token_ids == model.generate([9, 8], GREEDY)[0].token_ids


def test_a_request_larger_than_memory_is_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory={"kv_tokens": 10})
    with pytest.raises(
        RequestError, match=r"needs memory for 12 tokens and memory.kv_tokens is 10"
    ):
        model.stream([1, 2, 3, 4, 5], GREEDY)
