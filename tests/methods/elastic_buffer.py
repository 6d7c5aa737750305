"""A stand-in for ``deep_ep.ElasticBuffer`` (2.1.0), over an `Exchange`: the parameters that are
used here, by their published names, and what comes back for them.

Rows come in any order, and are there when their event has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experts.dispatch import Exchange

MOST_EXPERTS, MOST_OF_A_RANK = 2048, 256


class Handle(NamedTuple):
    """Of a dispatch: whose rows came, and the ranks of own slots."""

    sources_N2: Tensor
    rank_TK: Tensor


class Event:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def current_stream_wait(self, release_handle: bool = False) -> None:
        self._finish()


class ElasticBuffer:
    """See above. ``group`` is an `Exchange` between main memories."""

    def __init__(
        self,
        group: Exchange,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_topk > 0
        self._group, self._most, self._hidden = group, num_max_tokens_per_rank, hidden
        self._random = torch.Generator().manual_seed(group.rank)
        self.dispatched = 0

    @staticmethod
    def get_buffer_size_hint(
        group: Exchange, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0
    ) -> int:
        return 2 * group.size * num_max_tokens_per_rank * hidden

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        async_with_compute_stream: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Handle, Event]:
        ranks, local = self._group.size, num_experts // self._group.size
        assert async_with_compute_stream
        assert num_experts == local * ranks <= MOST_EXPERTS
        assert local <= MOST_OF_A_RANK
        assert 0 < len(x) == len(topk_idx) == len(topk_weights) <= self._most
        assert x.shape[1] == self._hidden
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        assert all(one.is_contiguous() for one in (x, topk_idx, topk_weights))
        self.dispatched += 1
        rank_TK = (topk_idx // local).masked_fill(topk_idx < 0, -1)
        parts = []
        for rank, (own, ids, weights) in enumerate(
            zip(*(self._of_all(one) for one in (x, topk_idx, topk_weights)), strict=True)
        ):
            token = (ids // local == self._group.rank).any(1).nonzero()[:, 0]
            ids = ids[token] - self._group.rank * local
            ids[(ids < 0) | (ids >= local)] = -1
            parts.append((own[token], ids, weights[token], token, torch.full_like(token, rank)))
        *received, token, rank_N = (torch.cat(each) for each in zip(*parts, strict=True))
        order = torch.randperm(len(token), generator=self._random)
        handle = Handle(torch.stack([rank_N, token], 1)[order], rank_TK)
        (rows, ids, weights), event = later([one[order] for one in received])
        return rows, ids, weights, handle, event

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor,
        async_with_compute_stream: bool = False,
    ) -> tuple[Tensor, Tensor, Event]:
        """One or two rows are added in the rows' dtype, more in float32 in the order of slots."""
        assert async_with_compute_stream
        assert len(x) == len(handle.sources_N2) == len(topk_weights)
        assert topk_weights.dtype == torch.float32
        assert x.is_contiguous()
        assert topk_weights.is_contiguous()
        rank_TK, own = handle.rank_TK, self._group.rank
        rows, weights = x.new_zeros(len(rank_TK), x.shape[1]), torch.zeros(rank_TK.shape)
        given: list[dict[int, Tensor]] = [{} for _ in rank_TK]
        everyone = (self._of_all(one) for one in (x, handle.sources_N2, topk_weights))
        for rank, (theirs, sources, numbers) in enumerate(zip(*everyone, strict=True)):
            for at in (sources[:, 0] == own).nonzero()[:, 0].tolist():
                token = int(sources[at, 1])
                given[token][rank] = theirs[at]
                here = rank_TK[token] == rank
                weights[token, here] = numbers[at, here]
        for token, by_rank in enumerate(given):
            order = [rank for rank in dict.fromkeys(rank_TK[token].tolist()) if rank >= 0]
            assert sorted(order) == sorted(by_rank)
            parts = [by_rank[rank] for rank in order]
            if len(parts) > 2:
                rows[token] = torch.stack(parts).float().sum(0).to(x.dtype)
            elif parts:
                rows[token] = sum(parts[1:], parts[0])
        (rows, weights), event = later([rows, weights])
        return rows, weights, event

    def _of_all(self, own: Tensor) -> list[Tensor]:
        """A tensor of each rank, of any number of rows."""
        group, others = self._group, self._group.size - 1
        one = [int(rank != group.rank) for rank in range(group.size)]
        count = torch.tensor([len(own)])
        counts = torch.empty(others, 8, dtype=torch.uint8)
        told = count.view(torch.uint8).repeat(others, 1)
        group.all_to_all(told, counts, one, one)()
        sizes = counts.view(torch.int64)[:, 0].tolist() if others else []
        sizes.insert(group.rank, 0)
        sent = own.contiguous().view(torch.uint8)
        received = sent.new_empty(sum(sizes), sent.shape[1])
        group.all_to_all(sent.repeat(others, 1), received, [len(own) * n for n in one], sizes)()
        parts = [part.clone().view(own.dtype) for part in received.split(sizes)]
        parts[group.rank] = own
        return parts


def later(values: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
    """Tensors that hold nonsense until an event has been waited for."""
    made = [torch.full_like(value, 77) for value in values]

    def finish() -> None:
        for one, value in zip(made, values, strict=True):
            one.copy_(value)

    return made, Event(finish)


def module(**changed: Any) -> Any:
    """A stand-in for the package."""
    plain = {"ElasticBuffer": ElasticBuffer, "topk_idx_t": torch.int64}
    return SimpleNamespace(**(plain | changed))
