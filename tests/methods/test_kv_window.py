"""Windows of keys behind a prompt, for all key heads or some: what is seen, what is freed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from examples.models.tiny import tiny_model
from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams
from moe.errors import ProfileError
from moe.kv.blocks import BlockKVCache, BlockPool
from moe.kv.host_blocks import HostBlocks, kept_share
from moe.kv.layout import KVFormat, Shape
from moe.kv.visibility import RowVisibility, visibility
from moe.loading.memory_plan import ANY_LENGTH
from moe.memory.planning import planning
from moe.methods.kv_window.induction import measure_induction
from moe.methods.kv_window.policy import HeadWindow, Window, heads_without
from moe.settings.profile import load_profile
from tests.methods.kv_cases import (
    IDS,
    LOSSY,
    NATIVE,
    WHY,
    checkpoint,
    model,
    pool_of,
    read,
    write_scores,
)

__all__ = ["checkpoint", "model"]

pytestmark = pytest.mark.skipif(NATIVE is None, reason=WHY)


def blocks_of(kept: RowVisibility, position: int) -> list[int]:
    row = kept.row(BLOCK, position)
    assert row is not None
    assert row.blocks is not None
    return [int(block) for block in row.blocks]


def test_a_window_keeps_the_first_block_and_the_last_ones() -> None:
    kept = Window(256)
    assert blocks_of(kept, 3 * BLOCK) == [0, 1, 2, 3]
    assert blocks_of(kept, 6 * BLOCK + 1) == [0, 4, 5, 6]
    assert blocks_of(kept, 9 * BLOCK - 1) == [0, 6, 7, 8]
    assert kept.given_up(BLOCK, 9 * BLOCK).tolist() == [1, 2, 3, 4, 5, 6]
    given_up = [set(kept.given_up(BLOCK, at * BLOCK).tolist()) for at in range(20)]
    assert all(some <= more for some, more in pairwise(given_up))
    assert not given_up[3]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_system_gets_back_what_is_given_up() -> None:
    """Resident memory falls: the allocator alone would keep holes between blocks."""
    assert NATIVE is not None
    memory = HostBlocks(NATIVE.kv, KVFormat.of_bits(32))
    cache = BlockPool(memory, None, visibility("window:256")).new_cache(51 * BLOCK)
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


def test_a_policy_lets_answers_grow(model: MoE) -> None:
    """Behind a prompt that fits, a sequence of any length does."""
    plan = replace(model.memory_plan, kv_policy=visibility("window:256"))
    assert plan.longest_sequence(1000) == 1000
    assert plan.longest_sequence(1000, 800) == ANY_LENGTH
    assert plan.longest_sequence(1000, 900) == 1000
    assert replace(plan, kv_policy=None).longest_sequence(1000, 100) == 1000


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
    policy = HeadWindow(256, given, share, num_whole=2)
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


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("heads:512", "heads takes TOKENS and COUNT, the key heads that keep all, as in heads:512"),
        ("heads:512:1:2", "heads takes TOKENS and COUNT.*and got 512:1:2"),
        ("window:512:1", "window takes TOKENS alone, as in window:512, and got 512:1"),
    ],
)
def test_the_numbers_are_those_that_a_rule_takes(spec: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        visibility(spec)
