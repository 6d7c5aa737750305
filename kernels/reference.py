"""One MoE layer's experts in plain torch: the layout of the weights and the oracle of every kernel.

Clarity before speed: a loop over the experts that were chosen, two matrix products each, and a
weighted sum in a fixed order, so that a row's result does not depend on its neighbours.
Differentiable, on any device.

The arithmetic on bit planes is part of their format: every CPU kernel gives the same numbers.
Activations are quantised to 8 bits row by row and group by group: with ``a`` the largest magnitude
of a group, ``scale = a / 127`` and ``q = rint(x * (127 / a))``; below `TINY` a group is zero.
A group's dot product, ``q * (code - 136)``, is a sum of integers and therefore exact. The products
``(weight scale * activation scale) * dot`` are added in float32 in the order of the groups. The
activation's output is quantised in the same way for the second projection. Experts with
``row_bits`` of 24 keep their activations; CPU kernels then add three such products, each of what
the ones before it leave of the activations.

Weights with a file's own scales (kernels/scales.py) are multiplied by activations in groups of 32.
There the kernels share the numbers, but may add them up in another order.

Shape legend: T tokens, H hidden, K slots a token (top_k), E experts, F expert intermediate width,
G = 2F for gated experts and F otherwise, S = T*K slots, R the rows of one expert; N rows, K columns
and D groups a row of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kernels import planes
from kernels.planes import ZERO_CODE, PlaneMatrix, QuantizedExperts
from kernels.scales import BLOCK_ROWS

TINY = 2.0**-100
_MAX_CODE = 127


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The experts of one MoE layer in canonical layout; compared and hashed by identity.

    Attributes:
        gate_up_EGH: (E, G, H) first projection; for gated experts gate and up rows in the
            architecture's own order (concatenated or interleaved).
        down_EHF: (E, H, F) second projection, same dtype and device.
        activation: (S, G) -> (S, F), the architecture's own gate and activation, row by row.
        gate_up_bias_EG: (E, G) added to the first projection.
        down_bias_EH: (E, H) added to the second projection.
        post_norm: (S, H) -> (S, H), applied to each expert's output row before its routing weight.
        layer_experts: the most experts that a call asks for, where these are slots of several
            layers; None: all of them.
    """

    gate_up_EGH: Tensor
    down_EHF: Tensor
    activation: Callable[[Tensor], Tensor]
    gate_up_bias_EG: Tensor | None = None
    down_bias_EH: Tensor | None = None
    post_norm: Callable[[Tensor], Tensor] | None = None
    layer_experts: int | None = None

    def __post_init__(self) -> None:
        experts, _, hidden = self.gate_up_EGH.shape
        if self.down_EHF.shape[:2] != (experts, hidden):
            raise ValueError(
                f"down_EHF must be (E, H, F) with E={experts} and H={hidden} as in gate_up_EGH "
                f"{tuple(self.gate_up_EGH.shape)}, got {tuple(self.down_EHF.shape)}"
            )
        if self.down_EHF.dtype != self.gate_up_EGH.dtype:
            raise ValueError(
                f"gate_up_EGH and down_EHF must have one dtype, got {self.gate_up_EGH.dtype} "
                f"and {self.down_EHF.dtype}"
            )

    @property
    def num_experts(self) -> int:
        return self.gate_up_EGH.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.gate_up_EGH.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.down_EHF.shape[2]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: both projections and their biases."""
        parts = (self.gate_up_EGH, self.down_EHF, self.gate_up_bias_EG, self.down_bias_EH)
        return sum(part[0].numel() * part.element_size() for part in parts if part is not None)


AnyExperts = ExpertWeights | QuantizedExperts


def experts_forward(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: AnyExperts,
    add_to_TH: Tensor | None = None,
) -> Tensor:
    """Each token's weighted sum of its experts: `sum_k weights[t, k] * expert_k(hidden[t])`.

    Args:
        hidden_TH: (T, H) activations; T = 0 is fine.
        expert_ids_TK: (T, K) integers in [0, E), -1 for an unused slot.
        weights_TK: (T, K) routing weights.
        experts: the layer's weights.
        add_to_TH: (T, H) in the dtype of the sum, contiguous: what other slots have given so far.

    Returns:
        (T, H) in hidden's dtype, zero where a token uses no slot. Projections run in the weights'
        dtype, except for half precision on the CPU, where each expert is upcast to float32 (half
        arithmetic is slow there), and for quantised experts (see above). The sum
        runs in float32 (float64 for float64 weights), in slot order. With ``add_to_TH``, the sum is
        added to it in place, and it is returned: calls for ascending ranges of experts, the first
        with zeros, then give the bits of one call, if each token's slots are in ascending order.

    Raises:
        ValueError: an expert id outside [-1, E) or shapes that do not fit.
    """
    check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
    compute, accumulate = _dtypes(experts)
    ids_S = expert_ids_TK.reshape(-1)
    used = torch.unique(ids_S).tolist()
    if used and not (used[0] >= -1 and used[-1] < experts.num_experts):
        raise id_error(experts)
    num_slots = expert_ids_TK.shape[1]
    slots, rows = [], []
    for expert in (e for e in used if e >= 0):
        slot_R = (ids_S == expert).nonzero().squeeze(1)
        row_RH = hidden_TH[slot_R // num_slots].to(compute)
        rows.append(_one_expert(row_RH, expert, experts).to(accumulate))
        slots.append(slot_R)
    output_TH = add_to_TH
    if output_TH is None:
        output_TH = torch.zeros(hidden_TH.shape, dtype=accumulate, device=hidden_TH.device)
    if not rows:
        return output_TH if add_to_TH is not None else output_TH.to(hidden_TH.dtype)
    order_S = torch.cat(slots)
    zeros_SH = output_TH.new_zeros(ids_S.shape[0], hidden_TH.shape[1])
    row_TKH = zeros_SH.index_copy(0, order_S, torch.cat(rows)).view(
        *expert_ids_TK.shape, hidden_TH.shape[1]
    )
    weights_TK = weights_TK.to(accumulate).masked_fill(expert_ids_TK < 0, 0)
    for k in range(num_slots):
        output_TH += weights_TK[:, k, None] * row_TKH[:, k]
    return output_TH if add_to_TH is not None else output_TH.to(hidden_TH.dtype)


def linear_forward(x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``x W^T + bias`` of bit planes: (T, N) in x's dtype.

    Raises:
        ValueError: x is not (T, K).
    """
    check_rows(x_TK, matrix)
    return _project_planes(x_TK, matrix, matrix.bias).to(x_TK.dtype)


