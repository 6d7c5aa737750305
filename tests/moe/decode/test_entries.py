"""Attention to entries that stand for several tokens each, beside the keys of a window."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from examples.models.tiny import tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.program import Space
from moe.decode.history import Indexer
from moe.decode.lower import operation_names
from moe.decode.program import Program
from moe.decode.recorder import Recorder, Value
from moe.decode.records import DescriptionRecords
from moe.decode.trace import Attends
from moe.decode.traced import TracedStep
from moe.describe.description import View
from moe.describe.own_layers import find_own_layers
from moe.kv.blocks import BlockPool
from moe.kv.cache import KVCache
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat
from moe.network.own_cache import OwnCache
from moe.network.packed_pass import Work

KERNEL, WHY_NOT = choose_kernel()
pytestmark = pytest.mark.skipif(KERNEL is None, reason="no C++ compiler")

ENTRIES, INDEX = ("entries", 0), ("index entries", 0)
SIZE, INDEX_SIZE, SCALE = 16, 8, 0.3


@dataclass(frozen=True)
class Case:
    """Sequences of some lengths, which each read some tokens in one step.

    Attributes:
        top_k: entries that an indexer chooses; 0: all are seen.
        bits: of keys and values.
    """

    heads: int
    rate: int
    window: int
    top_k: int
    sinks: bool
    bits: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    seed: int

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part of a token's row; every token has the entry that it would add."""
        return {
            "q": (1, self.heads, 1, SIZE), "k": (1, 1, 1, SIZE), "entry": (1, 1, SIZE),
            "index query": (3, INDEX_SIZE), "weights": (3,), "index entry": (1, 1, INDEX_SIZE),
            "sinks": (self.heads,),
        }  # fmt: skip

    def cut(self, row: Tensor) -> dict[str, Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self.parts.values()]
        pieces = zip(self.parts.items(), row.reshape(-1).split(sizes), strict=True)
        return {name: piece.view(shape) for (name, shape), piece in pieces}

    def rows(self, sequence: int) -> Tensor:
        """``(T, width)`` of all of a sequence's tokens, the new ones last."""
        generator = torch.Generator().manual_seed(self.seed + 7 * sequence)
        width = sum(torch.Size(shape).numel() for shape in self.parts.values())
        count = self.lengths[sequence] + self.new[sequence]
        return torch.randn(count, width, generator=generator)

    def cache(self, sequence: int) -> KVCache:
        """Of the tokens before the step."""
        assert KERNEL is not None
        cache = BlockPool(HostBlocks(KERNEL.kv, KVFormat.of_bits(self.bits))).new_cache(4000)
        parts = [self.cut(row) for row in self.rows(sequence)[: self.lengths[sequence]]]
        keys = torch.cat([part["k"] for part in parts], 2)
        cache.write(0, keys, keys)
        ends = parts[self.rate - 1 :: self.rate]
        for key, name, size in ((ENTRIES, "entry", SIZE), (INDEX, "index entry", INDEX_SIZE)):
            made = torch.cat([torch.empty(1, 0, size), *(part[name] for part in ends)], 1)
            cache.write_entries(key, made[:, None], self.rate, 0)
        cache.advance({}, len(parts))
        return cache


CASES = st.builds(
    lambda lengths, **own: Case(
        lengths=tuple(n for n, _ in lengths), new=tuple(n for _, n in lengths), **own
    ),
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 3, 40, 64, 600, 1300]), st.integers(1, 9)),
        min_size=1, max_size=3,
    ),
    heads=st.integers(1, 6),
    rate=st.sampled_from([2, 3, 10, 128]),
    window=st.sampled_from([1, 6, 700]),
    top_k=st.sampled_from([0, 1, 4, 70, 600]),
    sinks=st.booleans(),
    bits=st.sampled_from([32, 16, 8]),
    seed=st.integers(0, 2**31),
)  # fmt: skip


@torch.inference_mode()
def ran(case: Case, cut: bool = False) -> tuple[list[Tensor], list[KVCache]]:
    """Of each sequence the logits of its new tokens, attention's output, and its cache.

    Args:
        cut: the tokens are read one by one rather than in one step.
    """
    assert KERNEL is not None
    rows = [case.rows(index) for index in range(len(case.lengths))]
    new = torch.cat([own[-count:] for own, count in zip(rows, case.new, strict=True)])
    recorder, first = Recorder(operation_names()), new[:1, None].clone()
    recorder.give(first, Space.EMBEDDED)
    with recorder:
        parts = case.cut(first)
        others = {"entry": parts["entry"]} | ({"sinks": parts["sinks"]} if case.sinks else {})
        if case.top_k:
            others["chosen"] = torch.zeros(case.top_k, dtype=torch.int64)
            indexer = Indexer(INDEX, case.top_k, rate=case.rate)
            given = (indexer, parts["index query"], parts["weights"], parts["index entry"])
            recorder.record("indexer", given, {}, [others["chosen"]])
        attends = Attends(0, View(SCALE, case.window), None, 1, (ENTRIES, case.rate))
        out = torch.zeros(1, 1, case.heads, SIZE)
        attention = (attends, parts["q"], parts["k"], parts["k"])
        recorder.record("attention", attention, others, [out])
        logits = recorder.value(out.reshape(-1))
    assert isinstance(logits, Value)
    recorder.trace.logits = logits
    embedding = nn.Embedding.from_pretrained(new)
    step = TracedStep(Program(recorder.trace, DescriptionRecords()), embedding, KERNEL.decode)
    caches = [case.cache(index) for index in range(len(rows))]
    tokens = [own.tolist() for own in torch.arange(len(new)).split(list(case.new))]
    turns = [tokens]
    if cut:
        turns = [[own[at : at + 1] for own in tokens] for at in range(max(case.new))]
    outputs: list[list[Tensor]] = [[] for _ in rows]
    for turn in turns:
        running = [index for index, ids in enumerate(turn) if ids]
        work = [Work(turn[index], caches[index], all_logits=True) for index in running]
        for index, made in zip(running, step(work, no_experts), strict=True):
            outputs[index].append(made)
    return [torch.cat(own) for own in outputs], caches


