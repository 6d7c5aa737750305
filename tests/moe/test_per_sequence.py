"""Models with recurrent layers or sparse attention share passes, and say what transformers says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import MoE, SamplingParams
from moe.kv.cache import SNAPSHOTS, KVCache
from moe.kv.prefix_cache import BLOCK
from moe.sequence import Delta
from moe.settings.profile import load_profile
from tests.amounts import deep_except
from tests.moe.greedy import likeliest

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
SETTINGS: dict[str, Any] = {"prefill.wave_tokens": 128, "memory.prefix_tokens": 0}
ELASTIC = {"speculation.mode": "elastic", "speculation.experts": 1}
LAYERS = {"prefill.mode": "layered", "prefill.wave_tokens": 48}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"prefill.mode": "whole"},
    "chunks": {"prefill.mode": "chunked", "prefill.chunk_tokens": 16},
    "preempted": {"memory.kv_tokens": 120},
}
"""Of one model, which is loaded once."""
ODD_CHUNKS = {"prefill.mode": "chunked", "prefill.chunk_tokens": 7}
PLANES = {"expert_bits": 8, "trunk_bits": 8, "head_bits": 8, "group_size": 32}

Load = Callable[[str], MoE]


@pytest.fixture(scope="module")
def drafting(tiny_checkpoint: Callable[[str], Path]) -> Load:
    """Models with drafts of n-grams, which engines may leave out."""
    ngrams = SETTINGS | {"speculation.mode": "ngram"}
    return cache(lambda kind: MoE.from_pretrained(tiny_checkpoint(kind), ngrams))


@pytest.fixture(scope="module")
def planes(tiny_checkpoint: Callable[[str], Path]) -> Load:
    return cache(lambda kind: MoE.from_pretrained(tiny_checkpoint(kind), SETTINGS, model=PLANES))


@contextmanager
def under(model: MoE, settings: dict[str, Any]) -> Iterator[MoE]:
    """The model with other settings of its engine."""
    before = model.profile
    model.profile = load_profile(before, settings)
    yield model
    model.profile = before


def answers(model: MoE, prompts: list[list[int]], drafts: bool = False) -> list[list[int]]:
    engine = model.engine(drafts=drafts)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    groups = [model.request(prompt, greedy) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    while not engine.idle:
        engine.step()
    return [group.sequences[0].token_ids for group in groups]


@pytest.mark.parametrize("kind", deep_except(["qwen3_next"], KINDS))
def test_every_way_says_what_transformers_says(
    tiny_checkpoint: Callable[[str], Path], drafting: Load, kind: str
) -> None:
    path, model = tiny_checkpoint(kind), drafting(kind)
    recycling = MoE.from_pretrained(path, SETTINGS | LAYERS | {"speculation.mode": "recycling"})
    elastic = MoE.from_pretrained(path, SETTINGS | ELASTIC)
    for each in (model, recycling, elastic):
        assert each.status()["packing"]["enabled"], each.status()["packing"]
        assert not any("prompts are neither cut" in notice for notice in each.notices)
    found = {}
    for way, settings in WAYS.items():
        with under(model, settings):
            found[way] = answers(model, PROMPTS)
    found["layers"] = answers(recycling, PROMPTS)
    found["n-grams"] = answers(model, PROMPTS, drafts=True)
    for way, each in {"recycling": recycling, "elastic": elastic}.items():
        for attempt in range(4):  # it drafts when it expects to gain by what it has seen
            found[f"{way} {attempt}"] = answers(each, PROMPTS, drafts=True)
            if each.stats()["speculation"]["modes"]:
                break
        assert each.stats()["speculation"]["modes"], way
    said = found["whole"]
    assert likeliest(kind, PROMPTS, said) == said
    assert all(each == said for each in found.values()), found


@pytest.mark.parametrize("kind", deep_except(["qwen3_next"], KINDS))
def test_logits_do_not_depend_on_company(drafting: Load, kind: str) -> None:
    model = drafting(kind)
    together = model.batch_logits(PROMPTS)
    for prompt, logits in zip(PROMPTS, together, strict=True):
        assert (model.batch_logits([prompt])[0] - logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "kind",
    deep_except(
        ["qwen3_next"], ["qwen3_next", "jamba", "deepseek_v32", "deepseek_v4", "qwen4_exp_text"]
    ),
)
def test_a_second_turn_reads_only_what_is_new(
    tiny_checkpoint: Callable[[str], Path], drafting: Load, kind: str
) -> None:
    model = MoE.from_pretrained(tiny_checkpoint(kind), SETTINGS | {"memory.prefix_tokens": 512})
    plain = drafting(kind)
    engine, said_so_far, before = model.loop(), list(PROMPTS[0]), 0
    for _ in range(3):
        group = model.request(said_so_far, SamplingParams(max_new_tokens=5, temperature=0.0))
        engine.submit(group)
        while not engine.idle:
            engine.step()
        answer = group.sequences[0].token_ids
        assert answer == answers(plain, [said_so_far])[0][: len(answer)]
        assert group.sequences[0].num_cached_tokens >= before - BLOCK
        before = len(said_so_far)
        said_so_far += [*answer, 7, 8, 9]


@pytest.mark.parametrize("kind", deep_except(["qwen3_next"], ["qwen3_next", "jamba"]))
def test_a_shared_beginning_is_read_twice_and_then_known(
    tiny_checkpoint: Callable[[str], Path], drafting: Load, kind: str
) -> None:
    """As all chats with one system prompt: the second prompt shows where they part."""
    model = MoE.from_pretrained(tiny_checkpoint(kind), SETTINGS | {"memory.prefix_tokens": 512})
    plain = drafting(kind)
    system = [3 + 7 * at % 90 for at in range(53)]
    prompts = [[*system, *[90 + user] * (20 + user)] for user in range(4)]
    engine, cached = model.loop(), []
    for prompt in prompts:
        group = model.request(prompt, SamplingParams(max_new_tokens=5, temperature=0.0))
        engine.submit(group)
        while not engine.idle:
            engine.step()
        answer = group.sequences[0].token_ids
        assert answer == answers(plain, [prompt])[0][: len(answer)]
        cached.append(group.sequences[0].num_cached_tokens)
    assert cached == [0, 0, len(system), len(system)]


def scores(model: MoE, prompts: list[list[int]]) -> list[list[float | None]]:
    """The log probability of each token that is said."""
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True, logprobs=1)
    return [[token.logprob for token in c.tokens] for c in model.generate(prompts, params)]


@pytest.mark.parametrize(
    "kind", deep_except(["qwen3_next"], sorted(KINDS.keys() - {"deepseek_v4"}))
)
def test_decoded_tokens_have_the_same_bits_alone_and_together(planes: Load, kind: str) -> None:
    """With weights as planes. The other leaves prompts to torch, and last bits move there."""
    model = planes(kind)
    assert scores(model, PROMPTS) == [scores(model, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "kind",
    deep_except(
        ["qwen3_next"],
        ["qwen3_next", "granitemoehybrid", "lfm2_moe", "bailing_hybrid", "qwen4_exp_text", "hy_v4"],
    ),
)
def test_cuts_change_no_bits(
    tiny_checkpoint: Callable[[str], Path], planes: Load, kind: str
) -> None:
    """With weights as planes, as recurrent layers run on our kernels."""
    model = MoE.from_pretrained(tiny_checkpoint(kind), SETTINGS | LAYERS, model=PLANES)
    in_layers = scores(model, PROMPTS)
    for settings in (*WAYS.values(), ODD_CHUNKS):
        with under(planes(kind), settings) as model:
            assert scores(model, PROMPTS) == in_layers, settings


@pytest.mark.parametrize(
    "kind",
    deep_except(["qwen3_next"], ["qwen3_next", "granitemoehybrid", "lfm2_moe", "bailing_hybrid"]),
)
def test_a_known_prefix_changes_no_bits(tiny_checkpoint: Callable[[str], Path], kind: str) -> None:
    settings = SETTINGS | {"memory.prefix_tokens": 512}
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
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_next"), SETTINGS)
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
