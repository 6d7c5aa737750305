"""Lossy policies on keys and values: what steps attend to, what is freed, what changes no bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams
from moe.commands.evaluate.scoring import price_kv_policy
from moe.commands.plan.contexts import policy_prices
from moe.decode.proof import prove_policy
from moe.describe.attention import check_views
from moe.engine.engine import Engine
from moe.errors import ProfileError
from moe.loader import _check_policy
from moe.loading.memory_plan import ANY_LENGTH
from moe.memory.kv_precision import choose_kv_precision
from moe.memory.planning import planning
from moe.network.host_blocks import HostBlocks
from moe.network.kv_blocks import BlockKVCache, BlockPool
from moe.network.kv_cache import KVFormat
from moe.network.kv_policy import KVPolicy, SeenRow, seen_keys, turn
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.sequence import Delta, RunningSequence
from moe.settings import PrefillSettings
from moe.settings.profile import load_profile
from routing import Phase

NATIVE, WHY = choose_kernel()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=WHY)
NAMES = ("window", "select")
IDS = [(7 * i * i + 3 * i) % 57 + 3 for i in range(700)]
LOSSY = {"lossless": False, "memory.kv_bits": 16, "memory.kv_tokens": 8192}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("models"), tiny_config("qwen3_moe")
    config.max_position_embeddings = 2048
    tiny_model("qwen3_moe", config=config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[MoE]:
    with MoE.from_pretrained(checkpoint, LOSSY) as loaded:
        yield loaded


def pool_of(model: MoE, spec: str | None, bits: int = 16) -> BlockPool:
    """Lets the model keep its keys and values under a policy from now on, and forget others."""
    assert NATIVE is not None
    prefixes = model.engine().scheduler.prefixes
    while prefixes is not None and prefixes.evict():
        pass
    policy = None if spec is None else KVPolicy.of(spec)
    form = KVFormat.of_bits(bits, bounds=policy is not None and policy.selects)
    assert model.backbone.blocks is not None
    pool = BlockPool(HostBlocks(NATIVE.kv, form), model.backbone.blocks.windows, policy)
    model.backbone.blocks = pool
    return pool


def blocks_of(kept: KVPolicy, position: int) -> list[int]:
    row = kept.row(BLOCK, position)
    assert row is not None
    assert row.blocks is not None
    return [int(block) for block in row.blocks]


def test_a_window_keeps_the_first_block_and_the_last_ones() -> None:
    kept = KVPolicy.of("window:256")
    assert blocks_of(kept, 3 * BLOCK) == [0, 1, 2, 3]
    assert blocks_of(kept, 6 * BLOCK + 1) == [0, 4, 5, 6]
    assert blocks_of(kept, 9 * BLOCK - 1) == [0, 6, 7, 8]
    assert kept.given_up(BLOCK, 9 * BLOCK).tolist() == [1, 2, 3, 4, 5, 6]
    given_up = [set(kept.given_up(BLOCK, at * BLOCK).tolist()) for at in range(20)]
    assert all(some <= more for some, more in pairwise(given_up))
    assert not given_up[3]


def test_a_choice_has_the_best_bounds() -> None:
    """The oracle, beside a search through all keys; sums of turned rows are those of plain ones."""
    query, keys = torch.randn(4, 16), torch.randn(2, 9 * BLOCK + 5, 16)
    keys[1, 3 * BLOCK + 7] = 20 * query[2]
    keys[0, 5 * BLOCK] = 20 * query[1]
    for turned in (False, True):
        places = seen_keys(SeenRow(None, 10, 4, 2), query, keys, turned=turned)
        blocks = (places[:, ::BLOCK] // BLOCK).tolist()
        assert blocks == [[0, 5, 8, 9], [0, 3, 8, 9]]
        assert places.shape == (2, 3 * BLOCK + 5)
    assert torch.allclose(turn(query) @ turn(keys).mT, query @ keys.mT, atol=1e-3)
    assert torch.allclose(turn(turn(query)), query, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_compiled_steps_attend_to_what_a_policy_leaves(
    tiny_moe: Callable[[str], MoE], model_type: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside transformers' forward over the same keys; layers with windows keep theirs."""
    model = tiny_moe(model_type)
    monkeypatch.setattr(model.backbone, "blocks", model.backbone.blocks)  # other tests use it
    check_views(model.backbone)
    pool = pool_of(model, f"{name}:4096")
    gap = float(prove_policy(model.backbone, pool).split("difference ")[1].rstrip(")"))
    assert gap < 1e-4
    assert model.backbone.blocks is pool


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_steps_choose_by_the_keys_that_are_stored(model: MoE, bits: int) -> None:
    """Read whole, or in parts that end within blocks, or written by decode steps."""
    pool_of(model, "select:256", bits)
    found: list[Tensor] = []
    with torch.inference_mode():
        for cuts in ([600], [100, 64, 500], [590]):
            cache, at = model.backbone.new_cache(1000), 0
            assert isinstance(cache, BlockKVCache)
            for cut in cuts:
                read(model, cache, IDS[at : min(at + cut, 600)], "prefill")
                at = min(at + cut, 600)
            cache.prompt_read()
            for token in IDS[at:650]:
                last = read(model, cache, [token], "decode")
            found.append(last)
            keys = turn(cache.read(0, 640)[0]) if bits < 16 else cache.read(0, 640)[0]
            shape, form = cache.shapes[0], KVFormat.of_bits(bits)
            rows = cache.stored_block(9).rows[0][BLOCK * form.token_bytes(*shape) :]
            bounds = rows.clone().view(torch.float32).view(shape.heads, 2, shape.key_size)
            whole = keys[0, :, 9 * BLOCK :]
            assert torch.allclose(bounds[:, 0], whole.amax(1), atol=1e-5)
            assert torch.allclose(bounds[:, 1], whole.amin(1), atol=1e-5)
    assert torch.equal(found[0], found[1])