def no_experts(*_: object) -> Tensor:
    raise AssertionError("no experts")


def expected(case: Case, rows: Tensor, cache: KVCache) -> Tensor:
    """Output ``(heads, size)`` of the last token, in float64, of keys and values as they are
    stored."""
    parts, count = [case.cut(row) for row in rows], len(rows)
    last, ends = parts[-1], parts[case.rate - 1 :: case.rate]
    seen = torch.arange(len(ends))
    if 0 < case.top_k < len(ends):
        index = torch.cat([part["index entry"][0] for part in ends]).double()
        by_head = (last["index query"].double() @ index.T).relu()
        seen = (last["weights"].double() @ by_head).topk(case.top_k).indices
    entries = torch.cat([torch.empty(0, SIZE), *(part["entry"][0] for part in ends)])[seen]
    first = max(count - case.window, 0)
    k, v = (
        torch.cat([stored[0, 0, first:count], entries]).double() for stored in cache.read(0, count)
    )
    scores = last["q"][0, :, 0].double() @ k.T * SCALE
    if case.sinks:
        scores = torch.cat([scores, last["sinks"].double()[:, None]], 1)
    return scores.softmax(1)[:, : len(k)] @ v


@settings(max_examples=20)
@given(case=CASES)
def test_equals_the_float64_reference(case: Case) -> None:
    for index, (made, cache) in enumerate(zip(*ran(case), strict=True)):
        rows = case.rows(index)
        for token, logits in enumerate(made):
            out = expected(case, rows[: case.lengths[index] + token + 1], cache)
            scale = out.abs().max().clamp_min(1)
            assert (logits.view(out.shape) - out).abs().max() < 2e-5 * scale


@settings(max_examples=12)
@given(case=CASES)
def test_company_and_cuts_change_no_bits(case: Case) -> None:
    together, caches = ran(case)
    apart, others = ran(case, cut=True)
    for mine, other, own, its in zip(together, apart, caches, others, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(own.read(ENTRIES, own.length)[0], its.read(ENTRIES, its.length)[0])
    alone = replace(case, lengths=case.lengths[:1], new=case.new[:1])
    assert torch.equal(ran(alone)[0][0], together[0])


@given(st.data())
def test_entries_are_those_of_the_tokens_that_are_left(data: st.DataObject) -> None:
    """Of a cache that grows, is cut and forked, one entry of every few tokens stays."""
    rate = data.draw(st.integers(2, 130))
    cache, tokens, fresh = KVCache(6000), list[int](), iter(range(10**6))
    for _ in range(data.draw(st.integers(1, 6))):
        start = len(tokens)
        tokens += [next(fresh) for _ in range(data.draw(st.integers(1, 900)))]
        rows = torch.tensor(tokens[start:]).view(1, 1, -1, 1)
        cache.write(0, rows, rows)
        ends = torch.tensor(tokens[rate - 1 :: rate], dtype=torch.int64).view(1, 1, -1, 1)
        cache.write_entries(ENTRIES, ends[:, :, start // rate :], rate, start // rate)
        cache.advance({}, len(tokens) - start)
        if data.draw(st.booleans()):
            del tokens[data.draw(st.integers(1, len(tokens))) :]
            cache.cut(len(tokens))
        if data.draw(st.booleans()):
            del tokens[data.draw(st.integers(1, len(tokens))) :]
            cache = cache.fork(6000, len(tokens))
        found, none = cache.read(ENTRIES, cache.length)
        assert found.flatten().tolist() == tokens[rate - 1 :: rate]
        assert none.numel() == 0
    token_bytes = 2 * 8 + -(-8 // rate)
    assert cache.token_bytes == token_bytes


def rates(few: int, many: int) -> dict[str, int]:
    return {"compressed_sparse_attention": few, "heavily_compressed_attention": many}


def test_what_own_cache_layers_keep_is_found() -> None:
    """Also of entries that stand for more tokens than the shortest prompt that is tried."""
    model = tiny_model("deepseek_v4")
    model.config.compress_rates = rates(3, 100)
    for layer in model.model.layers:
        for module in layer.self_attn.modules():
            if hasattr(module, "compress_rate"):
                overlaps = hasattr(layer.self_attn.compressor, "indexer")
                module.compress_rate = 3 if overlaps else 100
                module.position_bias.data = module.position_bias.data[:1].repeat(
                    module.compress_rate, 1
                )
    found = find_own_layers(model, OwnCache.of(model))
    assert [found[at].rate for at in sorted(found)] == [100, 3, 100, 3]
    one, two = found[0], found[1]
    for own, names in ((one, ["compressor"]), (two, ["compressor", "indexer"])):
        kept = {
            "compressed_kv": own.entries, "buffer_kv": own.windows, "buffer_gate": own.windows,
            "entry_count": own.counts,
        }  # fmt: skip
        for name, members in kept.items():
            assert [m.key for m in members if m.attribute == name] == names
    assert one.lasts == ()
    assert sorted({str(member) for member in two.lasts}) == [
        "overlap_gate.compressor", "overlap_gate.indexer", "overlap_kv.compressor",
        "overlap_kv.indexer",
    ]  # fmt: skip
