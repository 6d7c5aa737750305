"""A layer's experts on the GPU: route, first projection, activation, second projection, sum.

The host reads nothing back, so a CUDA graph can capture a call (after a first call without one,
which measures tiles and compiles). The usual activations happen inside the first
projection; any other, and a norm after the experts, runs in torch between the kernels.

Shape legend as in kernels/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from kernels.cpu.activation import recognise
from kernels.planes import PlaneLayout, PlaneMatrix, QuantizedExperts
from kernels.reference import AnyExperts, ExpertWeights, check_rows, check_shapes
from kernels.scales import BLOCK_ROWS
from kernels.triton.arrange import arrange
from kernels.triton.dequantize import dequantized
from kernels.triton.grouped import project_whole
from kernels.triton.language import (
    DTYPES,
    Epilogue,
    masked_by,
    overlap_options,
    wait_for_others,
)
from kernels.triton.planes import (
    Addresses,
    address_table,
    addresses_of,
    project_planes,
    readable,
)
from kernels.triton.routing import Blocks, route, used_experts
from kernels.triton.tall import project_tall, reads, turned
from kernels.triton.tiles import (
    DECODE,
    PLANES,
    PREFILL,
    PREFILL_PLANES,
    TALL,
    PlaneTile,
    TallTile,
    Tile,
    choose,
)

_COLUMNS = 256  # of a program of `combine_kernel`
_MANY_ROWS = 32  # of an expert, from which on taller tiles pay
_PANEL_ROWS = 128
"""Rows of a matrix that `project_tall` cannot read, from which on its planes are dequantised
first."""
_MOST_TALL = 256
"""Rows of an expert from which on that is faster than `project_tall` (on an H100), too."""
PANEL_BYTES = 128 << 20
"""Memory of dequantised weights at most, but for one expert."""


@dataclass(frozen=True)
class _TritonPlan:
    epilogue: Epilogue
    tables_EP5: tuple[Tensor, ...]  # addresses of the planes; none for whole weights
    planes: int  # of each expert; 0 if they differ


_AnyTile = Tile | PlaneTile | TallTile

_plans: WeakKeyDictionary[AnyExperts, _TritonPlan] = WeakKeyDictionary()
_tables: WeakKeyDictionary[PlaneMatrix, tuple[Addresses, Tensor]] = WeakKeyDictionary()


def supports(hidden_TH: Tensor, experts: AnyExperts) -> bool:
    """Return whether the kernels know the dtypes and can read the weights where they lie."""
    device = hidden_TH.device
    if hidden_TH.dtype not in DTYPES:
        return False
    if isinstance(experts, QuantizedExperts):
        if {experts.first.arrangement, experts.second.arrangement} != {"cuda"}:
            return False
        return _readable(experts, device)
    weights = experts.gate_up_EGH, experts.down_EHF
    return all(w.device == device and w.dtype in DTYPES and w.is_contiguous() for w in weights)


def arrange_in_place(experts: QuantizedExperts, own: Sequence[int] | None) -> bool:
    """Arrange the planes of experts (None: of all) where they lie; whether they can be read there.

    All experts are one launch a projection, else each is. An object's addresses are looked up once.
    """
    device = experts.scales[0].device
    if not _readable(experts, device):
        return False
    tables = _plan(experts, device).tables_EP5
    for table, layout in zip(tables, (experts.first, experts.second), strict=True):
        for part in [table] if own is None else [table[expert, None] for expert in own]:
            arrange(part, layout)
    return True


def _readable(experts: QuantizedExperts, device: torch.device) -> bool:
    blobs = zip(experts.planes, experts.scales, strict=True)
    return experts in _plans or all(readable((*p, s), device) for p, s in blobs)


def supports_matrix(x_TK: Tensor, matrix: PlaneMatrix) -> bool:
    """Return whether the kernels know x's dtype and can read the planes where they lie."""
    if matrix.layout.arrangement != "cuda":
        return False
    blobs = *matrix.planes, matrix.scales
    return x_TK.dtype in DTYPES and (matrix in _tables or readable(blobs, x_TK.device))


