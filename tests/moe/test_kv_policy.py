"""Lossy policies on keys and values: what steps attend to, what is freed, what changes no bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams
from moe.calibration.files import (
    CALIBRATION_FOLDER,
    MANIFEST_FILE,
    CalibrationManifest,
    SavedRouterRule,
    fingerprint,
)
from moe.commands.calibrate.induction import measure_induction
from moe.commands.evaluate.scoring import price_kv_policy
from moe.commands.plan.contexts import policy_prices
from moe.decode.proof import prove_policy
from moe.describe.attention import check_views
from moe.engine.engine import Engine
from moe.errors import ProfileError
from moe.kv.blocks import BlockKVCache, BlockPool
from moe.kv.cache import KVFormat, Shape
from moe.kv.host_blocks import HostBlocks, kept_share
from moe.kv.visibility import KVPolicy, SeenRow, heads_without, seen_keys, turn
from moe.loader import _check_policy
from moe.loading.memory_plan import ANY_LENGTH
from moe.memory.kv_precision import KVPrecision, choose_kv_precision
from moe.memory.planning import planning
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.sequence import Delta, RunningSequence
from moe.settings import PrefillSettings
from moe.settings.profile import load_profile
from routing import Phase
from tests.amounts import deep_except

NATIVE, WHY = choose_kernel()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=WHY)
NAMES = ("window", "select", "heads")
IDS = [(7 * i * i + 3 * i) % 57 + 3 for i in range(700)]
LOSSY = {"lossless": False, "memory.kv_bits": 16, "memory.kv_tokens": 8192}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the heads' scores beside it, as `moe calibrate` leaves them."""
    path, config = tmp_path_factory.mktemp("models"), tiny_config("qwen3_moe")
    config.max_position_embeddings = 2048
    tiny_model("qwen3_moe", config=config).save_pretrained(path)
    heads = Shape(config.num_key_value_heads, 16, 16)
    write_scores(path, scores_of(dict.fromkeys(range(config.num_hidden_layers), heads)))
    return path


def write_scores(path: Path, induction: dict[int, tuple[float, ...]]) -> None:
    config = AutoConfig.from_pretrained(path)
    counts = (config.num_experts,) * config.num_hidden_layers
    rule = SavedRouterRule(top_k=2, score="softmax", groups=1, groups_kept=1, group_score="max")
    manifest = CalibrationManifest(
        model=fingerprint(config), architecture="?", text="none", tokens=1, vocabulary=1,
        num_experts=counts, rules=(rule,) * len(counts), unavailable={}, made_by={}, files={},
        induction=induction,
    )  # fmt: skip
    (path / CALIBRATION_FOLDER).mkdir(exist_ok=True)
    (path / CALIBRATION_FOLDER / MANIFEST_FILE).write_text(manifest.model_dump_json())


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
    assert model.backbone.blocks is not None
    windows, shapes = model.backbone.blocks.windows, shapes_of(model)
    seeing = {layer: own for layer, own in shapes.items() if layer not in windows.of_layer}
    policy = None if spec is None else KVPolicy.of(spec)
    kv = KVPrecision(bits, "asked for", True, policy, scores_of(seeing)).with_heads(shapes)
    pool = BlockPool(HostBlocks(NATIVE.kv, kv.form), windows, kv.policy, shapes)
    model.backbone.blocks = pool
    return pool


def spec_of(name: str, tokens: int) -> str:
    return f"{name}:{tokens}" + (":1" if name == "heads" else "")


@torch.inference_mode()
def shapes_of(model: MoE) -> dict[int, Shape]:
    cache = model.backbone.new_cache(BLOCK)
    assert isinstance(cache, BlockKVCache)
    read(model, cache, [7], "prefill")
    return {layer: shape for layer, shape in cache.shapes.items() if isinstance(layer, int)}


