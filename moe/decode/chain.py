"""Drafts of a multi-token-prediction layer in one compiled call: all passes, head and choice.

`CompiledChain` runs a `DescribedStep` again and again in C++, from the tokens that have come since
the last draft to the last drafted one. Between two passes Python would take longer than a pass. The
likeliest token is drafted, or one drawn at the sequence's temperature from no more than `CHOICES`:
rejection sampling then keeps the model's distribution (`moe.sampling.draws.accepted`). The head
reads `HEAD_BITS` bits of each weight, on which no token of the model depends.
Legend: S sequences, B rows of a pass, L MoE layers, K slots, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from itertools import accumulate

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
from moe.kv.cache import KVCache
from moe.kv.layout import Shape
from moe.network.mtp import ChainedDrafts, ChainStart
from moe.network.packed_pass import Work
from moe.sampling.batch import Proposal

HEAD_BITS, GROUP = 4, 64
"""Bits of a draft's output head, where the model's own has more; and the columns that share a
scale."""
COPIED = 1 << 26
"""Weights of the largest head that is copied: 36 MB. A larger one would need a place in the plan of
memory; ``model.head_bits`` makes it small for the model, too."""
CHOICES = 1024
"""Most tokens that a drafted one is drawn from: the likeliest."""


class CompiledChain:
    """See `moe.network.mtp.DraftChain`.

    Args:
        step: of the layer.
        forward: says whether its experts can run inside compiled code now.
    """

    def __init__(self, step: DescribedStep, forward: DecodeForward) -> None:
        self._step, self._forward = step, forward
        self._records = DescriptionRecords()
        self._matrix = self._records.matrix(draft_head(step.description.head))
        self._model = step.chain_model(self._matrix)
        attentions = [layer.attention for layer in step.description.layers]
        self._empty = {own.layer: _no_rows(own.cache_shape) for own in attentions}
        self._made = _Made(1, 1)

    @property
    def ready(self) -> bool:
        return self._forward.all_inside

    def draft(
        self, starts: Sequence[ChainStart], accepted: Sequence[float], price: float
    ) -> ChainedDrafts:
        work, hidden, depths, temperatures, draws = zip(*starts, strict=True)
        most, count = max(depths), len(work)
        sizes = [len(item.token_ids) for item in work]
        places = self._places_of(work, depths)
        past_BH = (hidden[0] if count == 1 else torch.cat(list(hidden))).float().contiguous()
        layers, top_k = self._step.routed
        ids = torch.empty(layers * top_k * (sum(sizes) + count * (most - 1)), dtype=torch.int64)
        made = self._made
        if made.tokens.shape != (count, most):
            made = self._made = _Made(count, most)
        made.given[:] = [[end - 1 for end in accumulate(sizes)], depths]
        made.chances[:] = [*(1 / each for each in temperatures), *accepted[: most + 1]]
        drawn = any(draws)
        if drawn:
            made.make_choices()
            made.uniform[:] = [
                [-1.0] * most if draw is None else [draw() for _ in range(most)] for draw in draws
            ]
        else:
            made.uniform.fill(-1.0)
        first, chain = made.first, made.chain
        first.rows, first.hidden = past_BH.shape
        first.layers = len(self._step.caches)
        first.tokens, first.position, first.capacity, first.cache = places.pointers
        first.keys, first.values = places.formats
        first.threads, first.past = torch.get_num_threads(), past_BH.data_ptr()
        chain.model, chain.price, chain.ids = addressof(self._model), price, ids.data_ptr()
        self._step.kernel.draft(chain)
        for item, size in zip(work, sizes, strict=True):
            item.cache.length += size
        passes = [each for each in made.rows.tolist() if each]
        self._count(ids, passes, layers, top_k)
        told = made.told.tolist()
        tokens, chance = made.tokens.tolist(), made.confidence.tolist()
        return ChainedDrafts(
            [own[:n] for own, n in zip(tokens, told, strict=True)],
            [own[:n] for own, n in zip(chance, told, strict=True)],
            made.proposals(told) if drawn else [[None] * n for n in told],
            passes,
        )

    def _places_of(self, work: Sequence[Work], depths: Sequence[int]) -> CachePlaces:
        """The rows of the first pass; their caches have room for those of all passes."""
        for item, depth in zip(work, depths, strict=True):
            cache = item.cache
            assert type(cache) is KVCache  # whose rows are floats, and attend to all before them
            end = cache.length + len(item.token_ids) + depth
            cache.reserve(end - 1)
            for layer, shapes in self._empty.items() if cache.length == 0 else ():
                cache.write(layer, *shapes)  # the buffers
            self._step.reserve(end)
        return CachePlaces(work, self._step.caches)

    def _count(self, ids: Tensor, rows: Sequence[int], layers: int, top_k: int) -> None:
        """Count what the passes have read."""
        if not layers:
            return
        parts = ids[: layers * top_k * sum(rows)].split([layers * top_k * own for own in rows])
        for own, count in zip(parts, rows, strict=True):
            self._forward.count_inside(own.view(layers, count, top_k))


class _Made:
    """Memory for drafts of ``count`` sequences, used again while their number stays."""

    def __init__(self, count: int, most: int) -> None:
        self.given = np.zeros((2, count), np.int64)  # the last row of each, and its depth
        self.chances = np.zeros(count + most + 1, np.float32)
        self.tokens, self.told = np.zeros((count, most), np.int64), np.zeros(count, np.int64)
        self.rows, self.confidence = np.zeros(most, np.int64), np.zeros((count, most), np.float32)
        self.uniform = np.full((count, most), -1.0)
        self._choices: np.ndarray | None = None
        self.first = native.StepRecord()
        given, chances = self.given.ctypes.data, self.chances.ctypes.data
        self.chain = native.ChainRecord(
            addressof(self.first), None, count, most, given, given + 8 * count,
            chances, chances + 4 * count, 0.0, self.tokens.ctypes.data,
            self.confidence.ctypes.data, self.told.ctypes.data, self.rows.ctypes.data, None,
            self.uniform.ctypes.data, CHOICES, None, None, None,
        )  # fmt: skip

    def make_choices(self) -> None:
        """Make room for what tokens are drawn from, if there is none yet."""
        if self._choices is not None:
            return
        size = self.uniform.shape
        self._choices = np.empty((*size, CHOICES), np.int64)
        self._weights = np.empty((*size, CHOICES), np.float32)
        self._counts = np.zeros(size, np.int64)
        self.chain.choices = self._choices.ctypes.data
        self.chain.weights = self._weights.ctypes.data
        self.chain.num_choices = self._counts.ctypes.data

    def proposals(self, told: Sequence[int]) -> list[list[Proposal | None]]:
        """Return what the tokens of each draft were drawn from; None: they are the likeliest."""
        return [
            [self._proposal(row, place) for place in range(count)] for row, count in enumerate(told)
        ]

    def _proposal(self, row: int, place: int) -> Proposal | None:
        if self.uniform[row, place] < 0:
            return None
        assert self._choices is not None
        count = self._counts[row, place]
        weights = torch.from_numpy(self._weights[row, place, :count].astype(np.float64))
        ids = torch.from_numpy(self._choices[row, place, :count].copy())
        return Proposal(int(self.tokens[row, place]), ids, weights / weights.sum())


def make_chain(forward: DecodeForward | None) -> CompiledChain | None:
    """The chain of a fused decode step; None if C++ does not compute all of the step."""
    step = None if forward is None else forward.step
    if forward is None or not isinstance(step, DescribedStep) or not step.whole:
        return None
    return CompiledChain(step, forward)


def _no_rows(shape: Shape) -> tuple[Tensor, Tensor]:
    """Keys and values of no tokens."""
    heads, *sizes = shape
    keys, values = (torch.empty(1, heads, 0, size) for size in sizes)
    return keys, values


def draft_head(head: Projection) -> Projection:
    """A head with few bits, unless it has them already, is large, or makes no whole groups."""
    leaf = head.leaf
    if type(leaf) is not nn.Linear or leaf.in_features % GROUP or leaf.weight.numel() > COPIED:
        return head
    try:
        made = QuantizedLinear.of(leaf, GROUP, HEAD_BITS)
    except ValueError:  # a weight is no number: verification says so
        return head
    return replace(describe_projection(made), bias=head.bias)
