"""Models whose answers see all of the prompt and only their own last tokens.

The oracle is transformers' own cache, which keeps so much of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams
from moe.decode.compiled import CachePlaces
from moe.decode.enable import enable_fused
from moe.describe.probe import enable_packing
from moe.engine.engine import Engine
from moe.errors import ProfileError
from moe.kv.blocks import BlockKVCache, BlockPool
from moe.kv.cache import KVCache
from moe.kv.device_blocks import DeviceBlocks
from moe.kv.ledger import SLACK
from moe.kv.visibility import seen_keys
from moe.network.answer_window import AnswerWindow
from moe.network.lanes import run_lanes
from moe.network.own_cache import CACHE_ARGUMENT
from moe.network.packed_pass import Work
from moe.sequence import Delta
from moe.settings import PrefillSettings
from routing import Phase
from tests.amounts import deep_except

WINDOW = 70
NEW = 230  # tokens of an answer: some blocks are given up
PROMPTS = [
    [(7 * i * i + 3 * i + n) % 120 + 3 for i in range(length)]
    for n, length in enumerate((150, 21, 3))
]
MEMORY = {"memory.kv_tokens": 4096, "memory.prefix_tokens": 1024}


class Said(NamedTuple):
    """An answer: its tokens, and the log probability of each."""

    token_ids: list[int]
    logprobs_T: torch.Tensor


@torch.no_grad()
def by_transformers(reference: Any, prompt: list[int], count: int = NEW) -> Said:
    """Greedy tokens behind a prompt that is read at once."""
    new, cache, ids, rows = prompt, None, list[int](), list[torch.Tensor]()
    for _ in range(count):
        out = reference(torch.tensor([new]), use_cache=True, **{CACHE_ARGUMENT: cache})
        cache = out[CACHE_ARGUMENT]
        rows.append(out.logits[0, -1])
        ids.append(int(rows[-1].argmax()))
        new = ids[-1:]
    return Said(ids, logprobs(torch.stack(rows), ids))


def logprobs(logits_TV: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Of each token, by the logits before it."""
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.fixture(scope="module")
def reference() -> Any:
    config = tiny_config("unlimited_ocr")
    text = config.get_text_config(decoder=True)
    text.max_position_embeddings, text.sliding_window = 1024, WINDOW
    return tiny_model("unlimited_ocr", config=config)


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[Said]:
    return [by_transformers(reference, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def checkpoint(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answer_window")
    reference.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[MoE]:
    with MoE.from_pretrained(checkpoint, MEMORY) as loaded:
        yield loaded


def in_blocks(model: MoE) -> bool:
    return model.backbone.blocks is not None


def answers(
    model: MoE,
    prompts: list[list[int]],
    *,
    known: bool = False,
    chunk: int | None = None,
    preempt: bool = False,
) -> list[Said]:
    """Of each prompt `NEW` tokens, by steps of the engine.

    Args:
        known: the prefix cache keeps what it has.
        chunk: prompts are read in parts of so many tokens.
        preempt: the last one gives way in between, and is read again.
    """
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=0)
    engine = model.engine()
    assert engine.scheduler.prefixes is not None
    while not known and engine.scheduler.prefixes.evict():
        pass
    if chunk is not None:
        engine.scheduler.prefill = PrefillSettings(mode="chunked", chunk_tokens=chunk)
        engine.scheduler._choose_mode = None
    groups = [model.request(prompt, params) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    found: dict[object, list[float]] = {}
    while not engine.idle:
        for sequence, event in engine.step():
            assert isinstance(event, Delta)
            assert event.token.logprob is not None
            found.setdefault(sequence, []).append(event.token.logprob)
        running = engine.scheduler.running
        if preempt and len(running) == len(prompts) and len(running[-1].token_ids) == 200:
            while len(engine.scheduler.running) == len(prompts):  # known prefixes go first
                assert engine.scheduler._preempt()
            preempt = False
        assert engine.scheduler.num_used_tokens() <= engine.kv_tokens
        if model.backbone.blocks is not None:
            held = model.backbone.blocks.held_tokens
            assert held <= engine.scheduler.num_used_tokens() + 2 * BLOCK * len(prompts)
    assert not preempt
    sequences = [group.sequences[0] for group in groups]
    assert not known or all(own.num_cached_tokens for own in sequences)
    return [Said(own.token_ids, torch.tensor(found[own])) for own in sequences]


def check(found: list[Said], expected: list[Said]) -> None:
    """The tokens are equal, and so are their log probabilities up to rounding."""
    for own, said in zip(found, expected, strict=True):
        assert own.token_ids == said.token_ids
        assert torch.allclose(own.logprobs_T, said.logprobs_T, atol=1e-4)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 150))
def test_a_token_sees_the_prompt_and_the_last_ones(prompt: int, behind: int, window: int) -> None:
    """Beside a search through all keys; what is given up is never seen again."""
    kept, at = AnswerWindow(window), prompt + behind
    seen = [key for key in range(at + 1) if key < prompt or key > at - window]
    row = kept.row(prompt, at)
    places = list(range(at + 1))
    if row is not None:
        query, keys = torch.zeros(2, 4), torch.zeros(1, at + 1, 4)
        places = seen_keys(row, query, keys, turned=False)[0].tolist()
    assert places == seen
    given_up = set(kept.given_up(prompt, at).tolist())
    assert given_up.isdisjoint(place // BLOCK for place in seen)
    assert given_up <= set(kept.given_up(prompt, at + 1).tolist())
    slack = set(kept.given_up(prompt, max(at - SLACK - BLOCK, 0)).tolist())
    held = sum(block not in slack for block in range(-(-(at + 1) // BLOCK)))
    assert held * BLOCK <= -(-kept.most_held(prompt, at + 1) // BLOCK) * BLOCK
    # All that these tokens have seen is all before them: a prompt's tokens see the same.
    shared = kept.most_forked(prompt, at)
    assert all(kept.row(prompt, earlier) is None for earlier in range(prompt, shared))
    assert shared == at or kept.row(prompt, shared) is not None


def test_such_a_model_shares_passes_and_decodes_by_a_compiled_step(model: MoE) -> None:
    status = model.status()
    assert status["packing"]["enabled"]
    assert model.backbone.can_cut
    assert model.backbone.own_cache.policy == AnswerWindow(WINDOW)
    if choose_kernel()[0] is not None:
        assert status["fused"]["enabled"], status["fused"]
        assert in_blocks(model)
        assert model.backbone.pool is not None
        assert model.backbone.pool.policy == AnswerWindow(WINDOW)


def test_answers_are_transformers_own(model: MoE, expected: list[Said]) -> None:
    """Alone, in company, in parts, preempted, and behind known prompts."""
    check(answers(model, PROMPTS), expected)
    check(answers(model, PROMPTS[:2], known=True), expected[:2])
    check(answers(model, PROMPTS[:1]), expected[:1])
    check(answers(model, PROMPTS, chunk=40), expected)
    check(answers(model, PROMPTS[::-1], preempt=True), expected[::-1])


@pytest.mark.deep
def test_so_are_those_of_transformers_layers(checkpoint: Path, expected: list[Said]) -> None:
    """In packed passes, with keys and values in buffers."""
    with MoE.from_pretrained(checkpoint, MEMORY | {"engine.fused": "off"}) as model:
        assert not in_blocks(model)
        check(answers(model, PROMPTS[::-1], chunk=40, preempt=True), expected[::-1])


def test_the_oracle_would_notice_keys_too_many(reference: Any, expected: list[Said]) -> None:
    """Tokens that see all have other logits."""
    with torch.no_grad():
        ids = torch.tensor([[*PROMPTS[1], *expected[1].token_ids]])
        whole = reference(ids, use_cache=False).logits[0, len(PROMPTS[1]) - 1 : -1]
    gaps = (logprobs(whole, expected[1].token_ids) - expected[1].logprobs_T).abs()
    assert float(gaps[:WINDOW].max()) < 1e-4
    assert float(gaps[WINDOW + 1 :].max()) > 1e-2


@pytest.mark.parametrize("bits", [16, 8])
def test_neither_company_nor_cuts_nor_preemption_change_a_token(
    checkpoint: Path, bits: int
) -> None:
    settings = MEMORY | {"memory.kv_bits": bits}
    with MoE.from_pretrained(checkpoint, settings) as model:
        alone = [answers(model, [prompt])[0].token_ids for prompt in PROMPTS[:2]]
        for how in ({}, {"chunk": 40}, {"preempt": True}):
            found = answers(model, PROMPTS[:2], **how)
            assert [own.token_ids for own in found] == alone


def test_drafts_change_no_token(checkpoint: Path, expected: list[Said]) -> None:
    settings = MEMORY | {"speculation.mode": "ngram"}
    with MoE.from_pretrained(checkpoint, settings) as model:
        assert model.status()["speculation"]["enabled"]
        for _ in range(2):  # tokens of the first round are drafted in the second
            check(answers(model, PROMPTS[:2]), expected[:2])


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("length", deep_except([20], [20, NEW]))
def test_the_next_turn_reads_its_whole_prompt_with_attention_to_all(
    checkpoint: Path, reference: Any, reuse: bool, length: int
) -> None:
    """What a token of the answer kept is that of a prompt's token only while it saw all."""
    settings = MEMORY | {"memory.reuse_answers": reuse}
    with MoE.from_pretrained(checkpoint, settings) as model:
        engine, said = model.engine(), list(PROMPTS[0])
        for turn in range(2):
            params = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
            group = model.request(said, params)
            engine.submit(group)
            finish(engine)
            (sequence,) = group.sequences
            assert sequence.token_ids == by_transformers(reference, said, length).token_ids
            most = len(PROMPTS[0]) + (WINDOW if reuse else 0)
            assert sequence.num_cached_tokens <= turn * most
            assert sequence.num_cached_tokens >= turn * 128
            if turn and reuse and length < WINDOW:
                assert sequence.num_cached_tokens > len(PROMPTS[0])
            said += [*sequence.token_ids, 7, 8]


def test_samples_of_one_prompt_keep_their_own_windows(model: MoE, expected: list[Said]) -> None:
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True, n=2)
    engine, group = model.engine(), model.request(PROMPTS[0], params)
    engine.submit(group)
    finish(engine)
    assert [own.token_ids for own in group.sequences] == [expected[0].token_ids] * 2


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


@torch.inference_mode()
def read(model: MoE, cache: KVCache, ids: list[int], phase: Phase) -> torch.Tensor:
    lanes = model.backbone.lanes([Work(ids, cache, all_logits=True)], phase)
    run_lanes(lanes, model.experts.run)
    return lanes[0].result()[0]


def test_blocks_behind_the_window_are_given_up(model: MoE) -> None:
    """Those of the prompt stay; a fork is no longer than what saw all."""
    if not in_blocks(model):
        pytest.skip("keys and values are in buffers")
    cache = model.backbone.new_cache(1024)
    assert isinstance(cache, BlockKVCache)
    read(model, cache, PROMPTS[0], "prefill")
    cache.prompt_read()
    assert cache.longest_fork(150) == 150
    answer = [(11 * i) % 120 + 3 for i in range(800)]
    for at in range(0, 60, 10):
        read(model, cache, answer[at : at + 10], "decode")
    assert cache.longest_fork(cache.length) == len(PROMPTS[0]) + 60
    for at in range(60, 800, 10):
        read(model, cache, answer[at : at + 10], "decode")
        assert cache.policy is not None
        assert cache.held_tokens <= cache.policy.most_held(150, cache.length)
    given_up = [at for at, block in enumerate(cache.blocks) if block is None]
    assert given_up == list(range(3, given_up[-1] + 1))
    assert len(given_up) >= 6
    assert cache.longest_fork(cache.length) == 0


@pytest.mark.deep
def test_a_pool_that_compiled_code_does_not_read_serves_it(
    checkpoint: Path, expected: list[Said]
) -> None:
    """As on a GPU, whose blocks all layers share: the pass reads each sequence by itself."""
    with MoE.from_pretrained(checkpoint, MEMORY | {"engine.fused": "off"}) as model:
        model.backbone.blocks = BlockPool(DeviceBlocks(torch.device("cpu"), torch.float32, 8))
        cache = model.backbone.new_cache(200)
        assert isinstance(cache, BlockKVCache)
        rows = [read(model, cache, PROMPTS[1], "prefill")[-1:]]
        cache.prompt_read()
        ids = expected[1].token_ids[:97]
        for at in range(0, 96, 16):
            rows.append(read(model, cache, ids[at : at + 16], "decode"))
        found = logprobs(torch.cat(rows), ids)
        assert torch.allclose(found, expected[1].logprobs_T[:97], atol=1e-4)
        assert cache.whole


def test_steps_that_see_more_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compiled code, and by packed passes: then transformers' cache keeps the window."""
    if choose_kernel()[0] is None:
        pytest.skip("no C++ compiler")
    with MoE.from_pretrained(checkpoint, MEMORY | {"engine.fused": "off"}) as model:
        backbone = model.backbone
        with monkeypatch.context() as changed:
            changed.setattr(CachePlaces, "_seen", lambda *_: (None, None))
            fused = enable_fused(backbone, model.experts)
        assert not fused.enabled
        assert "differ" in fused.reason
        assert enable_fused(backbone, model.experts).enabled
        monkeypatch.setattr(AnswerWindow, "row", lambda *_: None)
        packing = enable_packing(backbone)
        assert not packing.enabled
        assert packing.reason.startswith("differs from transformers' own attention")


def test_a_policy_of_the_profile_is_refused(checkpoint: Path) -> None:
    settings = MEMORY | {"lossless": False, "memory.kv_policy": "window:256"}
    message = f"by the model's own window, {WINDOW} tokens.*set memory.kv_policy: null"
    with pytest.raises(ProfileError, match=message):
        MoE.from_pretrained(checkpoint, settings)
