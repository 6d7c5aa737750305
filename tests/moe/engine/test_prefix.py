"""Known prefixes: found like a brute force would, kept within bounds, and never wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK as KV_BLOCK
from moe import MoE, SamplingParams
from moe.kv.blocks import BlockPool
from moe.kv.cache import KVCache
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.kv.prefix_cache import BLOCK, PrefixCache

NATIVE, WHY = choose_kernel()
GREEDY = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True)


def stored(token_ids: list[int]) -> KVCache:
    """A state whose keys are the token ids, so that a copy shows what it is a copy of."""
    kv = KVCache(len(token_ids))
    rows = torch.tensor(token_ids, dtype=torch.float32).view(1, 1, -1, 1)
    kv.write(0, rows, rows)
    kv.length = len(token_ids)
    return kv


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=4)), max_size=6),
    st.integers(0, 2),
    st.lists(st.integers(0, 1), max_size=4),
    st.integers(1, BLOCK),
)
def test_the_longest_known_prefix_is_found(
    known: list[tuple[int, list[int]]], salt: int, wanted: list[int], rest: int
) -> None:
    """Prompts are made of blocks of two kinds, so that they often begin alike."""
    cache = PrefixCache(10_000)
    for owner, kinds in known:
        ids = [kind for kind in kinds for _ in range(BLOCK)]
        if ids:
            cache.add(str(owner), ids, stored(ids))
    ids = [kind for kind in wanted for _ in range(BLOCK)] + [7] * rest
    expected = 0
    for owner, kinds in known:
        if owner == salt:
            same = 0
            while same < min(len(kinds), len(wanted)) and kinds[same] == wanted[same]:
                same += 1
            expected = max(expected, same)
    taken = cache.match(str(salt), ids, capacity=200)
    assert (taken.length if taken else 0) == expected * BLOCK
    if taken is not None:
        assert taken.read(0, taken.length)[0].flatten().tolist() == ids[: taken.length]


@pytest.mark.skipif(NATIVE is None, reason=WHY)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.integers(0, 9)), max_size=8),
    st.integers(2, 16),
    st.integers(1, 9),
)
def test_behind_windows_what_is_kept_is_found_and_counted(
    prompts: list[tuple[str, int, int]], room: int, longest_kept: int
) -> None:
    """Prompts begin alike, and go on from each other as those of an engine do; long ones give up
    what is behind windows while they are read."""
    assert NATIVE is not None
    pool = BlockPool(HostBlocks(NATIVE.kv, KVFormat.of_bits(32)), Windows.of({1: 20}, {0: 1, 1: 1}))
    cache = PrefixCache(room * KV_BLOCK, new_cache=pool.new_cache)
    for salt, blocks, common in prompts:
        ids = [int(at >= common * KV_BLOCK) for at in range(blocks * KV_BLOCK)]
        kv = cache.match(salt, [*ids, 7], len(ids)) or pool.new_cache(len(ids))
        kv.keep_all(blocks <= longest_kept)
        for begin in range(kv.length, len(ids), BLOCK):
            rows = torch.tensor(ids[begin : begin + BLOCK], dtype=torch.float32).view(1, 1, -1, 1)
            for layer in range(2):
                kv.write(layer, rows, rows)
            kv.length += BLOCK
        assert kv.read(0, kv.length)[0].flatten().tolist() == ids
        cache.add(salt, ids, kv)
        del kv
        assert pool.held_tokens <= cache.num_tokens <= pool.held_tokens + len(prompts)
        assert set(cache._index.values()) == set(cache._entries.values())
    while cache.evict():
        pass
    assert pool.held_tokens == 0
    assert not cache._index


def test_the_least_recently_used_makes_room() -> None:
    cache = PrefixCache(2 * BLOCK)
    first, second, third = ([kind] * BLOCK for kind in (1, 2, 3))
    cache.add("", first, stored(first))
    cache.add("", second, stored(second))
    assert cache.match("", [*first, 9], 99) is not None
    cache.add("", third, stored(third))
    assert cache.num_tokens == 2 * BLOCK
    assert cache.match("", [*second, 9], 99) is None
    assert cache.match("", [*first, 9], 99) is not None
    assert cache.match("", [*third, 9], 99) is not None
    assert cache.evictions == 1


def test_what_is_on_its_way_has_room_and_gives_way() -> None:
    cache, known = PrefixCache(4 * BLOCK), [1] * (2 * BLOCK)
    cache.add("", known, stored(known))
    room = cache.reserve(3 * BLOCK)
    assert room is not None
    assert cache.num_tokens == 3 * BLOCK, "the entry has made room"
    assert cache.reserve(2 * BLOCK) is None
    assert cache.evict()
    assert room.stop.is_set()
    assert cache.num_tokens == 0
    assert not cache.evict()
    assert not cache.release(room)
    other = cache.reserve(BLOCK)
    assert other is not None
    assert cache.release(other)
    assert cache.num_tokens == 0


def test_a_flood_under_one_salt_costs_that_salt() -> None:
    cache, kept = PrefixCache(10 * BLOCK), [1] * (4 * BLOCK)
    cache.add("calm", kept, stored(kept))
    for number in range(2, 50):
        prompt = [number] * (2 * BLOCK)
        cache.add("flood", prompt, stored(prompt))
    assert cache.num_cached("calm", [*kept, 0]) == 4 * BLOCK
    assert cache.num_cached("flood", [*prompt, 0]) == 2 * BLOCK
    assert cache.num_tokens == 10 * BLOCK


def test_what_goes_on_takes_the_place_of_its_beginning() -> None:
    """As the turns of a conversation do: memory holds the last one, and others."""
    cache = PrefixCache(4 * BLOCK)
    other, first = [2] * BLOCK, [1] * (BLOCK + 3)
    cache.add("", other, stored(other))
    cache.add("", first, stored(first))
    second = [*first, *[1] * BLOCK]
    cache.add("", second, stored(second))
    assert cache.num_tokens == len(other) + len(second)
    assert cache.num_cached("", [*first, 9]) == BLOCK
    assert cache.num_cached("", [*other, 9]) == BLOCK
    assert cache.evictions == 0


def test_what_is_dear_to_read_again_stays_longer() -> None:
    """From disk, a short prefix costs nearly as many experts as a long one."""
    long, short, new = [1] * (4 * BLOCK), [2] * BLOCK, [3] * (4 * BLOCK)
    for reread, stays in ((float, long), (lambda _: 1.0, short)):
        cache = PrefixCache(6 * BLOCK, reread=reread)
        for prompt in (short, long, new):
            cache.add("", prompt, stored(prompt))
        kept = [bool(cache.num_cached("", [*prompt, 9])) for prompt in (short, long, new)]
        assert kept == [stays is short, False, True]


def test_what_is_dear_ages_too() -> None:
    cache, dear = PrefixCache(6 * BLOCK, reread=lambda _: 1.0), [0] * BLOCK
    cache.add("", dear, stored(dear))
    for number in range(1, 20):
        cache.add("", [number] * (4 * BLOCK), stored([number] * (4 * BLOCK)))
    assert not cache.num_cached("", [*dear, 9])


def test_one_token_is_always_left_to_read() -> None:
    cache, ids = PrefixCache(100), [1] * BLOCK
    cache.add("", ids, stored(ids))
    assert cache.match("", ids, 99) is None


@pytest.mark.parametrize(("reuse", "cached"), [(False, 48), (True, 64)])
def test_the_next_turn_reads_the_answer_again_unless_it_may_be_kept(
    tiny_checkpoint: Callable[[str], Path], reuse: bool, cached: int
) -> None:
    memory = {"prefix_tokens": 500, "reuse_answers": reuse}
    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory=memory) as model:
        engine, said = model.engine(), list(range(10, 60))
        for turn in range(2):
            params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
            group = model.request(said, params)
            engine.submit(group)
            while not engine.idle:
                engine.step()
            sequence = group.sequences[0]
            assert sequence.num_cached_tokens == (cached if turn else 0)
            said += [*sequence.token_ids, 7, 8]


def test_a_repeated_prompt_is_read_once(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory={"prefix_tokens": 90})
    engine, prompt = model.engine(), list(range(10, 60))
    tokens_read = []
    for salt in ("a", "a", "b"):
        model.reset_stats()
        engine.submit(model.request(prompt, GREEDY, salt))
        while not engine.idle:
            engine.step()
        tokens_read.append(model.stats()["layers"][0]["tokens"])
    new = 4  # tokens read back while decoding
    assert tokens_read == [50 + new, 50 - 48 + new, 50 + new]
    counters = {"asked_tokens": 3 * 50, "hit_tokens": 48, "evictions": 1}
    held = {"held_tokens": 50}  # of the last one, once the first has made room
    assert engine.status()["prefixes"] == counters | held


def test_requests_that_arrive_together_read_a_common_prompt_once_and_hold_it_once(
    tmp_path: Path,
) -> None:
    """There is room for one of the 16 prompts, if each had memory of its own."""
    shared, own, new = 4096, 20, 5
    config = tiny_config("qwen3_moe")
    config.max_position_embeddings = 8192
    tiny_model("qwen3_moe", config=config).save_pretrained(tmp_path)
    memory = {"kv_tokens": shared + KV_BLOCK + 16 * (own + new), "prefix_tokens": shared + 800}
    with MoE.from_pretrained(tmp_path, memory=memory) as model:
        engine, common = model.engine(), [7 + at % 90 for at in range(shared)]
        for number in range(16):
            engine.submit(model.request([*common, *range(10 + number, 10 + number + own)], GREEDY))
        most_running, most_blocks = 0, 0
        pool = model.backbone.blocks
        assert pool is not None
        while not engine.idle:
            engine.step()
            running = len(engine.scheduler.running)
            most_running = max(most_running, running)
            most_blocks = max(most_blocks, int(pool.held_tokens) // KV_BLOCK)
            assert engine.scheduler.num_used_tokens() <= engine.kv_tokens
        read = model.stats()["layers"][0]["tokens"]
        assert read == shared + 16 * own + 16 * (new - 1)
        assert most_running == 16
        # The common prompt, and of each sequence and each cached prompt a last block.
        assert most_blocks <= shared // KV_BLOCK + 2 * 16


def test_the_room_of_samples_counts_their_prompt_once(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    memory = {"kv_tokens": 5 * KV_BLOCK, "prefix_tokens": 0}
    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory=memory) as model:
        prompt = [5] * (3 * KV_BLOCK)
        params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, n=8)
        assert len(model.generate([prompt], params)) == 8


def test_a_prompt_that_cannot_start_yet_evicts_nothing(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    """The first prompt is cached, too, and evicting it would free nothing while it runs."""
    memory = {"kv_tokens": 5 * KV_BLOCK, "prefix_tokens": 4 * KV_BLOCK}
    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory=memory) as model:
        engine, params = model.engine(), replace(GREEDY, max_new_tokens=40)
        prefixes = engine.scheduler.prefixes
        assert prefixes is not None
        running, chat, big = (
            model.request([kind] * (blocks * KV_BLOCK), params if kind == 5 else GREEDY)
            for kind, blocks in ((5, 2), (6, 1), (7, 3))
        )
        for group in (running, chat):
            engine.submit(group)
        while not chat.sequences[0].finish_reason:
            engine.step()
        engine.submit(big)
        while not running.sequences[0].finish_reason:
            assert not big.sequences[0].first_scheduled_ns
            assert not prefixes.evictions
            engine.step()
        while not engine.idle:
            engine.step()
        assert prefixes.evictions