def experts_forward(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: AnyExperts,
    add_to_TH: Tensor | None = None,
) -> Tensor:
    """As kernels.reference.experts_forward, without gradients; for layers that `supports` accepts.

    Products have the wider of the two dtypes, sums are float32, and each projection's output is
    rounded to hidden's dtype. A row's bits depend on its own inputs only; but weights of planes are
    rounded to hidden's dtype where experts have 256 rows or more on average, or 128 where not all
    have the same planes. The host does not see the ids: a token with an id outside [-1, E) gets a
    row of NaN.
    """
    check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
    if expert_ids_TK.numel() == 0:
        return torch.zeros_like(hidden_TH) if add_to_TH is None else add_to_TH
    ids_TK = expert_ids_TK.contiguous()
    row_SH = _Call(hidden_TH.contiguous(), ids_TK, experts).rows()
    weights_TK = weights_TK.to(torch.float32).contiguous()
    return combine(row_SH, ids_TK, weights_TK, experts.num_experts, add_to_TH)


class _Call:
    """One call of a layer's experts: its slots, their blocks, and the tiles of both projections."""

    def __init__(self, hidden_TH: Tensor, ids_TK: Tensor, experts: AnyExperts) -> None:
        self.hidden_TH, self.device, self.experts = hidden_TH, hidden_TH.device, experts
        self.ids_TK, self.share = ids_TK, ids_TK.shape[1]
        self.plan = _plan(experts, hidden_TH.device)
        self.distinct = min(experts.num_experts, experts.layer_experts or experts.num_experts)
        self.each = ids_TK.numel() / self.distinct
        self.inner_turned = False
        self._blocks: dict[int, Blocks] = {}

    def rows(self) -> Tensor:
        """(S, H) in hidden's dtype: each slot's expert output; unused slots hold junk."""
        experts, epilogue = self.experts, self.plan.epilogue
        biases = _dense(experts.gate_up_bias_EG), _dense(experts.down_bias_EH)
        if isinstance(experts, ExpertWeights):
            weights: tuple[Tensor | PlaneLayout, ...] = experts.gate_up_EGH, experts.down_EHF
        else:
            weights = experts.first, experts.second
        first = _Projection(self, 0, weights[0], biases[0], epilogue, self.share)
        second = _Projection(self, 1, weights[1], biases[1], Epilogue(), 1)
        self.inner_turned = first.tall and second.tall and epilogue.activation is not None
        tile = first.tile(self.hidden_TH, None)
        inner = first.forward(self.hidden_TH, tile)
        if epilogue.activation is None:
            inner = experts.activation(inner).to(inner.dtype).contiguous()
        rows = second.forward(inner, second.tile(inner, tile.rows))
        if experts.post_norm is not None:
            rows = experts.post_norm(rows).to(rows.dtype).contiguous()
        return rows

    def blocks(self, rows: int) -> Blocks:
        if rows not in self._blocks:
            experts = self.experts.num_experts
            self._blocks[rows] = route(self.ids_TK, experts, rows, self.distinct)
        return self._blocks[rows]


