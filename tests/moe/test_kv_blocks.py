"""Keys and values in blocks: forks, cuts and precisions change nothing that they should not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK, NativeKV
from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.errors import RequestError
from moe.kv.block_codec import BlockError, decode_block, encode_block
from moe.kv.blocks import BlockKVCache, BlockPool
from moe.kv.device_blocks import DeviceBlocks
from moe.kv.host_blocks import BlockPages, HostBlocks
from moe.kv.layout import KVFormat, LayerKey, Shape
from moe.kv.ledger import ALL, Windows
from moe.kv.visibility import HeadsOfLayers, RowVisibility, SeenRow
from moe.loader import load_model
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.settings.profile import load_profile

NATIVE, WHY = choose_kernel()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=WHY)
CAPACITY = 5 * BLOCK
LAYERS: dict[int, Shape] = {0: Shape(2, 8, 4), 3: Shape(1, 16, 16)}
WINDOW = 20
INDEXER = ("indexer", 3)


class CanaryBlocks(HostBlocks):
    """Memory that nobody has written is NaN, so that it shows when it is read; so is that of
    blocks which have been given back, and stays readable."""

    def __init__(self, kernel: NativeKV, form: KVFormat) -> None:
        super().__init__(kernel, form)
        self._freed: list[object] = []

    def new_piece(self, shapes: Mapping[LayerKey, Shape]) -> BlockPages:
        piece = super().new_piece(shapes)
        piece.memory.fill_(0xFF)
        return piece

    def give_back(self, number: int) -> None:
        self._freed.append(self._pieces[number])
        for piece in self._pieces[number]:
            piece.memory.fill_(0xFF)
        super().give_back(number)

    def give_part_back(self, number: int, heads: HeadsOfLayers) -> None:
        super().give_part_back(number, heads)
        for piece in self._pieces.get(number, ()):
            for layer, own in heads:
                for layer_heads in _heads_of(piece, self.form, layer):
                    layer_heads[list(own)] = 0xFF


def _heads_of(piece: BlockPages, form: KVFormat, layer: int) -> list[Tensor]:
    """``(N, bytes)`` of keys and of values; none where a piece does not have the layer."""
    if layer not in piece.begins:
        return []
    heads, *sizes = dict(piece.shapes)[layer]
    bytes_each = [BLOCK * row.row_bytes(n) for row, n in zip(form[:2], sizes, strict=True)]
    rows = piece.memory[piece.begins[layer] :][: heads * sum(bytes_each)]
    return [part.view(heads, -1) for part in rows.split([heads * each for each in bytes_each])]


class CanaryDeviceBlocks(DeviceBlocks):
    """The same; a block that is given back forgets what it had."""

    def give_back(self, number: int) -> None:
        for _, rows in self._layers.values():
            rows[number] = torch.nan
        super().give_back(number)


class SomeHeads(RowVisibility):
    """A rule by which some heads see the first block and the last one."""

    name, by_heads = "some", True

    def row(self, prompt: int, position: int) -> SeenRow | None:
        raise AssertionError("nothing is attended to here")

    def given_up(self, prompt: int, position: int) -> np.ndarray:
        return np.arange(1, max(1, position // BLOCK), dtype=np.int32)


class Sequences(RuleBasedStateMachine):
    """Sequences that grow, fork and end, beside lists of the rows that they should have."""

    @initialize(
        bits=st.sampled_from([32, 16, 8, 4, None]),
        window=st.booleans(),
        by_heads=st.booleans(),
        shapes=st.integers(0, 2),
    )
    def begin(self, bits: int | None, window: bool, by_heads: bool, shapes: int) -> None:
        """Layer 3 sees a window of few tokens, or all of them. By heads: one of layer 0 keeps all,
        others what a policy leaves. Without bits: as on a GPU. Of some layers the shapes are known
        before they are written."""
        assert NATIVE is not None
        self.windows = {3: WINDOW} if window and bits is not None else {}
        self.policy: RowVisibility | None = None
        if by_heads and bits is not None:
            heads = ((0, (1,)), *(() if self.windows else ((3, (0,)),)))
            self.policy = SomeHeads(2 * BLOCK, heads, 0.4)
        self.told: list[BlockKVCache] = []
        form = KVFormat.of_bits(bits or 32)
        sizes = {layer: form.token_bytes(*shape) for layer, shape in LAYERS.items()}
        if bits is None:
            self.pool = BlockPool(CanaryDeviceBlocks(torch.device("cpu"), torch.float32, 150))
        else:
            windows = Windows.of(self.windows, sizes)
            known = dict(list(LAYERS.items())[:shapes])
            memory = CanaryBlocks(NATIVE.kv, form)
            self.pool = BlockPool(memory, windows, self.policy, known)
        self.known: list[tuple[BlockKVCache, list[float]]] = []
        self.next = 1.0

    @rule()
    def new(self) -> None:
        self.known.append((self.pool.new_cache(CAPACITY), []))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), count=st.sampled_from([1, 1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 3]))
    def write(self, data: st.DataObject, count: int) -> None:
        cache, rows = data.draw(st.sampled_from(self.known))
        count = min(count, CAPACITY - len(rows))
        if not count:
            return
        values = [self.next + i for i in range(count)]
        self.next = (self.next + count) % 97 + 1
        self._put(cache, values)
        cache.length += count
        rows += values

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def write_and_take_back(self, data: st.DataObject) -> None:
        """As drafts that were refused, or a cancelled pass."""
        cache, rows = data.draw(st.sampled_from(self.known))
        if len(rows) < CAPACITY:
            self._put(cache, [-5.0] * min(3, CAPACITY - len(rows)))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, rows = data.draw(st.sampled_from(self.known))
        length = cache.longest_fork(data.draw(st.integers(0, len(rows))))
        before = self.pool.held_tokens
        self.known.append((cache.fork(CAPACITY, length), rows[:length]))
        assert self.pool.held_tokens - before <= BLOCK + 1e-6  # what is shared is not copied

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Whole blocks, as bytes, to a sequence that goes on with them: as from a disk."""
        cache, rows = data.draw(st.sampled_from(self.known))
        if not cache.whole:
            return
        moved = self.pool.new_cache(CAPACITY)
        ids = [int(row) for row in rows]
        for begin in range(0, len(rows) // BLOCK * BLOCK, BLOCK):
            part = ids[begin : begin + BLOCK]
            content = b"".join(encode_block(cache.stored_block(begin // BLOCK), part))
            assert moved.append_block(decode_block(content, part))
            with pytest.raises(BlockError, match="holds other tokens"):
                decode_block(content, [0, *part[1:]])
        assert moved.length == len(rows) // BLOCK * BLOCK
        self.known.append((moved, rows[: moved.length]))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), kept=st.booleans())
    def keep(self, data: st.DataObject, kept: bool) -> None:
        """As the prefix cache does."""
        data.draw(st.sampled_from(self.known))[0].keep(kept)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), keeps=st.booleans())
    def keep_all(self, data: st.DataObject, keeps: bool) -> None:
        """As while a prompt is read."""
        data.draw(st.sampled_from(self.known))[0].keep_all(keeps)

    @precondition(lambda self: self.known and self.policy)
    @rule(data=st.data())
    def prompt_read(self, data: st.DataObject) -> None:
        """The policy holds for what follows."""
        cache, _ = data.draw(st.sampled_from(self.known))
        cache.prompt_read()
        self.told.append(cache)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ended = data.draw(st.sampled_from(self.known))
        self.known.remove(ended)
        self.told = [cache for cache in self.told if cache is not ended[0]]
        del ended
        gc.collect()

    def _there(self, cache: BlockKVCache, layer: int, head: int, length: int) -> Tensor:
        """``(length,)`` bool: tokens whose rows a sequence must have."""
        there = torch.ones(length, dtype=torch.bool)
        if layer in self.windows:
            there[: max(length - WINDOW - 15, 0)] = False  # 15 may be cut
        policy = self.policy if any(cache is told for told in self.told) else None
        if policy is not None and head in dict(policy.heads).get(layer, ()):
            for block in policy.given_up(0, length):
                there[block * BLOCK : (block + 1) * BLOCK] = False
        return there

    @invariant()
    def every_sequence_has_its_rows(self) -> None:
        for cache, rows in getattr(self, "known", []):
            if not rows:
                continue
            for layer, shape in LAYERS.items():
                there = [self._there(cache, layer, n, len(rows)) for n in range(shape.heads)]
                for all_rows, size in zip(cache.read(layer, len(rows)), shape[1:], strict=True):
                    expected = _rows(rows, shape.heads, size)
                    assert all_rows.isfinite().all() or self.told
                    for own, wanted, seen in zip(all_rows[0], expected[0], there, strict=True):
                        gap = (own[seen] - wanted[seen]).abs().max()
                        assert gap <= 0.15 * expected.abs().max()
            assert cache.read(INDEXER, len(rows))[0].flatten().tolist() == rows

    @invariant()
    def blocks_are_those_that_are_listed(self) -> None:
        if hasattr(self, "pool"):
            caches = [cache for cache, _ in self.known]
            shares = self.pool.shares.items()
            held = sum(share * len(_listed(caches, group)) for group, share in shares)
            assert self.pool.held_tokens == pytest.approx(BLOCK * held)

    @invariant()
    def every_block_counts_once_and_first_for_what_is_kept(self) -> None:
        caches = [cache for cache, _ in getattr(self, "known", [])]
        kept = [cache for cache in caches if cache._lists[ALL].kept]
        for some in (caches, kept):
            listed = {group: len(_listed(some, group)) for group in self.pool.shares}
            for group, count in listed.items():
                holders = [cache._lists[group] for cache in some]
                assert sum(len(holder.blocks) - holder.unpaid for holder in holders) == count
            counted = sum(BLOCK * len(cache.blocks) - cache.shared_tokens for cache in some)
            held = sum(BLOCK * self.pool.shares[group] * count for group, count in listed.items())
            assert held <= counted + 1e-6
            assert counted <= held + len(some)  # each is rounded up
        running = [cache for cache in caches if not cache._lists[ALL].kept]
        for group in self.pool.shares:
            lent = _listed(kept, group) & _listed(running, group)
            assert sum(cache._lists[group].lent for cache in kept) == len(lent)

    def _put(self, cache: BlockKVCache, values: list[float]) -> None:
        for layer, shape in LAYERS.items():
            keys, other = (_rows(values, shape.heads, size) for size in shape[1:])
            cache.write(layer, keys, other)
        keys = torch.tensor(values).view(1, 1, -1, 1)
        cache.write(INDEXER, keys, keys[..., :0])


