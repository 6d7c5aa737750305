"""Rows that attend to sequences in buffers of their own, and what float64 says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.triton import attention


@dataclass(frozen=True)
class AttentionCase:
    """Rows of sequences in buffers of different capacities; position -1 is a row of padding."""

    query: Tensor  # (B, Q, D)
    second: Tensor | None  # (B, Q, R) of a latent cache
    buffers: list[tuple[Tensor, Tensor]]  # (N, capacity, D) and (N, capacity, V or R)
    positions: list[int]
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    caches: int = 2

    def places(self) -> Tensor:
        """The last cache is the one that is there."""
        rows = []
        for (first, other), position in zip(self.buffers, self.positions, strict=True):
            addresses = [0, 0] * (self.caches - 1) + [first.data_ptr(), other.data_ptr()]
            rows.append([position, first.shape[1], *addresses])
        return torch.tensor(rows, device=self.query.device)

    def to(self, device: torch.device) -> AttentionCase:
        return replace(
            self,
            query=self.query.to(device),
            second=None if self.second is None else self.second.to(device),
            buffers=[(first.to(device), other.to(device)) for first, other in self.buffers],
            sinks=None if self.sinks is None else self.sinks.to(device),
        )

    def row(self, index: int) -> AttentionCase:
        second = None if self.second is None else self.second[[index]]
        own = [self.buffers[index]], [self.positions[index]]
        return replace(
            self, query=self.query[[index]], second=second, buffers=own[0], positions=own[1]
        )

    def run(self) -> Tensor:
        first, other = self.buffers[0]
        return attention.attend(
            self.query, self.places(), self.caches - 1, scale=self.scale, window=self.window,
            softcap=self.softcap, sinks=self.sinks, kv_heads=first.shape[0], second=self.second,
            value_size=other.shape[2] if self.second is None else None,
        )  # fmt: skip

    def expected(self) -> Tensor:
        """(B, Q, V) float64, row by row and head by head."""
        heads = self.query.shape[1]
        rows = []
        for row, ((first, other), position) in enumerate(
            zip(self.buffers, self.positions, strict=True)
        ):
            begin = 0 if self.window is None else max(0, position - self.window + 1)
            seen = slice(begin, position + 1)
            for head in range(heads):
                own = head * len(first) // heads
                keys, beside = first[own, seen].double(), other[own, seen].double()
                scores = keys @ self.query[row, head].double()
                if self.second is not None:
                    scores = scores + beside @ self.second[row, head].double()
                scores = scores * self.scale
                if self.softcap is not None:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks[head].double()[None]])
                values = beside if self.second is None else keys
                rows.append(scores.softmax(0)[: len(keys)] @ values)
        return torch.stack(rows).view(len(self.positions), heads, -1)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    latent = draw(st.booleans())
    kv_heads, group = (1, draw(st.integers(1, 19))) if latent else (
        draw(st.integers(1, 3)), draw(st.integers(1, 5))
    )  # fmt: skip
    size, beside = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    positions = draw(st.lists(st.sampled_from([-1, 0, 1, 40, 63, 64, 300]), min_size=1, max_size=3))
    heads = kv_heads * group
    buffers = [
        (torch.randn(kv_heads, capacity, size).to(dtype),
         torch.randn(kv_heads, capacity, beside).to(dtype))
        for capacity in (position + draw(st.integers(1, 5)) for position in positions)
    ]  # fmt: skip
    return AttentionCase(
        query=torch.randn(len(positions), heads, size).to(dtype),
        second=torch.randn(len(positions), heads, beside).to(dtype) if latent else None,
        buffers=buffers,
        positions=positions,
        scale=draw(st.sampled_from([0.1, 0.7])),
        window=draw(st.sampled_from([None, 1, 17, 200])),
        softcap=draw(st.sampled_from([None, 3.0])),
        sinks=torch.randn(heads) if draw(st.booleans()) else None,
    )