def scores_of(shapes: Mapping[int, Shape]) -> dict[int, tuple[float, ...]]:
    """Made up: the last head of the last layer looks up the most."""
    return {
        layer: tuple(layer + head / shape.heads for head in range(shape.heads))
        for layer, shape in shapes.items()
    }


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
@pytest.mark.parametrize("model_type", deep_except(["gpt_oss"], ["qwen3_moe", "gpt_oss"]))
def test_compiled_steps_attend_to_what_a_policy_leaves(
    tiny_moe: Callable[[str], MoE], model_type: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside transformers' forward over the same keys; layers with windows keep theirs."""
    model = tiny_moe(model_type)
    monkeypatch.setattr(model.backbone, "blocks", model.backbone.blocks)  # other tests use it
    check_views(model.backbone)
    pool = pool_of(model, spec_of(name, 4096))
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
    pool_of(model, spec_of(name, 1024))
    assert answers(model, [IDS[:300]]) == plain
    pool_of(model, spec_of(name, 256))
    assert answers(model, [IDS[:300]]) != plain


@pytest.mark.parametrize("name", NAMES)
def test_neither_company_nor_preemption_nor_cuts_change_a_bit(model: MoE, name: str) -> None:
    """What a token attends to follows from its prompt and its position."""
    prompts = [IDS[:500], IDS[100:430], IDS[50:120]]
    pool_of(model, spec_of(name, 256))
    alone = [answers(model, [prompt])[0] for prompt in prompts]
    assert answers(model, prompts) == alone
    assert answers(model, prompts[:2], preempt=True) == alone[:2]
    assert answers(model, prompts[:1], chunk=90) == alone[:1]


@pytest.mark.parametrize("name", NAMES)
def test_memory_that_is_given_up_is_free(model: MoE, name: str) -> None:
    """A sequence holds what it may attend to and a little more; the prefix cache keeps prompts
    whole and takes no other sequence."""
    params = SamplingParams(max_new_tokens=3 * BLOCK, temperature=0.0, ignore_eos=True)
    pool, engine = pool_of(model, spec_of(name, 256)), model.engine()
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
            assert pool.held_tokens == pytest.approx(planned, abs=1)
            assert pool.policy is not None
            share = {"select": 1.0, "window": 0.0, "heads": pool.policy.share}[name]
            assert (0.1 < share < 0.9) == (name == "heads")
            left = 256 + BLOCK + share * (length - 256 - BLOCK)
            assert pool.held_tokens == pytest.approx(left, abs=1e-6)
            assert cache.whole == (name == "select")
            assert cache.longest_fork(600) == (600 if name == "select" else 0)
            assert cache.held_tokens <= pool.held_tokens + 1
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
    for spec in (None, "window:256", "select:256", "heads:256:1"):
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
    assert found["heads:256:1"][:3] == found["window:256"][:3]  # behind the shorter context
    by_heads = found["heads:256:1"][-1]
    assert (by_heads.context, by_heads.policy) == (2048, "heads:256:1")
    assert window.held_bytes < by_heads.held_bytes < 2048 * each
    assert window.step_bytes < by_heads.step_bytes < by_heads.held_bytes


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
    pool_of(model, spec_of(name, 256))
    plain = answers(model, [IDS[:500]])
    settings = LOSSY | {"speculation.mode": "ngram", "memory.kv_policy": spec_of(name, 256)}
    with MoE.from_pretrained(checkpoint, settings) as drafting:
        assert drafting.status()["keys_and_values"]["policy"] == spec_of(name, 256)
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
        ("heads:512", "or heads:TOKENS:COUNT, COUNT key heads that keep all"),
        ("heads:512:0", "heads:TOKENS:COUNT"),
        ("heads:192:1", "a multiple of 64, 256 or more"),
        ("window:512:1", "must be NAME:TOKENS"),
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


@torch.inference_mode()
def test_steps_by_heads_are_those_of_masked_attention(
    model: MoE, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transformers' own forward over the whole text, where a mask says what each head sees of
    what lies before a token behind the prompt."""
    before = model.backbone.blocks
    pool = pool_of(model, "heads:256:2", 32)
    assert pool.policy is not None
    short = {(layer, head) for layer, own in pool.policy.heads for head in own}
    prompt, end = 600, 690
    position, key = torch.arange(end)[:, None], torch.arange(end)
    whole = key <= position
    window = whole & ((key < BLOCK) | (key >= (position // BLOCK - 256 // BLOCK + 2) * BLOCK))
    window[:prompt] = whole[:prompt]

    def attend(
        module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: object, **how: float
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        heads = [(module.layer_idx, head) for head in range(k.shape[1])]
        masks = torch.stack([window if head in short else whole for head in heads])
        scores = q @ k.repeat_interleave(group, 1).mT * how["scaling"]
        scores = scores.masked_fill(~masks.repeat_interleave(group, 0), -torch.inf)
        out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "masked_by_heads", attend)
    oracle = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="masked_by_heads"
    ).eval()
    expected = oracle(torch.tensor([IDS[:end]]), use_cache=False).logits[0, prompt:].float()
    cache = model.backbone.new_cache(700)
    assert isinstance(cache, BlockKVCache)
    read(model, cache, IDS[:prompt], "prefill")
    cache.prompt_read()
    found = [read(model, cache, [token], "decode") for token in IDS[prompt:end]]
    assert cache.dropped_tokens
    assert torch.allclose(torch.cat(found), expected, atol=2e-4)
    model.backbone.blocks = before


def test_heads_that_look_up_the_most_keep_all() -> None:
    induction = {2: (0.1, 0.5), 0: (0.5, 0.2), 5: (0.4,)}
    assert heads_without(induction, 1) == ((0, (1,)), (2, (0, 1)), (5, (0,)))
    assert heads_without(induction, 2) == ((0, (1,)), (2, (0,)), (5, (0,)))
    assert heads_without(induction, 4) == ((2, (0,)),)


def test_induction_scores_are_the_attention_to_what_followed_the_same_token(
    model: MoE, checkpoint: Path
) -> None:
    """Beside transformers' own attention weights, on the same random tokens."""
    found = measure_induction(model.backbone, model.experts.run, 256)
    oracle = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    total = [torch.zeros(len(own)) for own in found.values()]
    for _ in range(2):
        ids = torch.randint(oracle.config.vocab_size, (192,), generator=generator)
        with torch.inference_mode():
            own = oracle(torch.cat([ids, ids[:64]])[None], output_attentions=True).attentions
        for layer, weights in enumerate(own):
            echo = torch.stack([weights[0, :, 192 + t, t + 1] for t in range(64)]).mean(0)
            total[layer] += echo.view(len(found[layer]), -1).mean(1) / 2
    assert list(found) == list(range(oracle.config.num_hidden_layers))
    for layer, induction in found.items():
        assert torch.allclose(torch.tensor(induction), total[layer], rtol=0.01)  # keys in bf16
    assert measure_induction(model.backbone, model.experts.run, 128) == {}


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_a_part_is_freed_by_the_last_sequence_that_lists_it(bits: int) -> None:
    """Rows of heads that keep all stay, rows of others are there as long as a fork has them; of
    what is given up, whole pages read as zeros."""
    assert NATIVE is not None
    shape, form = Shape(4, 128, 128), KVFormat.of_bits(bits)
    shapes, given = dict.fromkeys(range(3), shape), ((0, (0, 1, 2, 3)), (1, (0, 1, 3)))
    share = kept_share(form, shapes, given)
    policy = KVPolicy("heads", 256, 2, given, share)
    pool = BlockPool(HostBlocks(NATIVE.kv, form), None, policy, shapes)
    cache = pool.new_cache(20 * BLOCK)
    for _ in range(10):
        for layer in shapes:
            cache.write(layer, *torch.randn(2, 1, 4, BLOCK, 128))
        cache.length += BLOCK
    before = [[rows.clone() for rows in cache.read(layer, 640)] for layer in shapes]
    fork = cache.fork(20 * BLOCK, 640)
    cache.prompt_read()
    cache.reserve(641)
    assert cache.dropped_tokens == int(6 * BLOCK * (1 - share))
    assert not cache.whole
    assert fork.whole
    for layer in shapes:
        for rows, old in zip(cache.read(layer, 640), before[layer], strict=True):
            assert torch.equal(rows, old)  # the fork's
    held = pool.held_tokens
    del fork
    assert pool.held_tokens == pytest.approx(held - 6 * BLOCK * (1 - share))
    freed = 0
    for layer in shapes:
        heads = [head for head in range(4) if head not in dict(given).get(layer, ())]
        for rows, old in zip(cache.read(layer, 640), before[layer], strict=True):
            assert torch.equal(rows[:, heads], old[:, heads])
            assert torch.equal(rows[:, :, :64], old[:, :, :64])
            assert torch.equal(rows[:, :, 7 * BLOCK :], old[:, :, 7 * BLOCK :])
            freed += int((rows != old).any(-1).sum())
    assert freed > 0.8 * 6 * BLOCK * 2 * 7
    del cache
    assert pool.held_tokens == 0


@pytest.mark.parametrize(
    ("induction", "spec", "ranks", "why"),
    [
        (None, "heads:512:1", 1, "has no calibration.json: run moe calibrate"),
        ({}, "heads:512:1", 1, "has not measured its key heads: run moe calibrate again"),
        ({0: (1.0,)}, "heads:512:1", 1, "is of other layers than the model's"),
        ({0: (1.0,) * 4}, "heads:512:1", 1, "attends with 4 key heads but keeps rows of 2"),
        ({0: (1.0, 0.5)}, "heads:512:2", 1, "2 key heads see all tokens: let fewer of them"),
        ({0: (1.0, 0.5)}, "heads:512:1", 2, "several ranks share the experts"),
    ],
)
def test_heads_that_are_not_known_are_refused(
    tmp_path: Path,
    induction: dict[int, tuple[float, ...]] | None,
    spec: str,
    ranks: int,
    why: str,
) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    if induction is not None:
        write_scores(tmp_path, induction)
    profile = load_profile(overrides=LOSSY | {"memory.kv_policy": spec}).profile
    with (
        pytest.raises(ProfileError, match=f"memory.kv_policy is {spec}, .*{why}"),
        planning(tmp_path, profile, torch.device("cpu"), lambda _: None, ranks),
    ):
        pass