def _listed(caches: list[BlockKVCache], group: int) -> set[int]:
    return {id(block) for cache in caches for block in cache._lists[group].held}


def _rows(values: list[float], heads: int, size: int) -> Tensor:
    """Rows that tell their token; none is constant, which turning would make too easy."""
    ramp = torch.linspace(0.5, 1.0, heads * size).view(1, heads, 1, size)
    return torch.tensor(values).view(1, 1, -1, 1) * ramp


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=6, stateful_step_count=20, deadline=None)


def pool_of(model: MoE, bits: int) -> BlockPool:
    """As a loaded model would have it with another precision."""
    assert NATIVE is not None
    assert model.backbone.pool is not None
    return BlockPool(HostBlocks(NATIVE.kv, KVFormat.of_bits(bits)), model.backbone.pool.windows)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_company_and_cuts_change_no_bit(
    tiny_checkpoint: Callable[[str], Path], model_type: str
) -> None:
    prompts = [[5, 9, 2] * 30, [7, 1] * 20, [3] * 70]
    with MoE.from_pretrained(tiny_checkpoint(model_type), memory={"kv_bits": 8}) as model:
        assert model.status()["keys_and_values"]["bits"] == 8

        def read(parts: list[list[list[int]]]) -> list[Tensor]:
            caches = [model.backbone.new_cache(128) for _ in parts]
            rows: list[list[Tensor]] = [[] for _ in parts]
            for at in range(max(map(len, parts))):
                own = [i for i, part in enumerate(parts) if at < len(part)]
                work = [Work(parts[i][at], caches[i], all_logits=True) for i in own]
                lanes = model.backbone.lanes(work, "prefill")
                run_lanes(lanes, model.experts.run)
                for i, found in zip(own, lanes[0].result(), strict=True):
                    rows[i].append(found)
            steps = [Work([4], cache) for cache in caches]
            lanes = model.backbone.lanes(steps, "decode")
            run_lanes(lanes, model.experts.run)
            last = lanes[0].result()
            return [torch.cat([*own, end]) for own, end in zip(rows, last, strict=True)]

        of_bits: list[Tensor] = []
        for bits in (8, 16, 4):
            if bits != 8:
                model.backbone.blocks = pool_of(model, bits)
            with torch.inference_mode():
                together = read([[prompt] for prompt in prompts])
                for other in (
                    [read([[prompt]])[0] for prompt in prompts],
                    read([[p[:17], p[17:]] for p in prompts]),
                ):
                    assert all(map(torch.equal, together, other)), bits
            of_bits.append(together[0])
        assert not torch.equal(of_bits[0], of_bits[1])
        assert not torch.equal(of_bits[0], of_bits[2])


