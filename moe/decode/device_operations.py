"""A walk's operations on a GPU, and what they read that changes from step to step.

`DeviceOperations` computes a decode step with fused kernels (`kernels.triton.rows`) and attention
over the pool of blocks (`kernels.triton.attention`): between two products of a layer there is one
launch, two for attention. Nothing reads from the device or depends on values, so that CUDA graphs
can hold all of it; `GraphInputs` has what a replay reads anew.
Legend: B rows of a recording, H hidden, C columns of the block tables (blocks of the pool).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import is_
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import PlaneMatrix, linear_forward
from kernels.triton import attention
from kernels.triton.attention import BLOCK, KeyRows
from kernels.triton.router import logits, takes
from kernels.triton.rows import Heads, RowNorm, Turn, add_norm, add_shared, gated, place_heads
from moe.decode.joined import readers_of
from moe.decode.reference import Normed, chosen
from moe.describe.description import (
    Activation,
    Attention,
    Description,
    Experts,
    FeedForward,
    HeadNorm,
    LatentAttention,
    Norm,
    OwnRouter,
    Projection,
    RotaryTable,
    Rotation,
    View,
)
from moe.describe.parts import project
from moe.describe.routers import MOST_SCORED, by_kernel
from moe.kv.blocks import BlockKVCache
from moe.kv.device_blocks import DeviceBlocks, tables_of
from moe.network.packed_pass import Work, put_ahead
from routing import Routing
from routing.routing import UNUSED

_CURVES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}


class RowInputs(Protocol):
    """The inputs that all layers read of the rows of a pass.

    Attributes:
        slots: ``(B,)`` int64: where each row's keys and values go; -1: nowhere.
        firsts: by `View.span`, ``(B,)`` int32: the first key that each row sees.
        angles: of each rotary table ``(B, size / 2)`` cosines and sines.
        logits: ``(B, V)`` float32 that takes the logits; None: they get memory of their own.
    """

    @property
    def slots(self) -> Tensor: ...
    @property
    def firsts(self) -> Mapping[int, Tensor]: ...
    @property
    def angles(self) -> Mapping[RotaryTable, tuple[Tensor, Tensor]]: ...
    @property
    def logits(self) -> Tensor | None: ...

    def attend(self, query: Tensor, rows: KeyRows, firsts: Tensor, **how: Any) -> Tensor:
        """``(B, Q, V)`` attention to the blocks of each row's sequence; ``how``: of
        `kernels.triton.attention.attend`."""


class SharedRows:
    """Memory of at most ``most`` rows that recordings share; none runs while another one does.

    Attributes:
        tables: ``(most, C)`` int32: the blocks of each row's sequence.
        answers: ``(most, H)``: what a halt waits for.
        logits: ``(most, V)`` float32.
    """

    def __init__(self, most: int, description: Description, memory: DeviceBlocks) -> None:
        self.memory = memory
        how: dict[str, Any] = {"device": memory.device}
        self.tables = torch.zeros(most, memory.count, dtype=torch.int32, **how)
        self.answers = torch.zeros(most, description.norm.weight.numel(), dtype=memory.dtype, **how)
        self.logits = torch.zeros(most, description.head.rows, **how)
        self._numbers = list[np.ndarray]()  # the blocks of each row, as `tables` has them
        self._blocks = np.zeros((most, 0), np.int32)  # the same as one array

    def send(self, numbers: Sequence[np.ndarray]) -> np.ndarray:
        """Send the blocks of the first rows, unless the device has them; padding reads none.

        Returns:
            ``(rows, most blocks)``, on the host.
        """
        if len(numbers) == len(self._numbers) and all(map(is_, numbers, self._numbers)):
            return self._blocks
        self._numbers, self._blocks = [*numbers], tables_of(numbers)
        if numbers:
            rows, most = self._blocks.shape
            _send(self.tables[:rows, :most], self._blocks)
        return self._blocks


class GraphInputs:
    """Tokens, places and angles of at most ``count`` rows; the others are padding.

    All but the tables is one piece of memory, so that a step sends one copy; tables follow when a
    row has another sequence or a new block.

    Attributes:
        tokens: ``(B,)`` int64, 0 in padding.
        slots: ``(B,)`` int64: where each row's keys and values go; -1 in padding.
        spans: ``(B, 4)`` int32, as `kernels.triton.attention` reads it; each row is a span.
        firsts: by `View.span`, ``(B,)`` int32: the first key that each row sees.
        angles: of each rotary table ``(B, size / 2)`` cosines and sines.
        tables, answers, logits: of `SharedRows`, the first B rows.
    """

    def __init__(self, count: int, description: Description, shared: SharedRows) -> None:
        device, self._shared = shared.memory.device, shared
        self.tables, self.answers = shared.tables[:count], shared.answers[:count]
        self.logits = shared.logits[:count]
        attentions = [layer.attention for layer in description.layers]
        turns = [a.rotation.table for a in attentions if a.rotation is not None]
        self._rotary = list(dict.fromkeys(turns))
        reaches = sorted({a.view.span for a in attentions})
        sizes = [table.cos.shape[1] for table in self._rotary for _ in range(2)]
        parts = _parts(count, len(reaches), sizes)
        self._memory = torch.zeros(parts[-1].end, dtype=torch.uint8, device=device)
        # A step is put together while the device may not have read the one before.
        self._staged = cycle([_Staged(parts, device) for _ in range(2)])
        longs, ints, *angles = _views(self._memory, parts)
        self.tokens, self.slots = longs
        self.spans, self.firsts = ints[:4].view(count, 4), dict(zip(reaches, ints[4:], strict=True))
        pairs = iter(angles)
        self.angles = dict(zip(self._rotary, zip(pairs, pairs, strict=True), strict=True))
        self.fill([])

    def attend(self, query: Tensor, rows: KeyRows, firsts: Tensor, **how: Any) -> Tensor:
        """See `RowInputs`."""
        placed = rows._replace(tables=self.tables)
        return attention.attend(query, placed, self.spans, firsts, **how)

    def fill(self, work: Sequence[Work]) -> None:
        """Put new tokens and where their sequences are in place, without waiting for the device."""
        count, begins, tokens = self.tokens.shape[0], list[int](), list[int]()
        sizes, numbers = list[int](), list[np.ndarray]()
        for item in work:
            cache, new = item.cache, len(item.token_ids)
            assert isinstance(cache, BlockKVCache)
            cache.reserve(cache.length + new)
            begins.append(cache.length - len(tokens))
            tokens += item.token_ids
            sizes.append(new)
            numbers += [cache.block_numbers] * new
        own, rows = slice(len(tokens)), np.arange(len(tokens))
        positions = rows + np.repeat(np.array(begins, np.int64), sizes)
        blocks = self._shared.send(numbers)
        staged = next(self._staged)
        staged.wait()
        longs, ints = staged.longs, staged.ints
        longs[0], longs[1], ints[:] = 0, -1, 0
        longs[0, own] = tokens
        longs[1, own] = blocks[rows, positions // BLOCK] * BLOCK + positions % BLOCK
        spans = ints[:4].reshape(count, 4)
        spans[:, 1] = spans[:, 0] = np.arange(count)
        spans[own, 2], spans[own, 3] = 1, positions
        for row, reach in zip(ints[4:], self.firsts, strict=True):
            row[own] = first_keys(reach, positions)
        parts, at, most = iter(staged.angles), torch.from_numpy(positions), positions.max(initial=0)
        for table in self._rotary:
            table.reserve(int(most) + 1)
            for values in (table.cos, table.sin):  # padding may turn by any angles
                torch.index_select(values, 0, at, out=next(parts)[own])
        staged.send(self._memory)
        put_ahead(work, self.tokens)


class _Part(NamedTuple):
    """An array in a piece of bytes."""

    begin: int
    end: int
    kind: str
    shape: tuple[int, ...]


def _parts(count: int, reaches: int, angles: Sequence[int]) -> list[_Part]:
    """Tokens and slots, spans and first keys, and angles of a step of so many rows; each array
    begins at a multiple of 16 bytes."""
    kinds: list[tuple[str, tuple[int, ...]]] = [("int64", (2, count))]
    kinds += [("int32", (4 + reaches, count)), *(("float32", (count, size)) for size in angles)]
    parts, end = list[_Part](), 0
    for kind, shape in kinds:
        begin = -(-end // 16) * 16
        end = begin + np.dtype(kind).itemsize * math.prod(shape)
        parts.append(_Part(begin, end, kind, shape))
    return parts


def _views(memory: Tensor, parts: Sequence[_Part]) -> Iterator[Tensor]:
    for part in parts:
        own = memory[part.begin : part.end]
        yield own.view(getattr(torch, part.kind)).view(part.shape)


class _Staged:
    """Main memory in which a step's inputs are put together, and from which a device copies them.

    Attributes:
        longs, ints, angles: what is in it, as `_parts` says.
    """

    def __init__(self, parts: Sequence[_Part], device: torch.device) -> None:
        # An event that was never recorded has happened.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        pinned = self._copied is not None
        self._memory = torch.zeros(parts[-1].end, dtype=torch.uint8, pin_memory=pinned)
        longs, ints, *self.angles = _views(self._memory, parts)
        self.longs, self.ints = longs.numpy(), ints.numpy()

    def wait(self) -> None:
        """Until the device has what was sent last."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, to: Tensor) -> None:
        """Copy all of it, without waiting for the device."""
        to.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _send(to: Tensor, values: np.ndarray) -> None:
    given = torch.from_numpy(values)
    # torch keeps a pinned block from being used again until the device has read it.
    to.copy_(given.pin_memory() if to.is_cuda else given, non_blocking=True)


