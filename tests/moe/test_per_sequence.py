"""Models with recurrent layers or sparse attention share passes, and say what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.models.tiny import tiny_model
from moe import MoE, SamplingParams
from moe.engine.prefix_cache import BLOCK
from moe.network.kv_cache import SNAPSHOTS, KVCache
from moe.sequence import Delta

KINDS = {
    "qwen3_next": "gated delta rule",
    "granitemoehybrid": "Mamba 2",
    "jamba": "Mamba",
    "lfm2_moe": "short convolutions",
    "kimi_linear": "KDA and latent attention",
    "minimax": "lightning attention, with states in a cache class of its own",
    "deepseek_v32": "sparse attention",
    "deepseek_v4": "attention to compressed entries, in cache layers of its own",
    "qwen4_exp_text": "sparse attention that keeps positions of all tokens, n-grams of token ids",
    "hy_v4": "sparse attention that shares choices",
    "inkling2_text": "attention with biases by position, convolutions inside",
}
RANDOM = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(3, 128, (n,), generator=RANDOM).tolist() for n in (70, 33, 9, 1)]
NEW = 12
WAVE = {"prefill.wave_tokens": 128}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"prefill.mode": "whole"},
    "chunks": {"prefill.mode": "chunked", "prefill.chunk_tokens": 16},
    "layers": {"prefill.mode": "layered", "prefill.wave_tokens": 48},
    "preempted": {"memory.kv_tokens": 120},
    "n-grams": {"speculation.mode": "ngram"},
    "recycling": {"speculation.mode": "recycling"},
    "elastic drafts": {"speculation.mode": "elastic", "speculation.experts": 1},
}

ODD_CHUNKS = {"prefill.mode": "chunked", "prefill.chunk_tokens": 7}


@cache
def said(kind: str) -> list[list[int]]:
    """Greedy tokens of transformers' own forward, read whole each time."""
    model = tiny_model(kind)
    model.config._attn_implementation = "eager"
    answers = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(NEW):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            answers.append(ids[len(prompt) :])
    return answers


def answers(model: MoE, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    greedy = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    completions = model.generate(prompts, SamplingParams(**{**greedy, **params}))
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_says_what_transformers_says(
    tiny_checkpoint: Callable[[str], Path], kind: str
) -> None:
    for way, settings in WAYS.items():
        model = MoE.from_pretrained(tiny_checkpoint(kind), WAVE | settings)
        assert model.status()["packing"]["enabled"], model.status()["packing"]
        assert not any("prompts are neither cut" in notice for notice in model.notices)
        assert answers(model, PROMPTS) == said(kind), way
        if way in ("recycling", "elastic drafts"):
            assert model.stats()["speculation"]["modes"], way


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_company(tiny_checkpoint: Callable[[str], Path], kind: str) -> None:
    model = MoE.from_pretrained(tiny_checkpoint(kind), WAVE)
    together = model.batch_logits(PROMPTS)
    for prompt, logits in zip(PROMPTS, together, strict=True):
        assert (model.batch_logits([prompt])[0] - logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "jamba", "deepseek_v32", "deepseek_v4", "qwen4_exp_text"]
)
def test_a_second_turn_reads_only_what_is_new(
    tiny_checkpoint: Callable[[str], Path], kind: str
) -> None:
    model = MoE.from_pretrained(tiny_checkpoint(kind), WAVE | {"memory.prefix_tokens": 512})
    plain = MoE.from_pretrained(tiny_checkpoint(kind), WAVE)
    engine, said_so_far, before = model.loop(), list(PROMPTS[0]), 0
    for _ in range(3):
        group = model.request(said_so_far, SamplingParams(max_new_tokens=5, temperature=0.0))
        engine.submit(group)
        while not engine.idle:
            engine.step()
        answer = group.sequences[0].token_ids
        assert [answer] == answers(plain, [said_so_far], max_new_tokens=5, ignore_eos=False)
        assert group.sequences[0].num_cached_tokens >= before - BLOCK
        before = len(said_so_far)
        said_so_far += [*answer, 7, 8, 9]


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_a_shared_beginning_is_read_twice_and_then_known(
    tiny_checkpoint: Callable[[str], Path], kind: str
) -> None:
    """As all chats with one system prompt: the second prompt shows where they part."""
    model = MoE.from_pretrained(tiny_checkpoint(kind), WAVE | {"memory.prefix_tokens": 512})
    plain = MoE.from_pretrained(tiny_checkpoint(kind), WAVE)
    system = [3 + 7 * at % 90 for at in range(53)]
    prompts = [[*system, *[90 + user] * (20 + user)] for user in range(4)]
    engine, cached = model.loop(), []
    for prompt in prompts:
        group = model.request(prompt, SamplingParams(max_new_tokens=5, temperature=0.0))
        engine.submit(group)
        while not engine.idle:
            engine.step()
        said_to = answers(plain, [prompt], max_new_tokens=5, ignore_eos=False)
        assert [group.sequences[0].token_ids] == said_to
        cached.append(group.sequences[0].num_cached_tokens)
    assert cached == [0, 0, len(system), len(system)]


