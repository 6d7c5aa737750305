"""A layer's experts on the GPU: route, first projection, activation, second projection, sum.

The host reads nothing back, so a CUDA graph can capture a call (after a first call without one,
which measures tiles and compiles). The usual activations happen inside the first
projection; any other, and a norm after the experts, runs in torch between the kernels.

Shape legend as in kernels/reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.activation import recognise
from kernels.planes import PlaneMatrix, QuantizedExperts
from kernels.reference import AnyExperts, ExpertWeights, check_rows, check_shapes
from kernels.triton.grouped import address_table, project_planes, project_whole, readable
from kernels.triton.language import DTYPES, Epilogue, masked_by
from kernels.triton.routing import Blocks, one_group, route
from kernels.triton.tiles import Tile, choose

_COLUMNS = 256  # of a program of `combine_kernel`


@dataclass(frozen=True)
class _TritonPlan:
    epilogue: Epilogue
    table_E5: Tensor | None  # addresses of the planes; None for whole weights


_plans: WeakKeyDictionary[AnyExperts, _TritonPlan] = WeakKeyDictionary()
_tables: WeakKeyDictionary[PlaneMatrix, Tensor] = WeakKeyDictionary()


def supports(hidden_TH: Tensor, experts: AnyExperts) -> bool:
    """Whether the kernels know the dtypes and can read the weights where they lie."""
    device = hidden_TH.device
    if hidden_TH.dtype not in DTYPES:
        return False
    if isinstance(experts, QuantizedExperts):
        if {experts.first.scales, experts.second.scales} != {"symmetric"}:
            return False
        blobs = zip(experts.planes, experts.scales, strict=True)
        return experts in _plans or all(readable((*p, s), device) for p, s in blobs)
    weights = experts.gate_up_EGH, experts.down_EHF
    return all(w.device == device and w.dtype in DTYPES and w.is_contiguous() for w in weights)


def supports_matrix(x_TK: Tensor, matrix: PlaneMatrix) -> bool:
    """Whether the kernels know x's dtype and can read the planes where they lie."""
    if matrix.layout.scales != "symmetric":
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
    rounded to hidden's dtype. A row's bits depend on its own inputs only. The host does not see the
    ids: a token with an id outside [-1, E) gets a row of NaN.
    """
    check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
    if expert_ids_TK.numel() == 0:
        return torch.zeros_like(hidden_TH) if add_to_TH is None else add_to_TH
    hidden_TH, ids_TK = hidden_TH.contiguous(), expert_ids_TK.contiguous()
    weights_TK = weights_TK.to(torch.float32).contiguous()
    plan = _plan(experts, hidden_TH.device)

    def run(tile: Tile) -> Tensor:
        blocks = route(ids_TK, experts.num_experts, tile.rows)
        row_SH = _run_slots(hidden_TH, ids_TK.shape[1], experts, plan, blocks, tile)
        return combine(row_SH, ids_TK, weights_TK, experts.num_experts, add_to)

    add_to = None  # while tiles are measured on this very call
    tile = choose(_key(hidden_TH, experts), ids_TK.numel() / experts.num_experts, run)
    add_to = add_to_TH
    return run(tile)


def linear_forward(x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``x W^T + bias``: (T, N) in x's dtype, for what `supports_matrix` accepts; the arithmetic is
    that of kernels/triton/grouped.py."""
    check_rows(x_TK, matrix)
    if x_TK.shape[0] == 0:
        return x_TK.new_zeros(0, matrix.layout.rows)
    x_TK, bias = x_TK.contiguous(), _dense(matrix.bias)
    table = _tables.get(matrix)
    if table is None:
        table = address_table([matrix.planes], [matrix.scales], x_TK.device)
        _tables[matrix] = table

    def run(tile: Tile) -> Tensor:
        blocks = one_group(x_TK.shape[0], tile.rows, x_TK.device)
        return project_planes(x_TK, table, bias, matrix.layout, blocks, tile)

    return run(choose((x_TK.device, x_TK.dtype, matrix.layout), x_TK.shape[0], run))


def _run_slots(
    hidden_TH: Tensor,
    share: int,
    experts: AnyExperts,
    plan: _TritonPlan,
    blocks: Blocks,
    tile: Tile,
) -> Tensor:
    """(S, H) in hidden's dtype: each slot's expert output; unused slots hold junk."""
    table, epilogue = plan.table_E5, plan.epilogue
    first_bias, second_bias = _dense(experts.gate_up_bias_EG), _dense(experts.down_bias_EH)
    if isinstance(experts, ExpertWeights):
        first, second = experts.gate_up_EGH, experts.down_EHF
        inner = project_whole(
            hidden_TH, first, first_bias, blocks, tile, share=share, epilogue=epilogue
        )
        inner = _activate(inner, experts, epilogue)
        rows = project_whole(inner, second, second_bias, blocks, tile)
    else:
        assert table is not None
        inner = project_planes(
            hidden_TH,
            table,
            first_bias,
            experts.first,
            blocks,
            tile,
            share=share,
            epilogue=epilogue,
        )
        inner = _activate(inner, experts, epilogue)
        before = experts.parts * experts.first.padded_rows * experts.first.padded_columns
        rows = project_planes(
            inner, table, second_bias, experts.second, blocks, tile, before=before
        )
    if experts.post_norm is not None:
        rows = experts.post_norm(rows).to(hidden_TH.dtype).contiguous()
    return rows


def _activate(projected: Tensor, experts: AnyExperts, epilogue: Epilogue) -> Tensor:
    if epilogue.activation is not None:
        return projected
    return experts.activation(projected).to(projected.dtype).contiguous()


def _plan(experts: AnyExperts, device: torch.device) -> _TritonPlan:
    plan = _plans.get(experts)
    if plan is None:
        table = None
        if isinstance(experts, QuantizedExperts):
            table = address_table(experts.planes, experts.scales, device)
        plan = _plans[experts] = _TritonPlan(_epilogue(experts), table)
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


def _key(hidden_TH: Tensor, experts: AnyExperts) -> tuple[object, ...]:
    """What decides which tile is fastest."""
    if isinstance(experts, ExpertWeights):
        shapes: tuple[object, ...] = experts.gate_up_EGH.shape, experts.gate_up_EGH.dtype
    else:
        shapes = experts.num_experts, experts.parts, experts.first
    return hidden_TH.device, hidden_TH.dtype, experts.intermediate_size, *shapes


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


@triton.jit
def combine_kernel(
    rows, ids, weights, output, experts, K, H, COLUMNS: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
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
    )  # fmt: skip
    return output_TH
