"""Drafts of a multi-token-prediction layer in one compiled call: all passes, head and choice.

`CompiledChain` runs a `DescribedStep` again and again in C++, from the tokens that have come since
the last draft to the last drafted one. Between two passes Python would take longer than a pass. The
likeliest token is drafted each time, at any temperature: verification draws what it would draw
without a draft. The head reads `HEAD_BITS` bits of each weight, which no token of the model
depends on.
Legend: S sequences, B rows of a pass, L MoE layers, K slots, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from kernels.cpu import decode as native
from moe.decode.compiled import CachePlaces, DescribedStep
from moe.decode.records import DescriptionRecords
from moe.decode.step import DecodeForward
from moe.describe.description import Projection
from moe.describe.parts import describe_projection
from moe.network.kv_cache import KVCache
from moe.network.mtp import ChainedDrafts
from moe.network.packed_pass import Work

HEAD_BITS, GROUP = 4, 64
"""Of a draft's output head, where the model's own has more; and the columns that share a scale."""


class CompiledChain:
    """See `moe.network.mtp.DraftChain`.

    Args:
        step: of the layer.
        forward: says whether its experts can run inside compiled code now.
    """

    def __init__(self, step: DescribedStep, forward: DecodeForward) -> None:
        self._step, self._forward = step, forward
        self._head = draft_head(step.description.head)
        self._records = DescriptionRecords()
        self._matrix = self._records.matrix(self._head)
        self._model = step.chain_model(self._matrix)

    @property
    def nbytes(self) -> int:
        """Memory of the head, if it is a copy."""
        leaf = self._head.leaf
        copied = leaf is not self._step.description.head.leaf
        return sum(buffer.nbytes for buffer in leaf.buffers()) if copied else 0

    @property
    def ready(self) -> bool:
        return self._forward.all_inside

    def draft(
        self,
        work: Sequence[Work],
        hidden: Sequence[Tensor],
        depths: Sequence[int],
        sharpness: Sequence[float],
        accepted: Sequence[float],
        price: float,
    ) -> ChainedDrafts:
        most, count = max(depths), len(work)
        lengths = [item.cache.length for item in work]
        for item, depth in zip(work, depths, strict=True):
            assert isinstance(item.cache, KVCache)
            item.cache.reserve(item.cache.length + len(item.token_ids) + depth - 1)
        places = CachePlaces(work, self._step.caches)
        self._step.reserve(places.end + most)
        past_BH = (hidden[0] if count == 1 else torch.cat(list(hidden))).float().contiguous()
        first = native.StepRecord(
            rows=places.rows, hidden=past_BH.shape[1], layers=len(self._step.caches),
            threads=torch.get_num_threads(), bounds=places.bounds, past=past_BH.data_ptr(),
        )  # fmt: skip
        first.tokens, first.position, first.capacity, first.cache = places.pointers
        first.keys, first.values = places.formats
        sizes = [len(item.token_ids) for item in work]
        given = np.array([np.cumsum(sizes) - 1, depths], np.int64)
        chances = np.array([*sharpness, *accepted[: most + 1]], np.float32)
        numbers = np.zeros(count * (most + 1) + most, np.int64)  # tokens, made, rows
        confidence = np.empty((count, most), np.float32)
        layers, top_k = self._step.routed
        ids = np.empty(layers * top_k * (places.rows + count * (most - 1)), np.int64)
        at, last = numbers.ctypes.data, given.ctypes.data
        made = at + 8 * count * most
        chain = native.ChainRecord(
            addressof(first), addressof(self._model), count, most, last, last + 8 * count,
            chances.ctypes.data, chances.ctypes.data + 4 * count, price,
            at, confidence.ctypes.data, made, made + 8 * count, ids.ctypes.data,
        )  # fmt: skip
        self._step.kernel.draft(chain)
        for item, length, size in zip(work, lengths, sizes, strict=True):
            item.cache.length = length + size
        rows = [int(each) for each in numbers[count * (most + 1) :] if each]
        self._count(ids, rows, layers, top_k)
        told = numbers[count * most : count * (most + 1)].tolist()
        tokens, chance = numbers[: count * most].reshape(count, most).tolist(), confidence.tolist()
        return ChainedDrafts(
            [own[:n] for own, n in zip(tokens, told, strict=True)],
            [own[:n] for own, n in zip(chance, told, strict=True)],
            rows,
        )

    def _count(self, ids: np.ndarray, rows: Sequence[int], layers: int, top_k: int) -> None:
        """Count what the passes have read."""
        start, every = 0, torch.from_numpy(ids)
        for count in rows if layers else ():
            size = layers * count * top_k
            self._forward.count_inside(every[start : start + size].view(layers, count, top_k))
            start += size


def make_chain(forward: DecodeForward | None) -> CompiledChain | None:
    """The chain of a fused decode step; None if C++ does not compute all of the step."""
    step = None if forward is None else forward.step
    if forward is None or not isinstance(step, DescribedStep) or not step.whole:
        return None
    return CompiledChain(step, forward)


def draft_head(head: Projection) -> Projection:
    """A head with few bits, unless it has them already, or its rows make no whole groups."""
    leaf = head.leaf
    if type(leaf) is not nn.Linear or leaf.in_features % GROUP:
        return head
    try:
        made = QuantizedLinear.of(leaf, GROUP, HEAD_BITS)
    except ValueError:  # a weight is no number: verification says so
        return head
    return replace(describe_projection(made), bias=head.bias)
