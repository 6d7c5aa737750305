"""The decode step of a described model, compiled: C++ runs from one stop to the next.

Where Python runs the experts, the C++ code stops at each MoE layer; where the step runs them
itself, one call computes all layers. Legend: B rows, each one new token; a sequence may have
several, at successive positions. A described step reads prompts, too: all their tokens are rows,
and those of a sequence attend together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from ctypes import Array, addressof
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from kernels import PlaneMatrix
from kernels.cpu import decode as native
from kernels.cpu.interface import DTYPES
from kernels.cpu.kv import FormatRecord
from moe.decode.records import CompiledPass, DescriptionRecords, point_to_table
from moe.decode.step import (
    CompiledExperts,
    InsideExperts,
    RankGroup,
    RoutedExperts,
    finish_step,
)
from moe.describe.attention import halved
from moe.describe.description import (
    Attention,
    Description,
    Experts,
    LatentAttention,
    Layer,
    NotDescribed,
    RotaryTable,
    Router,
)
from moe.describe.parts import describe_norm, describe_projection
from moe.kv.blocks import BlockKVCache
from moe.kv.layout import LayerKey
from moe.network.mtp import MtpInput
from moe.network.packed_pass import Work
from moe.network.stored_embedding import StoredEmbedding
from routing import Routing

PATIENCE = 0.05
"""Seconds after which C++ looks whether the process has been interrupted (SIGINT)."""
_NO_LIMIT = 1 << 62  # more positions than there are


class CompiledStep(ABC):
    """A decode step on the CPU; see `moe.decode.step.DecodeStep`.

    Args:
        moe: of each part of the step (a layer, or what lies between two layers of experts), the
            MoE layer that ends it; None: none does.
        top_k: experts that a row chooses.
        inside: what runs the experts of each visit to a MoE layer within the step; none: only
            callers do.
    """

    keeps_hidden = False

    def __init__(
        self,
        kernel: native.NativeDecode,
        moe: Sequence[int | None],
        top_k: int,
        inside: Sequence[CompiledExperts] = (),
    ) -> None:
        self._kernel, self._top_k, self._moe = kernel, top_k, moe
        # Of each part, and behind the last, how many MoE layers come before it.
        self._moe_layers = [0, *accumulate(int(layer is not None) for layer in moe)]
        self._experts, self._arrays = inside, [self._experts_array(own) for own in ((), inside)]
        self._stopping, self._whole = map(self._model, self._arrays)

    @abstractmethod
    def _model(self, experts: Array[native.ExpertsRecord]) -> native.ModelRecord:
        """The model's record."""

    @abstractmethod
    def _begin(self, work: Sequence[Work]) -> CompiledPass:
        """The rows of a step, with room for them in the sequences' caches."""

    @abstractmethod
    def _end(self, work: Sequence[Work], step: CompiledPass) -> list[Tensor]:
        """The logits of each piece of work; the sequences grow."""

    def _routing(self, step: CompiledPass) -> Routing:
        """The choice of experts that the step has stopped for."""
        return step.routing(self._moe_layers[step.done])

    def takes(self, work: Sequence[Work]) -> bool:
        return True

    def __call__(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        step = self._begin(work)
        return self._finish(work, step, routed, step.go(self._stopping))

    def inside(self, work: Sequence[Work], experts: InsideExperts) -> list[Tensor]:
        """Logits; calls ``experts.passed`` for layers before ``experts.run`` for a later one."""
        assert self._experts
        step, waits = self._begin(work), True
        while waits:
            first = self._moe_layers[step.done]
            waits = step.go(self._whole)
            at = self._moe_layers[step.done]
            if first < at:
                experts.passed(first, at, step)
            if waits:
                step.give(experts.run(at, step, self._experts[at].call))
        return self._end(work, step)

    def in_lockstep(
        self, work: Sequence[Work], routed: RoutedExperts, group: RankGroup
    ) -> list[Tensor]:
        assert self._experts
        step = self._begin(work)
        rows, hidden = step.h_BH.shape
        all_to_all = group.native.step_address(rows, hidden, self._top_k)
        if all_to_all is None:
            return self._finish(work, step, routed, step.go(self._stopping))
        try:
            waits = group.native.run(lambda: step.go(self._whole, all_to_all))
        finally:
            group.passed(step, self._moe_layers[step.done])
        return self._finish(work, step, routed, bool(waits))

    def _finish(
        self, work: Sequence[Work], step: CompiledPass, routed: RoutedExperts, waits: bool
    ) -> list[Tensor]:
        """Logits; ``routed`` runs the experts of the layers that are left."""
        while waits:
            layer = self._moe[step.done]
            assert layer is not None
            step.give(routed(layer, step.h_BH, self._routing(step)))
            waits = step.go(self._stopping)
        return self._end(work, step)

    def _experts_array(self, inside: Sequence[CompiledExperts]) -> Array[native.ExpertsRecord]:
        """For C++: which MoE layer each part of the step is, and what runs its experts there."""
        experts = (native.ExpertsRecord * len(self._moe))()
        for record, layer, index in zip(experts, self._moe, self._moe_layers, strict=False):
            record.index = -1 if layer is None else index
            if layer is not None and inside:
                (record.forward, record.layer, record.activation, _), slots = inside[index]
                record.slots = None if slots is None else slots.data_ptr()
        return experts


class DescribedStep(CompiledStep):
    """A described model's step.

    Raises:
        NotDescribed: the compiled step does not take a size or dtype of the description.
    """

    keeps_hidden = True

    def __init__(
        self,
        description: Description,
        kernel: native.NativeDecode,
        inside: Sequence[CompiledExperts] = (),
    ) -> None:
        records, count = DescriptionRecords(), len(description.layers)
        self._description = description = _with_halves(description)
        self._kept = records
        joined, scale = description.embedding, description.embedding_scale
        self._joined = joined if isinstance(joined, MtpInput) and scale == 1.0 else None
        self._embedding = TokenEmbedding(
            joined if self._joined is None else self._joined.embedding, scale
        )
        self._join = None if self._joined is None else join_record(records, self._joined)
        self._records = (native.DecoderLayerRecord * count)(*map(records.layer, description.layers))
        self._norm, self._head = records.norm(description.norm), records.matrix(description.head)
        feeds = [layer.feed for layer in description.layers]
        self._feeds = [feed if isinstance(feed, Experts) else None for feed in feeds]
        known = [feed.router for feed in self._feeds if feed is not None]
        chosen = {router.rule.top_k for router in known if isinstance(router, Router)}
        if len(chosen) > 1:
            raise NotDescribed("layers choose different numbers of experts")
        self._caches = range(1 + max(layer.attention.layer for layer in description.layers))
        tables = [layer.attention.rotation for layer in description.layers]
        self._tables = RotaryRecords(
            (rotation.table, record.attention.rotation)
            for rotation, record in zip(tables, self._records, strict=True)
            if rotation is not None
        )
        moe = [None if feed is None else feed.layer for feed in self._feeds]
        super().__init__(kernel, moe, max(chosen, default=0), inside)

    @property
    def description(self) -> Description:
        """The description that the step computes."""
        return self._description

    @property
    def caches(self) -> Sequence[LayerKey]:
        """Layers that have keys and values."""
        return self._caches

    @property
    def kernel(self) -> native.NativeDecode:
        """Runs the step."""
        return self._kernel

    @property
    def routed(self) -> tuple[int, int]:
        """MoE layers, and experts that a row chooses."""
        return self._moe_layers[-1], self._top_k

    @property
    def whole(self) -> bool:
        """C++ does all of it, from tokens to logits."""
        compiled = bool(self._experts) or not self._moe_layers[-1]
        return compiled and self._embedding.holds(self._description.head.rows)

    def reserve(self, positions: int) -> None:
        """Make tables long enough for this many positions."""
        self._tables.reserve(positions)

    def why_no_prompts(self, floats: bool) -> str:
        """Why it cannot read prompts; empty if it can.

        Args:
            floats: our products of floats serve prompts, not torch's.
        """
        layers = self._description.layers
        rotations = (layer.attention.rotation for layer in layers)
        if any(each is not None and each.table.of_length for each in rotations):
            return "rotary tables that depend on the length"
        if self._joined is not None:
            return "rows that begin with hidden states"
        if not floats and not all(map(_has_planes, layers)):
            return "matrices of floats"
        return ""

    def prompts(self, work: Sequence[Work], routed: RoutedExperts) -> list[Tensor]:
        """Logits of each piece of work, which are prompts or parts of them; a token's bits do not
        depend on how its prompt is cut. Calls ``routed`` at every MoE layer."""
        for item in work:
            assert isinstance(item.cache, BlockKVCache)
            for layer in self._description.layers:
                item.cache.give_shape(layer.attention.layer, layer.attention.cache_shape)
        step = self._begin(work, PromptSpans(work))
        return self._finish(work, step, routed, step.go(self._stopping))

    def chain_model(self, head: native.MatrixRecord) -> native.ModelRecord:
        """The record of the whole step with another output head, which the caller keeps."""
        record = self._model(self._arrays[1])
        record.head = addressof(head)
        return record

    def _routing(self, step: CompiledPass) -> Routing:
        experts = self._feeds[step.done]
        assert experts is not None
        if isinstance(experts.router, Router):
            return super()._routing(step)
        return Routing.from_router(*experts.router.forward(step.h_BH), experts.num_experts)

    def _begin(self, work: Sequence[Work], prompts: PromptSpans | None = None) -> CompiledPass:
        places = CachePlaces(work, self._caches, prompts=prompts is not None)
        self._tables.reserve(places.end)
        rows, hidden = places.rows, self._embedding.width
        memory = torch.empty(3, rows, hidden, dtype=torch.float32)
        h_BH = torch.empty(rows, hidden, dtype=torch.float32)  # alone, as sequences may keep it
        self._embedding.fill(places, memory[0])
        x, h, beside = memory[0].data_ptr(), h_BH.data_ptr(), memory[1].data_ptr()
        record = native.StepRecord(
            rows, hidden, len(self._caches), x, h, beside, *places.pointers, None, *places.seen,
            *places.formats, torch.get_num_threads(), places.bounds, self._past(rows),
            None if prompts is None else addressof(prompts.record),
        )  # fmt: skip
        logits = rows if prompts is None else len(prompts.wanted)
        sizes = (logits, self._description.head.rows), self._moe_layers[-1], self._top_k
        kept = memory, places, prompts
        return CompiledPass(self._kernel, record, h_BH, memory[2], *sizes, kept)

    def _past(self, rows: int) -> int | None:
        """The address of the hidden states that rows of a multi-token-prediction layer begin with;
        None: they have none."""
        hidden = None if self._joined is None else self._joined.hidden_TH
        if hidden is None:
            return None
        self._hidden_BH = hidden.float().contiguous()  # kept until the next step
        assert self._hidden_BH.shape == (rows, self._embedding.width)
        return self._hidden_BH.data_ptr()

    def _end(self, work: Sequence[Work], step: CompiledPass) -> list[Tensor]:
        logits = step.logits_BV
        scale, softcap = self._description.logit_scale, self._description.logit_softcap
        if scale != 1.0:
            logits *= scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return finish_step(work, logits, step.h_BH)  # which the head has read

    def _model(self, experts: Array[native.ExpertsRecord]) -> native.ModelRecord:
        return native.ModelRecord(
            addressof(self._records), None, addressof(experts), addressof(self._norm),
            addressof(self._head), self._embedding.address, len(experts), self._top_k, PATIENCE,
            None if self._join is None else addressof(self._join),
        )  # fmt: skip


def join_record(records: DescriptionRecords, joined: MtpInput) -> native.JoinRecord:
    """The input of a multi-token-prediction layer."""
    width: int = joined.embedding_dim
    norms = [records.norm(describe_norm(each, width)) for each in (joined.enorm, joined.hnorm)]
    project = records.matrix(describe_projection(joined.projection))
    return native.JoinRecord(*norms, project, joined.hidden_first)


def _with_halves(description: Description) -> Description:
    """The same with expansions of latents as a CPU reads them."""
    layers = []
    for layer in description.layers:
        a = layer.attention
        if isinstance(a, LatentAttention):
            layer = replace(layer, attention=replace(a, kv_b=halved(a.kv_b, a.kv_b_leaf)))
        layers.append(layer)
    return replace(description, layers=tuple(layers))


def _has_planes(layer: Layer) -> bool:
    """Return whether all matrices but routers are bit planes, which our kernels multiply at any
    number of rows; products of floats are left to torch where those are faster."""
    a, feed = layer.attention, layer.feed
    own = feed.shared if isinstance(feed, Experts) else feed
    parts = [a.q, a.o]
    if isinstance(a, Attention):
        parts += [a.k, a.v]
    else:
        parts += [a.kv_a, describe_projection(a.kv_b_leaf), *([] if a.q_a is None else [a.q_a])]
    parts += [] if own is None else [own.gate, own.up, own.down]
    return all(isinstance(part.weight, PlaneMatrix) for part in parts)


class PromptSpans:
    """Which rows of a step are whose, and whose logits are wanted: the last of each piece of work,
    or all.

    Args:
        every: logits are made for all rows.
    """

    def __init__(self, work: Sequence[Work], *, every: bool = False) -> None:
        sizes = [len(item.token_ids) for item in work]
        self._first = np.cumsum([0, *sizes], dtype=np.int64)
        ends = zip(work, self._first, self._first[1:], strict=False)
        parts = [np.arange(a if every or item.all_logits else b - 1, b) for item, a, b in ends]
        self.wanted = np.concatenate(parts).astype(np.int64)
        self.record = native.PromptsRecord(
            len(work), self._first.ctypes.data, len(self.wanted), self.wanted.ctypes.data
        )


class TokenEmbedding:
    """The begin of a step's rows: C++ reads a plain table itself, other modules fill the rows.

    Attributes:
        width: H.
        address: of the table's record; None: `fill` has to be called with each step's rows.
    """

    def __init__(self, module: nn.Module, scale: float = 1.0) -> None:
        self._module, self._scale = module, scale
        self.width: int = module.embedding_dim  # type: ignore[assignment]
        self._count: int = module.num_embeddings  # type: ignore[assignment]
        self.address: int | None = None
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            return
        table, plain = module.weight, type(module) in (nn.Embedding, StoredEmbedding)
        if plain and table.is_contiguous() and table.dtype in (torch.float32, torch.bfloat16):
            self._record = native.EmbeddingRecord(table.data_ptr(), scale, DTYPES[table.dtype])
            self.address = addressof(self._record)

    def holds(self, tokens: int) -> bool:
        """C++ can read the rows of so many tokens."""
        return self.address is not None and tokens <= self._count

    def fill(self, places: CachePlaces, x_BH: Tensor) -> None:
        """Write the rows of a step's tokens, unless C++ does.

        Raises:
            IndexError: a token is not in the table.
        """
        if self.address is not None:
            if places.tokens.min() < 0 or places.tokens.max() >= self._count:
                raise IndexError(f"tokens must be in [0, {self._count}), got {places.tokens}")
        else:
            embedded = self._module(torch.from_numpy(places.tokens))
            x_BH.copy_(embedded * self._scale if self._scale != 1.0 else embedded)


class CachePlaces:
    """The places of a step's rows: each one's token and position, the block size of its caches, and
    their ``(layers, 2)`` tables.

    Attributes:
        rows: B.
        tokens: ``(B,)`` int64.
        pointers: to these four arrays.
        seen: addresses of what each row attends to, and of which key heads of each layer attend to
            all even so; None in place of the first: all rows attend to all.
        formats: of keys and of values, the same of all rows.
        bounds: whether blocks have the bounds of their keys.
        end: behind the last position.
    """

    def __init__(
        self, work: Sequence[Work], layers: Sequence[LayerKey], *, prompts: bool = False
    ) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        capacities: list[int] = []
        tables: list[np.ndarray] = []
        for item in work:
            cache, count = item.cache.kv, len(item.token_ids)
            cache.reserve(cache.length + count)
            tokens += item.token_ids
            positions += range(cache.length, cache.length + count)
            capacities += [cache.block_tokens] * count
            tables += [cache.tables(layers)] * count
        self.end, self.rows = max(positions) + 1, len(tokens)
        rows_3B = np.array([tokens, positions, capacities], np.int64)
        found = tables[0] if len(tables) == 1 else np.concatenate(tables)
        self._kept, self.tokens = (rows_3B, found), rows_3B[0]
        (form,) = {item.cache.kv.form for item in work}
        self.formats = [FormatRecord(*each) for each in form[:2]]
        self.bounds = form.bounds
        self.seen = (None, None) if prompts else self._seen(work, positions, layers)
        first, each = rows_3B.ctypes.data, rows_3B.strides[0]
        self.pointers = first, first + each, first + 2 * each, found.ctypes.data

    def _seen(
        self, work: Sequence[Work], positions: Sequence[int], layers: Sequence[LayerKey]
    ) -> tuple[int | None, int | None]:
        caches = [item.cache.kv for item in work for _ in item.token_ids]
        self._rows = [
            cache.seen(position) for cache, position in zip(caches, positions, strict=True)
        ]
        if not any(self._rows):
            return None, None
        self._records = (native.SeenRecord * self.rows)()
        for record, row in zip(self._records, self._rows, strict=True):
            if row is not None:
                record.blocks = None if row.blocks is None else row.blocks.ctypes.data
                record.count, record.most, record.newest = row.num_blocks, row.most, row.newest
                record.gap, record.gap_end = row.gap
        self._whole = caches[0].whole_heads(layers)  # all are of one pool
        whole = None if self._whole is None else self._whole.ctypes.data
        return addressof(self._records), whole


class RotaryRecords:
    """The rotary tables of a step, and the records that point to them."""

    def __init__(self, tables: Iterable[tuple[RotaryTable, native.RotationRecord]]) -> None:
        self._tables, self._reserved = list(tables), 0

    def reserve(self, positions: int) -> None:
        """Make the tables long enough."""
        if positions <= self._reserved:
            return
        self._reserved = _NO_LIMIT
        for table, record in self._tables:
            table.reserve(positions)
            point_to_table(record, table)
            self._reserved = min(self._reserved, table.cos.shape[0])