def read(model: MoE, cache: object, ids: list[int], phase: Phase) -> Tensor:
    lanes = model.backbone.lanes([Work(ids, cache)], phase)  # type: ignore[arg-type]
    run_lanes(lanes, model.experts.run)
    return lanes[0].result()[0]


def answers(
    model: MoE, prompts: list[list[int]], *, chunk: int | None = None, preempt: bool = False
) -> list[list[tuple[int, float | None]]]:
    """Of each prompt 90 tokens with their log probabilities.

    Args:
        chunk: prompts are read in parts of so many tokens.
        preempt: the last one gives way in between, and is read again.
    """
    params = SamplingParams(max_new_tokens=90, temperature=0.0, ignore_eos=True, logprobs=0)
    engine, pool = model.engine(), model.backbone.blocks
    if chunk is not None:
        engine.scheduler.prefill = PrefillSettings(mode="chunked", chunk_tokens=chunk)
        engine.scheduler._choose_mode = None
    groups = [model.request(prompt, params) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    found: dict[RunningSequence, list[tuple[int, float | None]]] = {}
    while not engine.idle:
        for sequence, event in engine.step():
            assert isinstance(event, Delta)
            token = event.token
            found.setdefault(sequence, []).append((token.id, token.logprob))
        running = engine.scheduler.running
        if preempt and len(running) == len(prompts) and len(running[-1].token_ids) == 70:
            while len(engine.scheduler.running) == len(prompts):  # known prefixes go first
                assert engine.scheduler._preempt()
            preempt = False
        assert pool is not None
        assert pool.held_tokens <= engine.scheduler.num_used_tokens() + 2 * BLOCK * len(prompts)
    assert not preempt
    return [found[group.sequences[0]] for group in groups]


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_that_keeps_all_changes_no_bit(model: MoE, name: str) -> None:
    pool_of(model, None)
    plain = answers(model, [IDS[:300]])
    pool_of(model, f"{name}:1024")
    assert answers(model, [IDS[:300]]) == plain
    pool_of(model, f"{name}:256")
    assert answers(model, [IDS[:300]]) != plain


@pytest.mark.parametrize("name", NAMES)
def test_neither_company_nor_preemption_nor_cuts_change_a_bit(model: MoE, name: str) -> None:
    """What a token attends to follows from its prompt and its position."""
    prompts = [IDS[:500], IDS[100:430], IDS[50:120]]
    pool_of(model, f"{name}:256")
    alone = [answers(model, [prompt])[0] for prompt in prompts]
    assert answers(model, prompts) == alone
    assert answers(model, prompts[:2], preempt=True) == alone[:2]
    assert answers(model, prompts[:1], chunk=90) == alone[:1]


@pytest.mark.parametrize("name", NAMES)
def test_memory_that_is_given_up_is_free(model: MoE, name: str) -> None:
    """A sequence holds what it may attend to and a little more; the prefix cache keeps prompts
    whole and takes no other sequence."""
    params = SamplingParams(max_new_tokens=3 * BLOCK, temperature=0.0, ignore_eos=True)
    pool, engine = pool_of(model, f"{name}:256"), model.engine()
    group = model.request(IDS[:600], params)
    engine.submit(group)
    assert engine.scheduler.prefixes is not None
    while not engine.idle:
        sequence = group.sequences[0]
        if len(sequence.token_ids) == 3 * BLOCK - 1:
            cache = sequence.cache
            assert isinstance(cache, BlockKVCache)
            while engine.scheduler.prefixes.evict():
                pass
            plan = replace(model.memory_plan, kv_policy=pool.policy)
            length = -(-cache.length // BLOCK) * BLOCK
            planned = plan.kv_bytes(length) / plan.kv_bytes_per_token
            assert pool.held_tokens == planned == (length if name == "select" else 256 + BLOCK)
            assert cache.whole == (name == "select")
            assert cache.longest_fork(600) == (600 if name == "select" else 0)
            assert cache.held_tokens <= pool.held_tokens
        engine.step()
    first = group.sequences[0].token_ids
    for _ in range(2):  # from the prefix cache
        again = model.request(IDS[:600], params)
        engine.submit(again)
        finish(engine)
        assert again.sequences[0].token_ids == first
    assert again.sequences[0].num_cached_tokens >= 512
    del cache
    assert pool.held_tokens <= engine.scheduler.prefixes.num_tokens + BLOCK


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_system_gets_back_what_is_given_up() -> None:
    """Resident memory falls: the allocator alone would keep holes between blocks."""
    assert NATIVE is not None
    memory = HostBlocks(NATIVE.kv, KVFormat.of_bits(32))
    cache = BlockPool(memory, None, KVPolicy.of("window:256")).new_cache(51 * BLOCK)
    rows, before = torch.randn(2, 1, 4, BLOCK, 128), resident_bytes()
    for at in range(51):
        if at == 50:
            whole = resident_bytes() - before
            cache.prompt_read()
        for layer in range(8):
            cache.write(layer, *rows)
        cache.length += BLOCK
    held = cache.held_tokens * cache.token_bytes
    assert held == 5 * BLOCK * 8 * 4096
    assert resident_bytes() - before < held + 0.2 * whole


def test_the_plan_prices_policies(checkpoint: Path) -> None:
    """Of any policy, whatever the profile has: what its sequences hold, and what a step reads."""
    found = {}
    for spec in (None, "window:256", "select:256"):
        profile = load_profile(overrides=LOSSY | {"memory.kv_policy": spec}).profile
        with planning(checkpoint, profile, torch.device("cpu"), lambda _: None) as planned:
            assert planned.memory.as_dict()["kv_policy"] == spec
            if spec is None:
                assert policy_prices(planned) == []  # 2,048 tokens of context are no more than kept
            else:
                found[spec] = policy_prices(planned)
    assert found["window:256"] == found["select:256"]
    rows = {(one.context, one.policy): one for one in found["window:256"]}
    assert {context for context, _ in rows} == {1024, 2048}
    assert {policy for _, policy in rows} == {None, "window:256", "select:256"}
    each = rows[2048, None].held_bytes // 2048
    window, select = rows[2048, "window:256"], rows[2048, "select:256"]
    assert (window.held_tokens, window.held_bytes, window.step_bytes) == (
        256 + BLOCK, (256 + BLOCK) * each, 256 * each
    )  # fmt: skip
    bounds = select.held_bytes // 2048 - each
    assert bounds > 0
    assert select.held_tokens == 2048
    assert select.step_bytes == 256 * (each + bounds) + (2048 - 256) * bounds


def test_a_policy_lets_answers_grow(model: MoE) -> None:
    """Behind a prompt that fits, a sequence of any length does."""
    plan = replace(model.memory_plan, kv_policy=KVPolicy.of("window:256"))
    assert plan.longest_sequence(1000) == 1000
    assert plan.longest_sequence(1000, 800) == ANY_LENGTH
    assert plan.longest_sequence(1000, 900) == 1000
    assert replace(plan, kv_policy=None).longest_sequence(1000, 100) == 1000


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_bit(model: MoE, name: str, checkpoint: Path) -> None:
    """Each row of a step attends to what it would alone."""
    pool_of(model, f"{name}:256")
    plain = answers(model, [IDS[:500]])
    settings = LOSSY | {"speculation.mode": "ngram", "memory.kv_policy": f"{name}:256"}
    with MoE.from_pretrained(checkpoint, settings) as drafting:
        assert drafting.status()["keys_and_values"]["policy"] == f"{name}:256"
        assert answers(drafting, [IDS[:500]]) == plain


def test_a_cancelled_sequence_frees_all(model: MoE) -> None:
    pool, engine = pool_of(model, "window:256"), model.engine()
    group = model.request(IDS, SamplingParams(max_new_tokens=200, ignore_eos=True, n=2))
    engine.submit(group)
    while not group.sequences[0].token_ids:
        engine.step()
    for _ in range(5):
        engine.step()
    engine.cancel(group)
    assert engine.scheduler.prefixes is not None
    while engine.scheduler.prefixes.evict():
        pass
    assert pool.held_tokens == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("windows:512", "must be NAME:TOKENS, NAME one of window, select"),
        ("window:192", "a multiple of 64, 256 or more"),
        ("select:1000", "a multiple of 64, 256 or more"),
        ("select", "as in select:2048"),
        ("", "must be NAME:TOKENS"),
        ("select:512 ", "as in select:2048"),
    ],
)
def test_a_policy_is_written_exactly(spec: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(overrides={"lossless": False, "memory.kv_policy": spec})


def test_lossless_refuses_policies() -> None:
    assert load_profile(overrides={"memory.kv_policy": None}).profile.memory.kv_policy is None
    with pytest.raises(ProfileError, match="select:512 leaves out keys and values, which lossless"):
        load_profile(overrides={"memory.kv_policy": "select:512"})


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        ("deepseek_v3", {}, "it computes with all keys before it attends"),
        ("qwen3_moe", {"engine.fused": "off"}, "engine.fused is off"),
        ("qwen3_moe", {"speculation.contrast": 0.5, "speculation.mode": "off"}, "of its own"),
        ("llama4_text", {}, "some layers see chunks of tokens"),
    ],
)
def test_a_policy_without_effect_is_refused(
    tiny_checkpoint: Callable[[str], Path], model_type: str, settings: dict[str, object], why: str
) -> None:
    settings |= LOSSY | {"memory.kv_policy": "window:512"}
    with pytest.raises(
        ProfileError, match=f"memory.kv_policy is window:512.*{why}.*kv_policy: nul"
    ):
        MoE.from_pretrained(tiny_checkpoint(model_type), settings)


def test_gpus_refuse_policies() -> None:
    profile = load_profile(overrides=LOSSY | {"memory.kv_policy": "window:512"}).profile
    kv = choose_kv_precision(profile, torch.device("cuda"), torch.bfloat16, quantized=True)
    assert kv.policy is None
    message = (
        r"memory\.kv_policy is window:512, and decode steps attend to all that their layers see: "
        r"on cuda, they read every block that a sequence lists; set memory\.kv_policy: null"
    )
    with pytest.raises(ProfileError, match=message):
        _check_policy(profile, kv)


def test_eval_prices_a_policy(model: MoE) -> None:
    """By decode steps: prompts are read with attention to all."""
    pool = pool_of(model, "select:256")
    price = price_kv_policy(model, [*IDS, *IDS[::-1]])
    assert price is not None
    assert 0 < abs(price - 1) < 0.1
    assert model.backbone.blocks is pool
    assert price_kv_policy(model, IDS) is None  # fewer than four times 256 tokens
    pool_of(model, None)
    assert price_kv_policy(model, [*IDS, *IDS]) is None
