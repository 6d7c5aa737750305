"""Layered prefill on the shipped model: nobody stalls, and experts are read as often as predicted.

Loads are counted, not timed, against the formulas of `moe.engine.prefill_mode` with the model's
own expert frequencies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.engine.prefill_mode import chunk_sizes, chunked_loads, layered_loads, measured_frequencies
from moe.settings import PrefillSettings

ROOT = Path(__file__).parents[3]
CHUNK, DECODING = 128, 4
Mode = Literal["chunked", "layered"]


@pytest.fixture(scope="module")
def model() -> MoE:
    return MoE.from_pretrained(ROOT / "examples/demo-model")


def excerpt(model: MoE, domain: str, length: int) -> list[int]:
    text = (ROOT / f"tests/data/heldout_{domain}.txt").read_text()
    return model.codec.encode(text[5000 : 5000 + 8 * length])[:length]


def settings_of(mode: Mode) -> PrefillSettings:
    return PrefillSettings(mode=mode, chunk_tokens=CHUNK, group_tokens=CHUNK)


def engine_with_running_sequences(model: MoE, mode: Mode) -> Engine:
    profile = model.profile.profile.model_copy(update={"prefill": settings_of(mode)})
    engine = Engine(model.backbone, model.experts, profile)
    endless = SamplingParams(max_new_tokens=200, temperature=1.0, seed=1, ignore_eos=True)
    for start in range(DECODING):
        engine.submit(model.request(excerpt(model, "prose", 40 + start)[start:], endless))
    while len(engine.scheduler.running) < DECODING:
        engine.step()
    return engine


def read(engine: Engine, model: MoE, prompt: list[int]) -> dict[str, Any]:
    """Counters of the steps that read the prompt; each running sequence gets a token in each."""
    group = model.request(prompt, SamplingParams(max_new_tokens=1, temperature=0.0))
    running = list(engine.scheduler.running)
    engine.submit(group)
    model.reset_stats()
    while not group.sequences[0].token_ids:
        got = [sequence for sequence, _ in engine.step()]
        assert [s for s in got if s is not group.sequences[0]] == running
    return model.stats()


@pytest.mark.parametrize("length", [400, 700])
@pytest.mark.parametrize("mode", ["chunked", "layered"])
def test_stall_free_and_loads_follow_the_formula(model: MoE, mode: Mode, length: int) -> None:
    engine = engine_with_running_sequences(model, mode)
    prompts = [excerpt(model, domain, length) for domain in ("prose", "python", "cpp")]
    settings = settings_of(mode)
    measured = predicted = 0.0
    for prompt in prompts:
        stats = read(engine, model, prompt)
        measured += sum(stats["expert_loads_by"].values())
        assert stats["layers"][0]["tokens_by"]["prefill"] == length
        frequencies = measured_frequencies(model.experts.statistics)
        if mode == "layered":
            stages = len(engine.planner.pauses([range(length)])) + 1
            predicted += layered_loads(frequencies, length, stages, DECODING)
        else:
            predicted += chunked_loads(
                frequencies, chunk_sizes(settings, length, DECODING), DECODING
            )
    assert measured == pytest.approx(predicted, rel=0.1)


def test_a_chunk_shares_its_experts_and_a_sleeping_wave_leaves_them_to_decoding(model: MoE) -> None:
    """By reader: in most steps of a layered batch, a layer is read for decoding alone."""
    prompt = excerpt(model, "prose", 700)
    by = {}
    for mode in ("chunked", "layered"):
        stats = read(engine_with_running_sequences(model, mode), model, prompt)
        by[mode] = stats["expert_loads_by"]
        total = sum(layer["expert_loads"] for layer in stats["layers"])
        assert sum(by[mode].values()) == total
        bytes_by = stats["expert_bytes_read_by"]
        assert sum(bytes_by.values()) == stats["expert_bytes_read"]
        assert bytes_by["both"] * total == by[mode]["both"] * stats["expert_bytes_read"]
    assert by["chunked"]["decode"] < 0.2 * by["chunked"]["both"]
    assert by["layered"]["decode"] > by["layered"]["both"]
    assert sum(by["layered"].values()) < 0.7 * sum(by["chunked"].values())