def first_keys(reach: int, positions: np.ndarray) -> np.ndarray:
    """The first key that a query sees at each position; ``reach`` is a `View.span`."""
    if reach < 0:
        return positions // -reach * -reach
    return np.maximum(positions - reach + 1, 0) if reach else np.zeros_like(positions)


@dataclass(frozen=True)
class DeviceOperations:
    """See `moe.decode.reference.StepOperations`. Rows are rounded to the dtype of what they meet: a
    weight, or the pool's.

    Attributes:
        inputs: of the rows at hand.
        memory: of the blocks.
    """

    inputs: RowInputs
    memory: DeviceBlocks

    def project(self, projection: Projection, rows: Normed | Tensor) -> Tensor:
        return _biased(projection, self._product(projection.weight, rows))

    def add(
        self, x: Tensor, rows: Tensor | None, scale: float, post: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Normed]:
        normed = Normed(torch.empty_like(x), torch.empty_like(x, dtype=self.memory.dtype))
        added = None if rows is None else rows.contiguous()
        add_norm(x, added, scale, _row_norm(post), _row_norm(norm), *normed)
        return x, normed

    def feed(self, feed: FeedForward, rows: Normed) -> Tensor:
        both = self._products(feed, rows)
        gate, up = map(_biased, (feed.gate, feed.up), both)
        output = gate.new_empty(gate.shape, dtype=self._dtype_of(feed.down.weight))
        gated(gate, up, _CURVES[feed.activation], output)
        return self.project(feed.down, output)

    def route(self, feed: Experts, rows: Normed) -> Routing:
        """Padding visits nobody."""
        router, places = feed.router, self.inputs.slots
        if isinstance(router, OwnRouter) or feed.num_experts > MOST_SCORED:
            return _without(chosen(feed, rows.exact), places < 0)
        weight = router.weight.weight
        if isinstance(weight, Tensor) and takes(len(places), weight):
            made = logits(rows.exact, weight, router.weight.bias)
        else:
            made = project(router.weight, rows.exact)
        return by_kernel(router.rule, made, places)

    def add_shared(
        self, routed: Tensor, scale: float, shared: Tensor, gate: Tensor | None
    ) -> Tensor:
        output = torch.empty_like(routed, dtype=torch.float32)
        add_shared(routed.contiguous(), scale, shared, gate, output)
        return output

    def logits(self, head: Projection, rows: Normed) -> Tensor:
        made, kept = self.project(head, rows), self.inputs.logits
        return made.float() if kept is None else kept.copy_(made)

    def attend(self, a: Attention, rows: Normed) -> Tensor:
        own = self.memory.layer_rows(a.layer, a.cache_shape)
        assert own.values is not None
        query = own.keys.new_empty(rows.exact.shape[0], a.heads, a.head_dim)
        turn = self._turn_by(a.rotation)
        q, k, v = self._products(a, rows)
        place_heads(
            self._heads(q, a.q, a.heads, a.q_norm, turn),
            self._heads(k, a.k, a.kv_heads, a.k_norm, turn),
            Heads(v.unflatten(1, (a.kv_heads, a.value_dim)), a.v.bias),
            query, own.keys, own.values, self.inputs.slots,
        )  # fmt: skip
        dtype = self._dtype_of(a.o.weight)
        return self.project(a.o, self._attend(query, own, a.view, dtype).flatten(1))

    def attend_latent(self, a: LatentAttention, rows: Normed) -> Tensor:
        q, kv = map(_biased, readers_of(a), self._products(a, rows))
        if a.q_a is not None and a.q_a_norm is not None:
            q = self.project(a.q, self._norm(q, a.q_a_norm))
        both, kv, size = q.unflatten(1, (a.heads, -1)), kv[:, None], a.kv_b.shape[-1]
        turn = self._turn_by(a.rotation)
        own = self.memory.layer_rows(a.layer, a.cache_shape)
        assert own.values is not None
        turned = own.keys.new_empty(both.shape[0], a.heads, a.rotation.size)
        place_heads(
            Heads(both[..., a.plain_dim :], turn=turn),
            Heads(kv[..., :size], norm=_row_norm(a.kv_norm)), Heads(kv[..., size:], turn=turn),
            turned, own.keys, own.values, self.inputs.slots,
        )  # fmt: skip
        values = self._attend_latents(a, both[..., : a.plain_dim], turned, own)
        return self.project(a.o, values.flatten(1))

    def _attend_latents(
        self, a: LatentAttention, plain: Tensor, turned: Tensor, own: KeyRows
    ) -> Tensor:
        """``(B, Q, V)`` of queries ``(B, Q, plain)``, with their turned parts: they meet latents,
        and so do the sums of them."""
        matrix = a.kv_b
        inward = torch.einsum("bhp,hpr->bhr", plain.to(matrix.dtype), matrix[:, : a.plain_dim])
        latent = KeyRows(own.keys, None, own.values)
        query = inward.to(self.memory.dtype).contiguous()
        sums = self._attend(query, latent, a.view, matrix.dtype, turned)
        return torch.einsum("bhr,hvr->bhv", sums, matrix[:, a.plain_dim :])

    def _attend(
        self, query: Tensor, own: KeyRows, view: View, dtype: torch.dtype,
        second: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        how: dict[str, Any] = {name: getattr(view, name) for name in ("scale", "softcap", "sinks")}
        firsts = self.inputs.firsts[view.span]
        return self.inputs.attend(query, own, firsts, second=second, dtype=dtype, **how)

    def _heads(
        self, given: Tensor, projection: Projection, heads: int, norm: HeadNorm | None,
        turn: Turn | None,
    ) -> Heads:  # fmt: skip
        """Return a projection's output, and what the kernel makes of it."""
        if norm is not None and not norm.per_head:  # of all heads at once: a launch of its own
            normed = self._norm(_biased(projection, given), norm.norm)
            return Heads(normed.exact.unflatten(1, (heads, -1)), turn=turn)
        own = None if norm is None else _row_norm(norm.norm)
        late = norm is not None and norm.after_rotation
        return Heads(given.unflatten(1, (heads, -1)), projection.bias, own, turn, late)

    def _norm(self, rows: Tensor, norm: Norm) -> Normed:
        return self.add(rows.float().contiguous(), None, 1.0, None, norm)[1]

    def _products(
        self, part: Attention | LatentAttention | FeedForward, rows: Normed
    ) -> Sequence[Tensor]:
        """Return the outputs of the projections that read a part's rows, as `_product`."""
        readers = readers_of(part)
        if part.joined is None:
            return [self._product(projection.weight, rows) for projection in readers]
        return self._product(part.joined, rows).split([own.rows for own in readers], 1)

    def _product(self, weight: Tensor | PlaneMatrix, rows: Normed | Tensor) -> Tensor:
        """Without a bias, in the dtype that the product has."""
        dtype = self._dtype_of(weight)
        given: Normed | Tensor = rows
        if isinstance(rows, Normed):
            given = rows.rounded if rows.rounded.dtype == dtype else rows.exact
        assert isinstance(given, Tensor)
        given = given.to(dtype)
        return (
            linear(given, weight) if isinstance(weight, Tensor) else linear_forward(given, weight)
        )

    def _dtype_of(self, weight: Tensor | PlaneMatrix) -> torch.dtype:
        """The dtype of the rows that a product reads."""
        return weight.dtype if isinstance(weight, Tensor) else self.memory.dtype

    def _turn_by(self, rotation: Rotation | None) -> Turn | None:
        if rotation is None:
            return None
        angles = self.inputs.angles[rotation.table]
        return Turn(rotation.style, rotation.begin, rotation.size, *angles)


def _biased(projection: Projection, output: Tensor) -> Tensor:
    return output if projection.bias is None else output.float() + projection.bias


def _without(routing: Routing, rows: Tensor) -> Routing:
    """The routing with no experts for these rows, ``(B,)`` bool."""
    ids = routing.expert_ids.masked_fill(rows[:, None], UNUSED)
    return Routing(ids, routing.weights.masked_fill(rows[:, None], 0.0))


def _row_norm(norm: Norm | None) -> RowNorm | None:
    return None if norm is None else RowNorm(norm.weight, norm.bias, norm.eps, norm.centered)
