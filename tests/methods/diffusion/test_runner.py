"""Models that write canvases, on the engine that runs all others: prompts in chunks and groups
of layers, known beginnings, preemption and log probabilities change no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoE, SamplingParams
from moe.errors import RequestError
from moe.methods.diffusion import denoise
from moe.methods.diffusion.cache_view import layer_windows
from moe.sequence import RunningSequence
from tests.methods.diffusion.test_writer import SIZES, Pair, make_model

LONG = [(7 * place) % 90 + 3 for place in range(45)]
"""Longer than the window of sliding layers, and two blocks of the prefix cache."""
PROMPTS = [LONG, LONG[:20], [11, 3]]
CHUNKS = {"prefill.mode": "chunked", "prefill.chunk_tokens": 13}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(make_model(tmp_path_factory.mktemp("canvases") / "model", **SIZES[1]))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    return [pair.expected(prompt, seed) for seed, prompt in enumerate(PROMPTS)]


def run(
    model: MoE, pair: Pair, prompts: Sequence[list[int]] = PROMPTS
) -> tuple[list[list[int]], Any, list[int]]:
    """Tokens of each prompt, the engine, and how many sequences ran in each step."""
    engine = model.loop()
    groups = [model.request(prompt, pair.params(seed)) for seed, prompt in enumerate(prompts)]
    for group in groups:
        engine.submit(group)
    running = []
    while not engine.idle:
        running.append(engine.occupancy()["running_sequences"])
        for _, event in engine.step():
            assert not isinstance(event, Exception), event
    assert not any(engine.occupancy().values())
    return [group.sequences[0].token_ids for group in groups], engine, running


@pytest.mark.parametrize(
    "changes",
    [CHUNKS, {"prefill.mode": "layered", "prefill.group_tokens": 8}, {"prefill.mode": "whole"}],
)
def test_how_prompts_are_read_changes_no_token(
    pair: Pair, expected: list[list[int]], changes: dict[str, Any]
) -> None:
    with MoE.from_pretrained(pair.path, {"memory.prefix_tokens": 0} | changes) as model:
        assert run(model, pair)[0] == expected


def test_a_known_beginning_is_not_read_again(pair: Pair, expected: list[list[int]]) -> None:
    with MoE.from_pretrained(pair.path) as model:
        assert run(model, pair, PROMPTS[:1])[0] == expected[:1]
        model.reset_stats()
        written, engine, _ = run(model, pair)
        assert written == expected
        assert engine.status()["prefixes"]["hit_tokens"] == 32 + 16
        read = model.stats()["layers"][0]["tokens_by"]["prefill"]
        later = len(PROMPTS) * (pair.num_new - pair.reference.config.canvas_length)
        assert read == sum(map(len, PROMPTS)) - 48 + later


def test_an_answer_is_a_known_beginning_too_if_asked_for(pair: Pair) -> None:
    first = pair.expected(LONG, 0)
    following = [*LONG, *first, 5, 6]
    with MoE.from_pretrained(pair.path, {"memory.reuse_answers": True}) as model:
        run(model, pair, [LONG])
        written, engine, _ = run(model, pair, [following])
        assert written == [pair.expected(following, 0)]
        # The last canvas was never read.
        known = len(LONG) + pair.num_new - pair.reference.config.canvas_length
        assert engine.status()["prefixes"]["hit_tokens"] == known // 16 * 16


def test_a_preempted_sequence_goes_on_with_its_canvas(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, preempted = 0, 0
    own, release = denoise.Denoiser._decide, RunningSequence.release

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return own(self, *arguments)

    def released(self: RunningSequence) -> None:
        nonlocal preempted
        preempted += self.cache is not None and self.finish_reason is None
        release(self)

    prompts = [LONG[:20], LONG[5:25], LONG[9:30]]
    expected = [pair.expected(prompt, seed) for seed, prompt in enumerate(prompts)]
    changes = {"memory.kv_tokens": 50, "memory.prefix_tokens": 0}
    with MoE.from_pretrained(pair.path, changes) as model:
        monkeypatch.setattr(denoise.Denoiser, "_decide", counted)
        monkeypatch.setattr(RunningSequence, "release", released)
        written, _, running = run(model, pair, prompts)
    assert written == expected
    assert max(running) == 2  # whole answers of two would not fit
    assert preempted > 0
    steps = model.status()["writer"]["schedule"]["max_denoising_steps"]
    assert passes == 3 * 2 * steps  # no pass over a canvas was made twice


def test_log_probabilities_are_those_of_the_pass_that_made_the_token_final(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    last: list[Tensor] = []
    forward = pair.reference.forward

    def kept(**given: Any) -> Any:
        output = forward(**given)
        last.append(output.logits[0].log_softmax(-1))
        return output

    monkeypatch.setattr(pair.reference, "forward", kept)
    expected = pair.expected(LONG, 3)
    steps = len(last) * pair.reference.config.canvas_length // pair.num_new
    finals = torch.cat(last[steps - 1 :: steps])
    (plain,) = pair.model.generate(LONG, pair.params(3))
    (scored,) = pair.model.generate(LONG, pair.params(3, logprobs=2))
    assert plain.token_ids == scored.token_ids == expected
    for token, row in zip(scored.tokens, finals, strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        values, ids = row.topk(2)
        assert token.top is not None
        assert [one for one, _ in token.top] == ids.tolist()
        assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_what_only_our_steps_can_do_is_refused_before_it_runs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoise, "_ARGUMENTS", frozenset({"something_else"}))
    with MoE.from_pretrained(pair.path) as model:
        for name, value in {"temperature": 0.0, "logprobs": 1}.items():
            with pytest.raises(
                RequestError, match=rf"{name} is not possible .* no _denoising_step"
            ):
                model.generate(LONG, pair.params(0, **{name: value}))
        assert run(model, pair, PROMPTS[2:])[0] == [pair.expected(PROMPTS[2], 0)]


def test_layers_with_windows_give_up_what_is_behind_them(pair: Pair) -> None:
    """Keys and values are in blocks of 64 tokens."""
    prompt = [(5 * place) % 90 + 3 for place in range(100)]
    windows = layer_windows(pair.reference.config)
    assert windows == [16, 16, None]
    pool = pair.model.backbone.blocks
    assert pool is not None
    assert pool.windows.of_layer == {0: 16, 1: 16}
    assert set(pair.model.memory_plan.kv_windows) == {16}
    profile = {"memory.prefix_tokens": 0, "model.context_length": 128}
    with MoE.from_pretrained(pair.path, profile) as model:
        assert run(model, pair, [prompt])[0] == [pair.expected(prompt, 0)]


def test_a_request_without_a_seed_gets_one_that_all_ranks_know(pair: Pair) -> None:
    seeds = {
        pair.model.request(LONG, SamplingParams(max_new_tokens=3)).sequences[0].sampler.params.seed
        for _ in range(3)
    }
    assert None not in seeds
    assert len(seeds) == 3


def test_a_cancelled_sequence_leaves_nothing(pair: Pair) -> None:
    engine = pair.model.loop()
    group = pair.model.request(LONG, pair.params(0))
    engine.submit(group)
    for _ in range(3):
        engine.step()
    engine.cancel(group)
    assert engine.idle
    assert not any(engine.occupancy().values())
    assert not engine.runner._lanes  # type: ignore[attr-defined]