def matrix_rows(ids_T: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``(T, K)`` float32: rows of the weights, of ids in range."""
    layout = matrix.layout
    block_T = ids_T // BLOCK_ROWS

    def blocks(blob: Tensor) -> Tensor:
        return blob.view(layout.num_blocks, -1)[block_T].flatten()

    planes_, scales = [blocks(plane) for plane in matrix.planes], blocks(matrix.scales)
    own = replace(layout, rows=BLOCK_ROWS * len(ids_T))
    rows_TRK = planes.dequantize(planes_, scales, own).unflatten(0, (-1, BLOCK_ROWS))
    return rows_TRK[torch.arange(len(ids_T)), ids_T % BLOCK_ROWS]


def check_shapes(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: AnyExperts,
    add_to_TH: Tensor | None = None,
) -> None:
    """Raise ValueError where the shapes of hidden, ids, weights and sum do not fit each other."""
    if hidden_TH.dim() != 2 or hidden_TH.shape[1] != experts.hidden_size:
        raise ValueError(
            f"hidden must be (T, {experts.hidden_size}) for these experts, "
            f"got {tuple(hidden_TH.shape)}"
        )
    ids_shape = expert_ids_TK.shape
    if len(ids_shape) != 2 or ids_shape[0] != hidden_TH.shape[0] or weights_TK.shape != ids_shape:
        raise ValueError(
            f"expert ids and weights must both be (T, K) with T={hidden_TH.shape[0]}, "
            f"got {tuple(ids_shape)} and {tuple(weights_TK.shape)}"
        )
    accumulate = sum_dtype(experts)
    if add_to_TH is not None and (
        add_to_TH.shape != hidden_TH.shape
        or add_to_TH.dtype != accumulate
        or not add_to_TH.is_contiguous()
    ):
        raise ValueError(
            f"the sum so far must be {tuple(hidden_TH.shape)} {accumulate} and contiguous, "
            f"got {tuple(add_to_TH.shape)} {add_to_TH.dtype}"
        )


def check_rows(x_TK: Tensor, matrix: PlaneMatrix) -> None:
    """Raise ValueError where x is not (T, K)."""
    if x_TK.dim() != 2 or x_TK.shape[1] != matrix.layout.columns:
        raise ValueError(f"x must be (T, {matrix.layout.columns}), got {tuple(x_TK.shape)}")


def quantize_rows(x_TK: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Activations as (T, D, group_size) whole numbers in float32 and (T, D) float32 scales."""
    x_TDG = pad(x_TK.float(), (0, -x_TK.shape[1] % group_size)).unflatten(1, (-1, group_size))
    largest_TD = x_TDG.abs().amax(-1)
    tiny_TD = largest_TD < TINY
    largest_TD = largest_TD.masked_fill(tiny_TD, 0.0)
    # Kernels round one division and one multiplication; torch would compute `127 / tensor` as a
    # reciprocal and a product.
    inverse_TD = (largest_TD.new_tensor(_MAX_CODE) / largest_TD).masked_fill(tiny_TD, 0.0)
    return torch.round(x_TDG * inverse_TD[..., None]), largest_TD / _MAX_CODE


def sum_dtype(experts: AnyExperts) -> torch.dtype:
    """The dtype of the sum over a token's slots."""
    return _dtypes(experts)[1]


def id_error(experts: AnyExperts) -> ValueError:
    """The error for an expert id out of range."""
    return ValueError(
        f"expert ids must be in [0, {experts.num_experts}), or -1 for an unused slot; "
        "an id outside that range was given"
    )


def _one_expert(row_RH: Tensor, expert: int, experts: AnyExperts) -> Tensor:
    if isinstance(experts, QuantizedExperts):
        return _quantized_expert(row_RH, expert, experts)

    def project(row_RX: Tensor, weight_EYX: Tensor, bias_EY: Tensor | None) -> Tensor:
        bias_Y = None if bias_EY is None else bias_EY[expert].to(row_RX.dtype)
        return linear(row_RX, weight_EYX[expert].to(row_RX.dtype), bias_Y)

    inner_RF = experts.activation(project(row_RH, experts.gate_up_EGH, experts.gate_up_bias_EG))
    output_RH = project(inner_RF, experts.down_EHF, experts.down_bias_EH)
    return output_RH if experts.post_norm is None else experts.post_norm(output_RH)


def _quantized_expert(row_RH: Tensor, expert: int, experts: QuantizedExperts) -> Tensor:
    """(R, H) float32: the expert's output for each row, before routing weights."""
    *first, second = experts.matrices(expert)
    project = _project_planes if experts.row_bits == 8 else _project_floats
    projected = [project(row_RH, matrix, None) for matrix in first]
    own = torch.stack(projected, -1).flatten(1) if experts.interleaved else torch.cat(projected, 1)
    if experts.gate_up_bias_EG is not None:
        own = own + experts.gate_up_bias_EG[expert].float()
    bias = None if experts.down_bias_EH is None else experts.down_bias_EH[expert]
    output_RH = project(experts.activation(own), second, bias)
    return output_RH if experts.post_norm is None else experts.post_norm(output_RH)


def _project_floats(x_TK: Tensor, matrix: PlaneMatrix, bias: Tensor | None) -> Tensor:
    """(T, N) float32, of activations as they are."""
    weight_NK = planes.dequantize(matrix.planes, matrix.scales, matrix.layout)
    return linear(x_TK.float(), weight_NK, None if bias is None else bias.float())


def _project_planes(x_TK: Tensor, matrix: PlaneMatrix, bias: Tensor | None) -> Tensor:
    """(T, N) float32."""
    layout, size = matrix.layout, matrix.layout.format.row_group
    q_TDG, scale_TD = quantize_rows(x_TK, size)
    if layout.scales != "symmetric":
        weight_NK = planes.dequantize(matrix.planes, matrix.scales, layout)
        rounded_TK = (q_TDG * scale_TD[..., None]).flatten(1)[:, : layout.columns]
        output_TN = linear(rounded_TK, weight_NK)
        return output_TN if bias is None else output_TN + bias.float()
    codes = planes.unpack(matrix.planes, layout)
    padding = (0, layout.padded_columns - layout.columns)
    codes_NDG = pad(codes, padding, value=ZERO_CODE).unflatten(1, (-1, size)).float() - ZERO_CODE
    # Whole numbers below 2^24: exact in float32 in any order.
    dot_DTN = torch.bmm(q_TDG.transpose(0, 1), codes_NDG.permute(1, 2, 0))
    weight_ND = planes.unpack_scales(matrix.scales, layout).float()
    output_TN = dot_DTN.new_zeros(dot_DTN.shape[1:])
    for group, dot_TN in enumerate(dot_DTN):
        output_TN += (scale_TD[:, group, None] * weight_ND[:, group]) * dot_TN
    return output_TN if bias is None else output_TN + bias.float()


def _dtypes(experts: AnyExperts) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the projections and of the weighted sum."""
    if isinstance(experts, QuantizedExperts):
        return torch.float32, torch.float32
    weight = experts.gate_up_EGH
    half = weight.dtype in (torch.float16, torch.bfloat16)
    compute = torch.float32 if half and weight.device.type == "cpu" else weight.dtype
    return compute, torch.promote_types(compute, torch.float32)
