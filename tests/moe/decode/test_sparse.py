"""Attention to chosen keys, with biases by distance and sinks of a token, in compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from examples.models import tiny
from examples.models.tiny import tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.program import Space
from moe import MoE, SamplingParams
from moe.decode.history import Indexer, Latents, heads_by_key
from moe.decode.lower import operation_names
from moe.decode.program import Program
from moe.decode.recorder import Recorder, Value
from moe.decode.records import DescriptionRecords
from moe.decode.trace import Attends
from moe.decode.traced import TracedStep
from moe.describe.description import Norm, RotaryTable, Rotation, Style, View
from moe.describe.observe import AttentionCall
from moe.describe.parts import rotate
from moe.kv.cache import KVCache
from moe.network.attention import MaskRule
from moe.network.packed_pass import Work
from tests.amounts import deep_except

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")

KEYS = ("indexer", 0)
WAVE = {"prefill.wave_tokens": 128}


@dataclass(frozen=True)
class Sizes:
    """One layer. Latent attention has a ``latent`` size, and then ``key`` is of the rotated part.

    Attributes:
        top_k: 0 without an indexer.
        pool: tokens of a pool that the indexer chooses, or 1.
        means: how pools rotate their keys, which are normed means; None: keys have gates.
        reach: distances that have a bias.
        whole: numbers are small and whole, so that many scores are equal.
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    latent: int
    index_heads: int
    index_key: int
    top_k: int
    pool: int
    means: Style | None
    reach: int
    sinks: bool
    whole: bool
    seed: int

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part of a token's row."""
        plain = self.value if self.latent else 0
        rows = (
            {"k": (1, 1, 1, self.latent), "v": (1, 1, 1, self.key)}
            if self.latent
            else {"k": (1, self.kv_heads, 1, self.key), "v": (1, self.kv_heads, 1, self.value)}
        )
        return {
            "q": (1, self.heads, 1, plain + self.key), **rows,
            "index query": (self.index_heads, self.index_key), "weights": (self.index_heads,),
            "index key": (1, 1, 2 * self.index_key + 1 if self.gated else self.index_key),
            "bias": (self.heads, self.reach),
            "sinks": (self.heads,),
        }  # fmt: skip

    @property
    def gated(self) -> bool:
        return self.pool > 1 and self.means is None

    @property
    def exact(self) -> bool:
        """Whether no score is rounded. Keys of pools are."""
        return self.whole and self.pool == 1

    @property
    def width(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.parts.values())

    def cut(self, row: Tensor) -> dict[str, Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self.parts.values()]
        pieces = row.reshape(-1).split(sizes)
        return {
            name: piece.view(shape)
            for (name, shape), piece in zip(self.parts.items(), pieces, strict=True)
        }

    @property
    def expansion(self) -> Tensor:
        """``(heads, plain + value, latent)``; as many plain dimensions as values."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.heads, 2 * self.value, self.latent, generator=generator)

    @property
    def indexer(self) -> Indexer:
        if self.pool == 1:
            return Indexer(KEYS, self.top_k)
        generator = torch.Generator().manual_seed(self.seed + 2)
        if self.means is not None:
            weight = torch.randn(self.index_key, generator=generator)
            norm = Norm(weight, None, 1e-3, self.seed % 2 == 0, nn.Identity())
            size = self.index_key // 4 * 2 or 2
            rotation = Rotation(self.means, self.index_key - size, size, TABLES[size // 2])
            return Indexer(KEYS, self.top_k, self.pool, None, norm, rotation)
        bias = torch.randn(self.pool, self.index_key, generator=generator)
        return Indexer(KEYS, self.top_k, self.pool, bias)

    @property
    def attends(self) -> Attends:
        latents = Latents(nn.Identity(), self.expansion) if self.latent else None
        return Attends(0, View(0.3, None, None), latents, self.pool)


def turns(half: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[..., None] / (2.0 + torch.arange(half))
    return angles.cos(), angles.sin()


TABLES = {half: RotaryTable(partial(turns, half)) for half in (1, 4, 5)}
"""By half the size that is rotated."""


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    kv_heads = draw(st.integers(1, 3))
    pool = draw(st.sampled_from([1, 1, 2, 3, 8]))
    means = draw(st.sampled_from([None, *get_args(Style)])) if pool > 1 else None
    return Sizes(
        heads=kv_heads * draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        key=draw(st.sampled_from([4, 16, 19])),
        value=draw(st.sampled_from([4, 16, 35])),
        latent=draw(st.sampled_from([0, 0, 5, 32])),
        index_heads=draw(st.integers(1, 5)),
        index_key=draw(st.sampled_from([3, 16, 20])),
        top_k=draw(st.sampled_from([0, 1, 4, 70, 600])),
        pool=pool,
        means=means,
        reach=draw(st.sampled_from([1, 7, 700])),
        sinks=draw(st.booleans()),
        whole=means is None and draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@dataclass(frozen=True)
class Case:
    """Sequences of some lengths, which each read some tokens in one step."""

    sizes: Sizes
    lengths: tuple[int, ...]
    new: tuple[int, ...]

    def rows(self, sequence: int) -> Tensor:
        """``(T, width)`` of all of a sequence's tokens, the new ones last."""
        own = self.sizes
        generator = torch.Generator().manual_seed(own.seed + 7 * sequence)
        shape = (self.lengths[sequence] + self.new[sequence], own.width)
        if own.whole:
            return torch.randint(-2, 3, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    def cache(self, sequence: int) -> KVCache:
        """Of the tokens before the step."""
        length, cache = self.lengths[sequence], KVCache(4000)
        parts = [self.sizes.cut(row) for row in self.rows(sequence)[:length]]
        if parts:
            keys, values = (torch.cat([part[name] for part in parts], 2) for name in "kv")
            index = torch.cat([part["index key"] for part in parts], 1)[:, None]
        else:
            one = self.sizes.cut(self.rows(sequence)[0])
            keys, values = one["k"][:, :, :0], one["v"][:, :, :0]
            index = one["index key"][:, None, :0]
        cache.write(0, keys, values)
        cache.write(KEYS, index, index[..., :0])
        cache.advance({}, length)
        return cache


CASES = st.builds(
    lambda sizes, lengths: Case(sizes, *zip(*lengths, strict=True)),
    sizes(),
    st.lists(
        st.tuples(st.sampled_from([0, 3, 40, 600, 1300]), st.integers(1, 3)),
        min_size=1,
        max_size=3,
    ),
)


def step_of(own: Sizes, rows: Tensor) -> TracedStep:
    """A compiled step whose logits are attention's output and the chosen positions."""
    kernel, _ = choose_kernel()
    assert kernel is not None
    recorder, first = Recorder(operation_names()), rows[:1, None].clone()
    recorder.give(first, Space.EMBEDDED)
    with recorder:
        parts = own.cut(first)
        others = {"bias": parts["bias"]} | ({"sinks": parts["sinks"]} if own.sinks else {})
        out = torch.zeros(1, 1, own.heads, own.value)
        made = [out]
        if own.top_k:
            chosen = torch.zeros(own.indexer.most, dtype=torch.int64)
            index = (own.indexer, *(parts[name] for name in INDEX))
            recorder.record("indexer", index, {}, [chosen])
            others["chosen"] = chosen
            made.append(chosen)
        attention = (own.attends, *(parts[name] for name in "qkv"))
        recorder.record("attention", attention, others, [out])
        logits = recorder.value(torch.cat([each.reshape(-1).float() for each in made]))
    assert isinstance(logits, Value)
    recorder.trace.logits = logits
    embedding = nn.Embedding.from_pretrained(rows)
    return TracedStep(Program(recorder.trace, DescriptionRecords()), embedding, kernel.decode)


INDEX = ("index query", "weights", "index key")


@torch.inference_mode()
def ran(case: Case, cut: bool = False) -> list[Tensor]:
    """Of each sequence the logits of its new tokens, read in one step or one by one."""
    rows = [case.rows(index) for index in range(len(case.lengths))]
    new = [own[-count:] for own, count in zip(rows, case.new, strict=True)]
    step = step_of(case.sizes, torch.cat(new))
    caches = [case.cache(index) for index in range(len(rows))]
    tokens = torch.arange(sum(case.new)).split(list(case.new))
    parts = [[own.tolist() for own in tokens]]
    if cut:
        parts = [[own[at : at + 1].tolist() for own in tokens] for at in range(max(case.new))]
    outputs: list[list[Tensor]] = [[] for _ in rows]
    for part in parts:
        running = [index for index, ids in enumerate(part) if ids]
        work = [Work(part[index], caches[index], all_logits=True) for index in running]
        for index, made in zip(running, step(work, no_experts), strict=True):
            outputs[index].append(made)
    return [torch.cat(own) for own in outputs]


def no_experts(*_: object) -> Tensor:
    raise AssertionError("no experts")


def pool_keys(own: Sizes, rows: Tensor) -> Tensor:
    """``(pools, index_key)`` of ``(L, W)`` rows, in float64."""
    if own.means is not None:
        norm, rotation = own.indexer.norm, own.indexer.rotation
        assert norm is not None
        assert rotation is not None
        keys = rows[: len(rows) // own.pool * own.pool].double().view(-1, own.pool, own.index_key)
        keys = keys.mean(1)
        keys = keys - keys.mean(1, keepdim=True) if norm.centered else keys
        keys = keys * (keys.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight
        rotation.table.reserve(len(rows))
        starts = torch.arange(len(keys)) * own.pool
        cos, sin = (part[starts].double() for part in (rotation.table.cos, rotation.table.sin))
        return rotate(rotation, keys[:, None], cos, sin)[:, 0]
    assert own.indexer.bias is not None
    whole = rows[: len(rows) // own.pool * own.pool].double().view(-1, own.pool, rows.shape[1])
    keys, gates, _ = whole.split([own.index_key, own.index_key, 1], -1)
    return ((gates + own.indexer.bias).softmax(1) * keys).sum(1)


def check_choice(own: Sizes, rows: Tensor, chosen: Tensor) -> None:
    """The last token of ``(L, W)`` rows chooses the positions with the largest scores.

    Equal scores count as torch's topk takes them where they are exact. Elsewhere sums that would be
    equal are rounded to different numbers, in another way by each order of operations: then any of
    these keys will do, and the scores are compared.
    """
    count, pools = len(rows), len(rows) // own.pool
    if pools <= own.top_k:
        assert chosen.tolist() == list(range(count))
        return
    parts = [own.cut(row) for row in rows]
    keys = torch.cat([part["index key"][0] for part in parts])
    keys = pool_keys(own, keys) if own.pool > 1 else keys.double()
    query, weights = (parts[-1][name].double() for name in ("index query", "weights"))
    scores = weights @ (query @ keys.view(pools, -1).T).relu()
    best = scores.float().topk(own.top_k).indices.sort().values
    found = chosen[: own.top_k * own.pool : own.pool] // own.pool
    positions = torch.arange(pools * own.pool).view(pools, own.pool)[found].flatten().tolist()
    assert chosen.tolist() == [*positions, *range(pools * own.pool, count)]
    if own.exact:
        assert found.tolist() == best.tolist()
        return
    assert (found.diff() > 0).all()
    size = (weights.abs() @ (query.abs() @ keys.view(pools, -1).abs().T)).max().item()
    theirs, mine = scores[best].sort().values, scores[found].sort().values
    torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-6 * size)


def expected(own: Sizes, rows: Tensor, chosen: Tensor) -> Tensor:
    """Output ``(heads, value)`` in float64 of the last token, which reads the chosen positions."""
    parts = [own.cut(row) for row in rows]
    last, count = parts[-1], len(parts)
    k, v = (torch.cat([part[name][0] for part in parts], 1)[:, chosen].double() for name in "kv")
    if own.latent:
        made = torch.einsum("htr,lr->hlt", own.expansion.double(), k[0])
        k = torch.cat([made[..., : own.value], v.expand(own.heads, -1, -1)], -1)
        v = made[..., own.value :]
    else:
        k, v = (each.repeat_interleave(own.heads // own.kv_heads, 0) for each in (k, v))
    scores = torch.einsum("hd,hld->hl", last["q"][0, :, 0].double(), k) * own.attends.view.scale
    back = count - 1 - chosen
    bias = last["bias"].double()[:, back.clamp(max=own.reach - 1)]
    scores = scores + bias.masked_fill(back >= own.reach, 0.0)
    if own.sinks:
        scores = torch.cat([scores, last["sinks"].double()[:, None]], 1)
    return torch.einsum("hl,hlv->hv", scores.softmax(1)[:, : len(chosen)], v)


TIED_POOLS = Case(
    Sizes(
        heads=1, kv_heads=1, key=16, value=16, latent=0, index_heads=4, index_key=3, top_k=1,
        pool=2, means=None, reach=7, sinks=False, whole=True, seed=43494,
    ),
    lengths=(1300,),
    new=(3,),
)  # fmt: skip
"""The last token's heads cancel but for 5 times a key's third number, and several pools have 10."""
FEW_TIED, MANY_TIED = (
    replace(TIED_POOLS, sizes=replace(TIED_POOLS.sizes, pool=1, top_k=top_k)) for top_k in (4, 70)
)
"""Exact scores, chosen by either of topk's algorithms."""


@given(case=CASES)
@example(case=TIED_POOLS)
@example(case=FEW_TIED)
@example(case=MANY_TIED)
def test_equals_the_float64_reference(case: Case) -> None:
    own = case.sizes
    for index, made in enumerate(ran(case)):
        rows = case.rows(index)
        for token, logits in enumerate(made):
            length = case.lengths[index] + token + 1
            chosen = torch.arange(length)
            if own.top_k:
                chosen = logits[own.heads * own.value :].long()
                chosen = chosen[: min(length, own.top_k * own.pool + length % own.pool)]
                check_choice(own, rows[:length], chosen)
            out = expected(own, rows[:length], chosen)
            scale = out.abs().max().clamp_min(1)
            assert (logits[: out.numel()].view(out.shape) - out).abs().max() < 2e-5 * scale


@given(case=CASES)
def test_company_threads_and_cuts_change_no_bits(case: Case) -> None:
    own, together = case.sizes, ran(case)
    outputs = own.heads * own.value
    ways = [ran(case, cut=True)]
    with threads(2):
        ways.append(ran(case))
    for way in ways:
        for mine, other in zip(way, together, strict=True):
            assert torch.equal(mine[:, :outputs], other[:, :outputs])
    alone = replace(case, lengths=case.lengths[:1], new=case.new[:1])
    assert torch.equal(ran(alone)[0][:, :outputs], together[0][:, :outputs])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PLAIN = MaskRule(lambda batch, head, query, key: key <= query, None)


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 2**31)
)
def test_heads_find_the_keys_that_they_read(
    stored: int, copies: int, group: int, other: bool, seed: int
) -> None:
    """Cached heads are repeated in any order, and ``group`` query heads share each copy."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, stored, 7, size, generator=generator) for size in (5, 3))
    of_copy = torch.arange(stored).repeat(copies)[
        torch.randperm(stored * copies, generator=generator)
    ]
    unequal = other and stored > 1
    if unequal:
        of_copy = of_copy[:-1]
    made = keys[:, of_copy], values[:, of_copy]
    query = torch.randn(1, len(of_copy) * group, 1, 5, generator=generator)
    call = AttentionCall(nn.Identity(), query, *made, PLAIN, {}, query)
    order = heads_by_key(call, keys, values)
    if unequal:
        assert order is None
        return
    assert order is not None
    read = of_copy.repeat_interleave(group)[order]
    assert read.tolist() == torch.arange(stored).repeat_interleave(len(read) // stored).tolist()
    changed = AttentionCall(nn.Identity(), query, made[0] + 1, made[1], PLAIN, {}, query)
    assert heads_by_key(changed, keys, values) is None


LIMITS = {
    "deepseek_v32": {"index_topk": 90},
    "deepseek_v4": {"index_topk": 20},
    "inkling_text": {"rel_extent": 90},
    "glm5_next": {"index_topk": 90, "index_kpool": 3},
    "qwen4_exp_text": {"indexer_budget": 90, "indexer_compress_ratio": 3},
}
"""More than the tokens that a probe reads: the trace looks at longer histories to find them."""


@pytest.mark.parametrize("kind", deep_except(["deepseek_v32"], LIMITS))
def test_limits_that_only_long_sequences_reach_are_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{kind}_text" if f"{kind}_text" in tiny.SPECIFIC else kind
    monkeypatch.setitem(tiny.SPECIFIC, text, tiny.SPECIFIC.get(text, {}) | LIMITS[kind])
    tiny_model(kind).save_pretrained(tmp_path)
    fused, plain = (
        MoE.from_pretrained(tmp_path, WAVE, engine={"fused": way}) for way in ("auto", "off")
    )
    assert fused.status()["fused"]["why"].startswith("traced")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in (70, 160, 5)]
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    answers = [
        [list(completion.token_ids) for completion in model.generate(prompts, params)]
        for model in (fused, plain)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("kind", "place", "changed", "why"),
    [
        ("deepseek_v32", "F.relu", lambda x: torch.tanh(x), "chosen in a way that is not known"),
        ("glm5_next", "F.relu", lambda x: torch.tanh(x), "changes which keys a token sees"),
        ("qwen4_exp_text", "torch.relu", lambda x: x.tanh(), "changes which keys a token sees"),
        (
            "inkling_text",
            "InklingRelativeLogits.forward",
            lambda _, relative, queries, keys: (
                (relative @ torch.ones(relative.shape[-1], 20)).transpose(1, 2)[..., :1]
                * (queries[:, None] - keys[None]).float().cos()
            ),
            "biases that are not known",
        ),
    ],
)
def test_what_is_not_understood_runs_through_transformers(
    kind: str,
    place: str,
    changed: Callable[..., Tensor],
    why: str,
    tiny_checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoint(kind)
    monkeypatch.setattr(f"{type(tiny_model(kind)).__module__}.{place}", changed)
    status = MoE.from_pretrained(path, WAVE).status()["fused"]
    assert not status["enabled"]
    assert why in status["why"]