PLANES = {"expert_bits": 8, "trunk_bits": 8, "head_bits": 8, "group_size": 32}


def scores(model: MoE, prompts: list[list[int]]) -> list[list[float | None]]:
    """The log probability of each token that is said."""
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True, logprobs=1)
    return [[token.logprob for token in c.tokens] for c in model.generate(prompts, params)]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"hy_v4", "deepseek_v4"}))
def test_decoded_tokens_have_the_same_bits_alone_and_together(
    tiny_checkpoint: Callable[[str], Path], kind: str
) -> None:
    """With weights as planes. The two others leave more to torch, and last bits move there."""
    model = MoE.from_pretrained(tiny_checkpoint(kind), WAVE, model=PLANES)
    assert scores(model, PROMPTS) == [scores(model, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "lfm2_moe", "bailing_hybrid"])
def test_cuts_change_no_bits(tiny_checkpoint: Callable[[str], Path], kind: str) -> None:
    """With weights as planes, as recurrent layers run on our kernels."""
    ways = [*(WAYS[name] for name in ("whole", "chunks", "layers", "preempted")), ODD_CHUNKS]
    whole, *cut = (
        scores(MoE.from_pretrained(tiny_checkpoint(kind), WAVE | way, model=PLANES), PROMPTS)
        for way in ways
    )
    assert all(each == whole for each in cut)


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "lfm2_moe", "bailing_hybrid"])
def test_a_known_prefix_changes_no_bits(tiny_checkpoint: Callable[[str], Path], kind: str) -> None:
    settings = WAVE | {"memory.prefix_tokens": 512}
    model = MoE.from_pretrained(tiny_checkpoint(kind), settings, model=PLANES)
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, logprobs=1, ignore_eos=True)
    engine, found, cached = model.loop(), [], []
    for _ in range(2):
        group = model.request(PROMPTS[0], params)
        engine.submit(group)
        logprobs = []
        while not engine.idle:
            events = [event for _, event in engine.step()]
            logprobs += [event.token.logprob for event in events if isinstance(event, Delta)]
        found.append(logprobs)
        cached.append(group.sequences[0].num_cached_tokens)
    assert cached == [0, len(PROMPTS[0]) - BLOCK]
    assert found[0] == found[1]


def test_samples_of_one_prompt_share_its_states(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_next"), WAVE)
    both = model.generate(
        [PROMPTS[1]], SamplingParams(n=2, temperature=1.0, seed=4, max_new_tokens=8)
    )
    for sample in both:
        ids = [*PROMPTS[1], *sample.token_ids]
        logits = model.batch_logits([ids])[0]
        assert logits.isfinite().all()
    assert both[0].token_ids != both[1].token_ids


def test_rows_of_a_pass_outlive_the_growth_of_buffers() -> None:
    cache, rows = KVCache(4000), torch.arange(12.0).view(1, 1, 12, 1)
    cache.write(0, rows[:, :, :10], rows[:, :, :10])
    cache.length = cache.room - 1
    for skip in (0, 1):
        row = rows[:, :, 10 + skip : 11 + skip]
        cache.write(0, row, row, skip)
    keys, _ = cache.read(0, cache.length + 2)
    assert keys[0, 0, -2:, 0].tolist() == [10.0, 11.0]


@given(st.data())
def test_states_are_those_of_the_tokens_that_are_left(data: st.DataObject) -> None:
    """A cache that grows, is cut, marked and forked has the state that its tokens alone make."""
    cache, tokens, fresh = KVCache(1000), list[int](), iter(range(1, 1000))

    def state() -> int:
        total = 0
        for token in tokens:
            total = (3 * total + token) % 1009
        return total

    for _ in range(data.draw(st.integers(1, 12))):
        size, prompt = data.draw(st.integers(1, 4)), data.draw(st.booleans())
        states = {}
        for at in range(1, size + 1):
            tokens.append(next(fresh))
            states[at] = {(0, "recurrent", 0): torch.tensor([state()])}
        kept = sorted(data.draw(st.sets(st.sampled_from(range(1, size + 1))))) if prompt else []
        if prompt:
            states = {at: states[at] for at in {*kept, size}}
        cache.advance(states, size, kept)
        if not prompt and data.draw(st.booleans()):
            left = len(tokens) - data.draw(st.integers(0, size - 1))
            del tokens[left:]
            cache.cut(left)
        if data.draw(st.booleans()):
            cache = cache.fork(1000, cache.length)
        if data.draw(st.booleans()):
            start = len(tokens)
            cache.mark()
            for _ in range(data.draw(st.integers(1, 3))):
                cache.advance({1: {(0, "recurrent", 0): torch.tensor([-1])}}, 1)
            cache.cut(start)
        assert cache.length == len(tokens)
        assert cache.states[0, "recurrent", 0].item() == state()
        assert len(cache._states) <= SNAPSHOTS + size + 2
        end = cache.longest_fork(data.draw(st.integers(0, len(tokens))))
        if end:
            copy, behind = cache.fork(1000, end), tokens[end:]
            del tokens[end:]
            assert copy.states[0, "recurrent", 0].item() == state()
            tokens += behind
