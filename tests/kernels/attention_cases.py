"""Sequences whose keys and values lie in shuffled blocks, and what float64 says of queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.triton import attention
from kernels.triton.attention import BLOCK, KeyRows


@dataclass(frozen=True)
class AttentionCase:
    """The last queries of some sequences; a sequence of no queries is a row of padding."""

    query: Tensor  # (T, Q, D)
    second: Tensor | None  # (T, Q, R) of latent keys
    rows: list[tuple[Tensor, Tensor]]  # of each sequence (N, L, D) and (N, L, V or R)
    counts: list[int]  # queries of each sequence
    reach: int | None  # most keys that a query sees
    scale: float
    softcap: float | None
    sinks: Tensor | None
    decoding: bool  # spans of one query each
    in_blocks: bool = True

    def to(self, device: torch.device) -> AttentionCase:
        return replace(
            self,
            query=self.query.to(device),
            second=None if self.second is None else self.second.to(device),
            rows=[(first.to(device), other.to(device)) for first, other in self.rows],
            sinks=None if self.sinks is None else self.sinks.to(device),
        )

    def part(self, index: int, begin: int, end: int) -> AttentionCase:
        """Some queries of a sequence, alone, which has no tokens behind them."""
        at = sum(max(count, 1) if self.decoding else count for count in self.counts[:index])
        left = max(self.counts[index] - end, 0)
        own = [rows[:, : rows.shape[1] - left] for rows in self.rows[index]]
        chosen = slice(at + begin, at + end)
        return replace(
            self,
            query=self.query[chosen],
            second=None if self.second is None else self.second[chosen],
            rows=[(own[0], own[1])],
            counts=[min(end, self.counts[index]) - begin],
        )

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Sequence and position of each query; -1: padding."""
        found = []
        for index, ((keys, _), count) in enumerate(zip(self.rows, self.counts, strict=True)):
            length = keys.shape[1]
            found += [(index, at) for at in range(length - count, length)]
            found += [(index, -1)] if self.decoding and not count else []
        return found

    def first(self, position: int) -> int:
        return 0 if self.reach is None else max(0, position - self.reach + 1)

    def blocks(self) -> KeyRows:
        """All rows in one pool, in blocks that nobody expects, beside blocks of NaN."""
        device = self.query.device
        sizes = [-(-keys.shape[1] // BLOCK) for keys, _ in self.rows]
        numbers = iter((torch.randperm(sum(sizes) + 2)[: sum(sizes)]).tolist())
        tables = torch.full((len(self.rows), max(sizes, default=1) + 1), 10**6, dtype=torch.int32)
        pools = [
            torch.full((sum(sizes) + 2, len(part), BLOCK, part.shape[2]), torch.nan).to(part)
            for part in self.rows[0]
        ]
        for index, (pair, size) in enumerate(zip(self.rows, sizes, strict=True)):
            for at in range(size):
                tables[index, at] = block = next(numbers)
                for pool, part in zip(pools, pair, strict=True):
                    own = part[:, at * BLOCK : (at + 1) * BLOCK]
                    pool[block, :, : own.shape[1]] = own
        return self._key_rows(pools[0], pools[1], tables.to(device))

    def _key_rows(self, first: Tensor, other: Tensor, tables: Tensor | None = None) -> KeyRows:
        if self.second is None:
            return KeyRows(first, other, tables=tables)
        return KeyRows(first, None, other, tables)

    def run(self) -> Tensor:
        device, starts, begin = self.query.device, [], 0
        for keys, _ in self.rows:
            starts.append(begin)
            begin += keys.shape[1]
        group = self.query.shape[1] // len(self.rows[0][0])
        most = 1
        if not self.decoding:
            sizes = self.query.shape[2], self.rows[0][1].shape[2]
            most = attention.prompt_queries(group, *sizes, self.query.dtype)
        spans, firsts = list[list[int]](), list[int]()
        for at, (index, position) in enumerate(self.positions):
            firsts.append(self.first(position))
            place = index if self.in_blocks else starts[index]
            same = spans and spans[-1][0] == place and spans[-1][2] < most
            if same and not self.decoding:
                spans[-1][2] += 1
            else:
                spans.append([place, at, int(position >= 0), position])
        if self.in_blocks:
            rows = self.blocks()
        else:
            first, other = (torch.cat(parts, 1) for parts in zip(*self.rows, strict=True))
            rows = self._key_rows(first, other)
        return attention.attend(
            self.query, rows, torch.tensor(spans, dtype=torch.int32, device=device),
            torch.tensor(firsts, dtype=torch.int32, device=device), scale=self.scale,
            softcap=self.softcap, sinks=self.sinks, second=self.second, most_queries=most,
            most_keys=max(keys.shape[1] for keys, _ in self.rows),
        )  # fmt: skip

    def expected(self) -> Tensor:
        """(T, Q, V) float64, query by query and head by head; zeros of padding."""
        heads, made = self.query.shape[1], []
        for row, (index, position) in enumerate(self.positions):
            first, other = self.rows[index]
            seen = slice(self.first(position), position + 1)
            for head in range(heads):
                own = head * len(first) // heads
                keys, beside = first[own, seen].double(), other[own, seen].double()
                values = beside if self.second is None else keys
                if position < 0:
                    made.append(values.new_zeros(values.shape[1]))
                    continue
                scores = keys @ self.query[row, head].double()
                if self.second is not None:
                    scores = scores + beside @ self.second[row, head].double()
                scores = scores * self.scale
                if self.softcap is not None:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks[head].double()[None]])
                made.append(scores.softmax(0)[: len(keys)] @ values)
        return torch.stack(made).view(len(self.positions), heads, -1)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    latent, decoding = draw(st.booleans()), draw(st.booleans())
    kv_heads, group = (1, draw(st.integers(1, 19))) if latent else (
        draw(st.integers(1, 3)), draw(st.integers(1, 5))
    )  # fmt: skip
    size, beside = draw(st.sampled_from([1, 7, 16, 70, 80])), draw(st.integers(1, 40))
    lengths = draw(st.lists(st.sampled_from([1, 2, 41, 64, 65, 300]), min_size=1, max_size=3))
    most = st.just(1) if decoding else st.sampled_from([1, 3, 20])
    counts = [min(length, draw(most)) for length in lengths]
    if decoding and draw(st.booleans()):
        counts[draw(st.integers(0, len(counts) - 1))] = 0
    tokens, heads = sum(max(count, 1) for count in counts), kv_heads * group
    return AttentionCase(
        query=torch.randn(tokens, heads, size).to(dtype),
        second=torch.randn(tokens, heads, beside).to(dtype) if latent else None,
        rows=[
            (torch.randn(kv_heads, length, size).to(dtype),
             torch.randn(kv_heads, length, beside).to(dtype))
            for length in lengths
        ],
        counts=counts,
        reach=draw(st.sampled_from([None, 1, 17, 200])),
        scale=draw(st.sampled_from([0.1, 0.7])),
        softcap=draw(st.sampled_from([None, 3.0])),
        sinks=torch.randn(heads) if draw(st.booleans()) else None,
        decoding=decoding,
        in_blocks=latent or decoding or draw(st.booleans()),
    )  # fmt: skip
