"""Lossy policies on keys and values: what steps attend to, what is freed, what changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams
from moe.commands.plan.contexts import policy_prices
from moe.decode.proof import prove_policy
from moe.describe.attention import check_views
from moe.errors import ProfileError
from moe.kv.blocks import BlockKVCache
from moe.kv.visibility import SeenRow, seen_keys, turn
from moe.loader import _check_policy
from moe.memory.kv_precision import choose_kv_precision
from moe.memory.planning import planning
from moe.settings.profile import load_profile
from tests.amounts import deep_except
from tests.methods.kv_cases import (
    IDS,
    LOSSY,
    NAMES,
    NATIVE,
    WHY,
    answers,
    checkpoint,
    finish,
    model,
    pool_of,
    spec_of,
)

__all__ = ["checkpoint", "model"]

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason=WHY),
    pytest.mark.skipif(not NAMES, reason="no method brings a policy"),
]
SPEC = spec_of(NAMES[0], 512) if NAMES else ""


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


@pytest.mark.skipif(len(NAMES) < 3, reason="a method is not there")
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


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_bit(model: MoE, name: str, checkpoint: Path) -> None:
    """Each row of a step attends to what it would alone."""
    pool_of(model, spec_of(name, 256))
    plain = answers(model, [IDS[:500]])
    settings = LOSSY | {"speculation.mode": "ngram", "memory.kv_policy": spec_of(name, 256)}
    with MoE.from_pretrained(checkpoint, settings) as drafting:
        assert drafting.status()["keys_and_values"]["policy"] == spec_of(name, 256)
        assert answers(drafting, [IDS[:500]]) == plain


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("windows:512", f"must be NAME:TOKENS, NAME one of .*{NAMES[0] if NAMES else ''}"),
        (f"{SPEC}:0", "or null; moe methods says what each is, and what may follow TOKENS"),
        (f"{SPEC}:", "must be NAME:TOKENS"),
        (f"{SPEC} ", "must be NAME:TOKENS"),
        (SPEC.replace("512", "192"), "a multiple of 64, 256 or more"),
        (SPEC.replace("512", "1000"), "a multiple of 64, 256 or more"),
        (SPEC.partition(":")[0], "must be NAME:TOKENS"),
        ("", "must be NAME:TOKENS"),
    ],
)
def test_a_policy_is_written_exactly(spec: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(overrides={"lossless": False, "memory.kv_policy": spec})


def test_lossless_refuses_policies() -> None:
    assert load_profile(overrides={"memory.kv_policy": None}).profile.memory.kv_policy is None
    with pytest.raises(ProfileError, match=f"{SPEC} leaves out keys and values, which lossless"):
        load_profile(overrides={"memory.kv_policy": SPEC})


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        ("deepseek_v3", {}, "it computes with all keys before it attends"),
        ("qwen3_moe", {"engine.fused": "off"}, "engine.fused is off"),
        ("llama4_text", {}, "some layers see chunks of tokens"),
    ],
)
def test_a_policy_without_effect_is_refused(
    tiny_checkpoint: Callable[[str], Path], model_type: str, settings: dict[str, object], why: str
) -> None:
    settings |= LOSSY | {"memory.kv_policy": SPEC}
    with pytest.raises(ProfileError, match=f"memory.kv_policy is {SPEC}.*{why}.*kv_policy: nul"):
        MoE.from_pretrained(tiny_checkpoint(model_type), settings)


def test_gpus_refuse_policies() -> None:
    profile = load_profile(overrides=LOSSY | {"memory.kv_policy": SPEC}).profile
    kv = choose_kv_precision(profile, torch.device("cuda"), torch.bfloat16, quantized=True)
    assert kv.policy is None
    message = (
        rf"memory\.kv_policy is {SPEC}, and decode steps attend to all that their layers see: "
        r"on cuda, they read every block that a sequence lists; set memory\.kv_policy: null"
    )
    with pytest.raises(ProfileError, match=message):
        _check_policy(profile, kv)