@dataclass(frozen=True)
class _Projection:
    """One projection of all slots, by whole weights or planes."""

    call: _Call
    index: int
    weights: Tensor | PlaneLayout
    bias_EW: Tensor | None
    epilogue: Epilogue
    share: int

    def tile(self, x_XK: Tensor, rows: int | None) -> _AnyTile:
        """The best tile, of so many rows where the first projection has chosen."""
        call, known = self.call, isinstance(self.weights, PlaneLayout)
        reference: _AnyTile = DECODE[0]
        some: tuple[_AnyTile, ...] = DECODE
        more: tuple[_AnyTile, ...] = PREFILL
        if self.tall:
            reference, more = TALL[0], TALL
        elif known and not self.in_panels:
            reference, some, more = PLANES[0], PLANES, PREFILL_PLANES
        many, parts = call.each >= _MANY_ROWS, 2 if self.epilogue.gated else 1
        fit = [tile for tile in (more if many else some) if self._fits(tile, x_XK.dtype, parts)]
        # The rows of the first projection, where these weights have such a tile.
        candidates = [tile for tile in fit if rows in (None, tile.rows)] or fit
        shape = (
            self.weights
            if isinstance(self.weights, PlaneLayout)
            else (self.weights.shape[1:], self.weights.dtype)
        )
        slots = call.ids_TK.numel()
        own = x_XK.device, x_XK.dtype, self.epilogue.parts, call.distinct, call.plan.planes, shape
        key = *own, rows, many, self.in_panels, self.tall, slots.bit_length() // 2

        def prepare() -> Callable[[_AnyTile], Callable[[], Tensor]]:
            # Of slots that are all in use: those at hand may be padding, with which kernels have
            # nothing to do.
            ids_S = torch.arange(slots, device=x_XK.device) % call.distinct
            full = _Call(call.hidden_TH, ids_S.view(call.ids_TK.shape), call.experts)
            projection = replace(self, call=full)
            generator = torch.Generator(x_XK.device).manual_seed(0)
            x = torch.empty_like(x_XK).normal_(generator=generator)

            def of(tile: _AnyTile) -> Callable[[], Tensor]:
                full.blocks(tile.rows)
                return lambda: projection.forward(x, tile)

            return of

        return choose(key, candidates or [reference], reference, prepare)

    def _fits(self, tile: _AnyTile, dtype: torch.dtype, parts: int) -> bool:
        if isinstance(tile, PlaneTile):
            assert isinstance(self.weights, PlaneLayout)
            return tile.fits(self.weights.format, self.call.plan.planes, dtype)
        return tile.fits(parts, dtype) if isinstance(tile, Tile) else tile.fits(parts)

    @property
    def in_panels(self) -> bool:
        """Return whether weights are decoded into panels first."""
        known = isinstance(self.weights, PlaneLayout) and not self.tall
        return known and self.call.each >= _PANEL_ROWS

    @property
    def tall(self) -> bool:
        """Return whether `project_tall` computes it."""
        call, weights = self.call, self.weights
        if not isinstance(weights, PlaneLayout) or call.plan.planes == 0:
            return False
        return _MANY_ROWS <= call.each < _MOST_TALL and reads(weights, call.device)

    def forward(self, x_XK: Tensor, tile: _AnyTile) -> Tensor:
        """(S, W), or (S, W / parts) of a known activation."""
        call, blocks = self.call, self.call.blocks(tile.rows)
        if isinstance(tile, TallTile):
            assert isinstance(self.weights, PlaneLayout)
            x_XK = x_XK if call.inner_turned and self.index else turned(x_XK)
            return project_tall(
                x_XK, call.plan.tables_EP5[self.index], self.weights, self.bias_EW, blocks, tile,
                planes=call.plan.planes, share=self.share, epilogue=self.epilogue,
                turn=call.inner_turned and not self.index,
            )  # fmt: skip
        if isinstance(tile, PlaneTile):
            assert isinstance(self.weights, PlaneLayout)
            return project_planes(
                x_XK, call.plan.tables_EP5[self.index], self.weights, self.bias_EW, blocks, tile,
                planes=call.plan.planes, share=self.share, epilogue=self.epilogue,
            )  # fmt: skip
        if not isinstance(self.weights, PlaneLayout):
            return project_whole(
                x_XK, self.weights, self.bias_EW, blocks, tile,
                share=self.share, epilogue=self.epilogue,
            )  # fmt: skip
        return self._in_panels(x_XK, self.weights, blocks, tile)

    def _in_panels(self, x_XK: Tensor, layout: PlaneLayout, blocks: Blocks, tile: Tile) -> Tensor:
        """By weights of some experts after the other, rounded to x's dtype."""
        table = self.call.plan.tables_EP5[self.index]
        expert_U, place_B = used_experts(blocks, self.call.distinct)
        one = self.epilogue.parts * layout.rows * layout.columns * x_XK.dtype.itemsize
        panel, output = max(1, PANEL_BYTES // one), None
        for begin in range(0, len(expert_U), panel):
            own = expert_U[begin : begin + panel]
            weights = dequantized(table, layout, x_XK.dtype, own, epilogue=self.epilogue)
            output = project_whole(
                x_XK, weights, self.bias_EW, blocks, tile,
                share=self.share, epilogue=self.epilogue,
                begin=begin, place_B=place_B, output_SN=output,
            )  # fmt: skip
        assert output is not None
        return output


def linear_forward(x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``x W^T + bias``: (T, N) in x's dtype, for what `supports_matrix` accepts; the arithmetic is
    that of kernels/triton/planes.py."""
    check_rows(x_TK, matrix)
    if x_TK.shape[0] == 0:
        return x_TK.new_zeros(0, matrix.layout.rows)
    x_TK, bias, layout = x_TK.contiguous(), _dense(matrix.bias), matrix.layout
    if matrix not in _tables:
        own = addresses_of(matrix.planes, matrix.scales, [layout], 0)
        _tables[matrix] = own, torch.tensor([[own]], dtype=torch.int64, device=x_TK.device)
    own, table = _tables[matrix]
    if len(x_TK) >= _PANEL_ROWS:
        return _linear_in_panels(x_TK, table, layout, bias)

    planes = len(matrix.planes)

    def prepare(tile: PlaneTile) -> Callable[[], Tensor]:
        return lambda: project_planes(x_TK, own, layout, bias, None, tile, planes=planes)

    key = x_TK.device, x_TK.dtype, layout, planes, len(x_TK).bit_length() // 2
    tiles = PREFILL_PLANES if len(x_TK) >= _MANY_ROWS else PLANES
    fit = [tile for tile in tiles if tile.fits(layout.format, planes, x_TK.dtype)]
    return prepare(choose(key, fit or PLANES[:1], PLANES[0], lambda: prepare))()


def _linear_in_panels(
    x_TK: Tensor, table: Tensor, layout: PlaneLayout, bias: Tensor | None
) -> Tensor:
    rows = max(1, PANEL_BYTES // (layout.columns * x_TK.dtype.itemsize * BLOCK_ROWS)) * BLOCK_ROWS
    only = torch.zeros(1, dtype=torch.int32, device=x_TK.device)
    output_TN = x_TK.new_empty(len(x_TK), layout.rows)
    for begin in range(0, layout.rows, rows):
        own = range(begin, min(begin + rows, layout.rows))
        weights = dequantized(table, layout, x_TK.dtype, only, rows=own)[0]
        output_TN[:, own.start : own.stop] = linear(x_TK, weights)
    return output_TN if bias is None else (output_TN + bias).to(x_TK.dtype)


def _plan(experts: AnyExperts, device: torch.device) -> _TritonPlan:
    plan = _plans.get(experts)
    if plan is None:
        tables: tuple[Tensor, ...] = ()
        planes = 0
        if isinstance(experts, QuantizedExperts):
            blobs, layouts = (experts.planes, experts.scales), experts.layouts
            first, second = range(experts.parts), range(experts.parts, experts.parts + 1)
            tables = tuple(address_table(*blobs, layouts, own, device) for own in (first, second))
            counts = set(map(len, experts.planes))
            planes = counts.pop() if len(counts) == 1 else 0
        plan = _plans[experts] = _TritonPlan(_epilogue(experts), tables, planes)
    return plan


def _epilogue(experts: AnyExperts) -> Epilogue:
    width = experts.intermediate_size
    if isinstance(experts, QuantizedExperts):
        ways = [(experts.parts, experts.interleaved)]
    else:
        parts = experts.gate_up_EGH.shape[1] // width
        ways = [(parts, False), (parts, True)] if parts == 2 else [(parts, False)]
    for parts, interleaved in ways:
        known = recognise(experts.activation, width, parts, interleaved) if parts <= 2 else None
        if known is not None:
            return Epilogue(parts, interleaved, known)
    return Epilogue(*ways[0])


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


@triton.jit
def combine_kernel(
    rows, ids, weights, output, experts, K, H,
    COLUMNS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < H
    sums = tl.zeros((COLUMNS,), tl.float32)
    if ADD:
        sums += tl.load(output + token * H + columns, mask=inside, other=0.0)
    for k in range(0, K):
        slot = token * K + k
        expert = tl.load(ids + slot)
        used = (expert >= 0) & (expert < experts)
        wanted = masked_by(inside, used)
        row = tl.load(rows + slot * H + columns, mask=wanted, other=0.0).to(tl.float32)
        weight = tl.load(weights + slot, mask=used, other=0.0)
        # The host never sees the ids: a token with a bad one becomes NaN.
        weight = tl.where((expert < -1) | (expert >= experts), float("nan"), weight)
        sums += weight * row
    tl.store(output + token * H + columns, sums.to(output.dtype.element_ty), mask=inside)


def combine(
    row_SH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: int,
    add_to_TH: Tensor | None = None,
) -> Tensor:
    """(T, H) in rows' dtype: ``sum_k weights[t, k] * rows[t * K + k]`` over the slots in use.

    In slot order and float32, without atomics; products are rounded before they are added, as in
    `kernels.weighted_sum`.

    A float32 sum so far is added to in place, and returned. A token with an id outside
    [-1, experts) becomes NaN.
    """
    tokens, slots = expert_ids_TK.shape
    output_TH = add_to_TH
    if output_TH is None:
        output_TH = torch.empty(tokens, row_SH.shape[1], dtype=row_SH.dtype, device=row_SH.device)
    combine_kernel[tokens, triton.cdiv(row_SH.shape[1], _COLUMNS)](
        row_SH, expert_ids_TK, weights_TK, output_TH, experts, slots, row_SH.shape[1],
        COLUMNS=_COLUMNS, ADD=add_to_TH is not None, enable_fp_fusion=False,
        **overlap_options(),
    )  # fmt: skip
    return output_TH