def test_answers_are_those_of_float32_where_bits_are_enough(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    """The blocks themselves change no bit, and bf16 hardly any probability. Compiled layers read
    prompts from blocks only."""
    prompt, params = [5, 9, 2] * 40, SamplingParams(max_new_tokens=20, temperature=0.0)
    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory={"kv_bits": 32}) as model:
        model.backbone.prompt_forward = None
        blocks, found = pool_of(model, 16), model.logits(prompt)
        ids = model.generate([prompt], params)[0].token_ids
        model.backbone.blocks = None
        assert torch.equal(model.logits(prompt), found)
        assert model.generate([prompt], params)[0].token_ids == ids
        model.backbone.blocks = blocks
        halved = model.logits(prompt)
    assert 0 < (found - halved).abs().mean() < 0.05 * found.abs().mean()


def test_a_window_keeps_its_last_tokens_only(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Tokens are those of a model that keeps all, known prefixes and drafts included."""
    prompts = [[5, 9, 2] * 30, [7, 1, 3, 3] * 17]
    params = SamplingParams(max_new_tokens=150, temperature=0.0, ignore_eos=True)
    found: dict[bool, list[list[int]]] = {}
    most: dict[bool, float] = {}
    memory = {"kv_bits": 16, "kv_tokens": 4096}
    with MoE.from_pretrained(tiny_checkpoint("gpt_oss"), memory=memory) as model:
        pool, config = model.backbone.blocks, model.config
        assert pool is not None
        kinds = enumerate(config.layer_types)
        sliding = [layer for layer, kind in kinds if kind == "sliding_attention"]
        assert pool.windows.of_layer == dict.fromkeys(sliding, config.sliding_window)
        for windows in (True, False):
            if not windows:
                model.backbone.blocks = pool = BlockPool(pool.memory)
            engine, most[windows] = model.engine(), 0.0
            prefixes = engine.scheduler.prefixes
            assert prefixes is not None
            groups = [model.request(prompt, params) for prompt in prompts]
            for group in groups:
                engine.submit(group)
            while not engine.idle:
                engine.step()
                if len(groups[0].sequences[0].token_ids) == 100:  # as if others wanted the room
                    while prefixes.evict():
                        pass
                # Each sequence, running or kept, has a block that is not full.
                assert pool.held_tokens <= engine.scheduler.num_used_tokens() + 4 * BLOCK
                most[windows] = max(most[windows], pool.held_tokens)
            again = model.request([*prompts[0], *groups[0].sequences[0].token_ids[:9]], params)
            engine.submit(again)
            finish(engine)
            assert again.sequences[0].num_cached_tokens >= BLOCK
            found[windows] = [group.sequences[0].token_ids for group in (*groups, again)]
            while prefixes.evict():
                pass
            assert pool.held_tokens == 0, "a block leaks"
    assert found[True] == found[False]
    assert most[True] < 0.9 * most[False]


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def test_many_layers_take_no_more_room_in_tables() -> None:
    assert NATIVE is not None
    cache = BlockPool(HostBlocks(NATIVE.kv, KVFormat.of_bits(16))).new_cache(3 * BLOCK)
    rows = torch.randn(1, 1, 2 * BLOCK, 8)
    for layer in range(100):
        cache.write(layer, rows, rows)
    assert cache._tables.shape == (100, 2, 16)
    assert torch.equal(cache.read(99, 2 * BLOCK)[0], cache.read(0, 2 * BLOCK)[0])


@pytest.mark.parametrize("window", [0, WINDOW])
def test_moved_blocks_have_the_rows_and_no_others_are_taken(window: int) -> None:
    """They keep what is behind a window, as others may go on from there."""
    assert NATIVE is not None
    windows = Windows.of({3: window} if window else {}, {0: 1, 3: 1})
    memory = CanaryBlocks(NATIVE.kv, KVFormat.of_bits(32))
    pool, other = BlockPool(memory, windows), BlockPool(memory, windows)
    cache, moved = pool.new_cache(CAPACITY), other.new_cache(CAPACITY)
    cache.keep_all(True)
    rows = {layer: torch.randn(1, shape.heads, 3 * BLOCK, 16) for layer, shape in LAYERS.items()}
    for layer, own in rows.items():
        keys, values = (own[..., :size] for size in LAYERS[layer][1:])
        cache.write(layer, keys, values)
    cache.length = 3 * BLOCK
    for at in range(3):
        assert moved.append_block(cache.stored_block(at))
        assert other.held_tokens == (at + 1) * BLOCK == moved.length
    assert moved.whole
    for layer, own in rows.items():
        found = moved.read(layer, 3 * BLOCK)
        for part, size in zip(found, LAYERS[layer][1:], strict=True):
            assert torch.equal(part, own[..., :size])


def test_a_block_of_another_shape_is_not_taken() -> None:
    assert NATIVE is not None
    memory, rows = HostBlocks(NATIVE.kv, KVFormat.of_bits(16)), torch.randn(1, 2, BLOCK, 8)
    cache = BlockPool(memory).new_cache(BLOCK)
    cache.write(0, rows, rows)
    cache.length = BLOCK
    for shape, taken in ((Shape(2, 8, 8), True), (Shape(1, 8, 8), False)):
        own = BlockPool(memory, shapes={0: shape}).new_cache(BLOCK)
        assert own.append_block(cache.stored_block(0)) == taken


def test_a_full_pool_says_so_and_goes_on_when_a_sequence_ends() -> None:
    memory = DeviceBlocks(torch.device("cpu"), torch.float32, 2)
    pool, rows = BlockPool(memory), torch.randn(1, 1, 2 * BLOCK, 8)
    first, second = pool.new_cache(3 * BLOCK), pool.new_cache(BLOCK)
    first.write(0, rows, rows)
    with pytest.raises(MemoryError, match="all 2 blocks of keys and values on cpu are in use"):
        second.write(0, rows[:, :, :1], rows[:, :, :1])
    del first
    second.write(0, rows[:, :, :1], rows[:, :, :1])
    assert (second.held_tokens, pool.held_tokens) == (BLOCK, BLOCK)


def test_the_plan_knows_layers_with_windows_of_other_shapes(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    with MoE.from_pretrained(tiny_checkpoint("gemma4_text"), memory={"kv_bits": 16}) as model:
        assert model.backbone.blocks is not None
        assert model.memory_plan.kv_windows
        assert dict(model.memory_plan.kv_windows) == dict(model.backbone.blocks.windows.token_bytes)


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_the_plan_counts_what_sequences_hold(tmp_path: Path, model_type: str) -> None:
    """The smallest pool that takes a request gives the same answer, and never holds more; so do
    requests that preempt each other."""
    settings = {"memory.kv_bits": 16, "memory.prefix_tokens": 64}
    settings |= {"prefill.wave_tokens": 128, "prefill.chunk_tokens": 128}
    ids = [(7 * i * i + 3 * i) % 57 + 3 for i in range(900)]
    params = SamplingParams(max_new_tokens=80, temperature=0.0, ignore_eos=True)
    config = tiny_config(model_type)
    config.max_position_embeddings = 2048
    tiny_model(model_type, config=config).save_pretrained(tmp_path)
    with MoE.from_pretrained(tmp_path, settings) as model:
        pool, plan = model.backbone.blocks, model.memory_plan
        assert pool is not None
        assert dict(plan.kv_windows) == dict(pool.windows.token_bytes)
        assert bool(plan.kv_windows) == (model_type != "qwen3_moe")

        def answers(prompts: list[list[int]], kv_tokens: int) -> list[list[int]]:
            engine = model.engine()
            engine.scheduler.kv_tokens = kv_tokens
            groups = [model.request(prompt, params) for prompt in prompts]
            for group in groups:
                engine.submit(group)
            while not engine.idle:
                engine.step()
                assert engine.scheduler.num_used_tokens() <= kv_tokens
                room = 2 * BLOCK * len(groups)  # the last block of each, and the cached prefix's
                assert pool.held_tokens <= kv_tokens + room
                if engine.scheduler.running and len(prompts) == 1:
                    sequence = groups[0].sequences[0]
                    if len(sequence.token_ids) == BLOCK + 2:  # a block ago it has let go
                        length = -(-(len(prompts[0]) + BLOCK + 2) // BLOCK) * BLOCK
                        planned = plan.kv_bytes(length) / plan.kv_bytes_per_token
                        assert pool.held_tokens == pytest.approx(planned, rel=0.03)
            return [group.sequences[0].token_ids for group in groups]

        if model_type == "gpt_oss":  # rank 0 does not know what another rank gives up
            shared = load_model(tmp_path, load_profile(settings).profile, ranks=2)
            assert shared.backbone.pool is not None
            assert shared.memory_plan.kv_windows == shared.backbone.pool.windows.token_bytes == {}
        parts = [ids, ids[:400], ids[400:800], ids[700:]]
        alone = [answers([part], 4096)[0] for part in parts]
        limit = pool.windows.held_tokens(len(ids) + 80, 128)
        assert len(ids) + 80 <= plan.longest_sequence(limit) < len(ids) + 80 + 2 * BLOCK
        assert answers([ids], limit)[0] == alone[0]
        with pytest.raises(RequestError, match=f"there is room for {limit - 1}"):
            answers([ids], limit - 1)
        tight = pool.windows.held_tokens(480, 128) + pool.windows.held_tokens(410, 128)
        assert answers(parts[1:], tight) == alone[1:]
