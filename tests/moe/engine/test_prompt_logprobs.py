"""Log probabilities of prompts against transformers' own forward, however the prompt is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe import MoE, SamplingParams
from moe.completion import Completion
from moe.errors import RequestError
from moe.network.backbone import Backbone
from moe.network.lanes import Lane
from moe.network.packed_pass import Work
from tests.amounts import deep_except

SCORED = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
PLAIN = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
PROMPTS = [[(i * 37) % 125 + 3 for i in range(40)], [5, 9, 33], [7], list(range(90, 110))]
SMALL = {"wave_tokens": 48, "chunk_tokens": 9, "group_tokens": 6}


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str, int], Tensor]:
    """``(T, V)`` log-softmax of transformers' own eager forward of a prompt."""

    @cache
    def model(model_type: str) -> Any:
        path = tiny_checkpoint(model_type)
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    @cache
    def logprobs(model_type: str, prompt: int) -> Tensor:
        with torch.no_grad():
            logits = model(model_type)(torch.tensor([PROMPTS[prompt]]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    return logprobs


def check(completion: Completion, expected: Tensor) -> None:
    ids, scores = completion.prompt_token_ids, completion.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    tokens = [token for token in scores if token is not None]
    assert [token.id for token in tokens] == ids[1:]
    for token, row in zip(tokens, expected, strict=False):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert token.top is not None
        assert [p for _, p in token.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("mode", ["whole", "chunked", "layered"])
@pytest.mark.parametrize("model_type", deep_except(["qwen3_moe"], ["qwen3_moe", "qwen3_next"]))
def test_scores_equal_transformers_log_softmax(
    model_type: str,
    mode: str,
    tiny_moe: Callable[[str], MoE],
    tiny_checkpoint: Callable[[str], Path],
    reference: Callable[[str, int], Tensor],
) -> None:
    """Beside prompts that nobody wants scored, and with several samples of one prompt."""
    model = MoE.from_pretrained(
        tiny_checkpoint(model_type), prefill={"mode": mode, **SMALL}, memory={"kv_tokens": 100}
    )
    twice = SamplingParams(max_new_tokens=3, temperature=1.0, seed=1, n=2, prompt_logprobs=2)
    params = [SCORED, PLAIN, SCORED, twice]
    completions = model.generate(PROMPTS, params)
    plain = tiny_moe(model_type).generate(PROMPTS, PLAIN)
    for completion in completions:
        if params[completion.prompt] is PLAIN:
            assert completion.prompt_logprobs is None
        else:
            check(completion, reference(model_type, completion.prompt))
        if params[completion.prompt] is not twice:
            assert completion.token_ids == plain[completion.prompt].token_ids


def test_a_stream_has_them_once_with_the_first_token(tiny_moe: Callable[[str], MoE]) -> None:
    deltas = [event.delta for event in tiny_moe("qwen3_moe").stream(PROMPTS[1], SCORED)]
    assert [d.prompt_logprobs is not None for d in deltas] == [True, False, False]


def test_a_preempted_prompt_is_scored_once(
    tiny_checkpoint: Callable[[str], Path], reference: Callable[[str, int], Tensor]
) -> None:
    """Little memory and other requests: the prompt is given up half-read and read again."""
    model = MoE.from_pretrained(
        tiny_checkpoint("qwen3_moe"), prefill={"mode": "chunked", **SMALL}, memory={"kv_tokens": 47}
    )
    long = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    completions = model.generate([[5, 6, 7], PROMPTS[0], PROMPTS[3]], [long, SCORED, SCORED])
    check(completions[1], reference("qwen3_moe", 0))
    check(completions[2], reference("qwen3_moe", 3))


def test_known_prefixes_are_not_used_but_kept(
    tiny_checkpoint: Callable[[str], Path], reference: Callable[[str, int], Tensor]
) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory={"prefix_tokens": 200})
    engine, hits = model.engine(), []
    for params in (PLAIN, SCORED, PLAIN):
        group = model.request(PROMPTS[0], params)
        engine.submit(group)
        outcomes = []
        while not engine.idle:
            outcomes += engine.step()
        hits.append(engine.status()["prefixes"]["hit_tokens"])
        first = next(delta for sequence, delta in outcomes if sequence is group.sequences[0])
        assert not isinstance(first, Exception)
        assert (first.prompt_logprobs is None) == (params is PLAIN)
    assert hits == [0, 0, 32]


def test_rows_of_logits_in_memory_are_bounded(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass makes logits of at most ``chunk_tokens`` prompt tokens, and one row for each other."""
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), prefill={"mode": "layered", **SMALL})
    real, rows = Backbone.lanes, []

    def spy(backbone: Backbone, work: list[Work], *phase: Any) -> list[Lane[list[Tensor]]]:
        rows.append(sum(len(item.token_ids) for item in work if item.all_logits))
        return real(backbone, work, *phase)

    monkeypatch.setattr(Backbone, "lanes", spy)
    model.generate(PROMPTS, SCORED)
    assert max(rows) == SMALL["chunk_tokens"]


def test_broken_logits_end_their_own_request_only(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    engine = model.engine()
    broken, other = model.request(PROMPTS[1], SCORED), model.request(PROMPTS[3], PLAIN)

    def fail(*_: object) -> None:
        raise FloatingPointError("the logits hold NaN")

    broken.score = fail  # type: ignore[method-assign,assignment]
    engine.submit(broken)
    engine.submit(other)
    outcomes = []
    while not engine.idle:
        outcomes += engine.step()
    failed = [sequence for sequence, outcome in outcomes if isinstance(outcome, Exception)]
    assert failed == broken.sequences
    assert len(other.sequences[0].token_ids) == 3
    assert engine.occupancy()["kv_tokens"] == 0


def test_a_biased_token_must_be_one_of_the_model(tiny_moe: Callable[[str], MoE]) -> None:
    model = tiny_moe("qwen3_moe")
    params = SamplingParams(max_new_tokens=2, temperature=0.0, logit_bias={9: 100.0})
    assert model.generate([5, 6], params)[0].token_ids == [9, 9]
    with pytest.raises(RequestError, match=r"logit_bias names token 128; .* ids end at 127"):
        model.generate([5, 6], SamplingParams(logit_bias={128: 1.0}))
