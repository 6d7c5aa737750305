"""One MoE layer's experts in plain torch: the layout of the weights and the oracle of every kernel.

Clarity before speed: a loop over the experts that were chosen, two matrix products each, and a
weighted sum whose order is fixed, so that a row's result does not depend on its neighbours.
Differentiable, any device.

Shape legend: T tokens, H hidden, K slots a token (top_k), E experts, F expert intermediate width,
G = 2F for gated experts and F otherwise, S = T*K slots, R the rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import quantized
from kernels.planes import QuantizedExperts


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
    """

    gate_up_EGH: Tensor
    down_EHF: Tensor
    activation: Callable[[Tensor], Tensor]
    gate_up_bias_EG: Tensor | None = None
    down_bias_EH: Tensor | None = None
    post_norm: Callable[[Tensor], Tensor] | None = None

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
        arithmetic is slow there), and for quantised experts (see kernels/quantized.py). The sum
        runs in float32 (float64 for float64 weights), in slot order. With ``add_to_TH``, that, to
        which the sum was added in place: where the slots of a token are in ascending order, calls
        for ascending ranges of experts, the first of them with zeros, give the bits of one call.

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


def check_shapes(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: AnyExperts,
    add_to_TH: Tensor | None = None,
) -> None:
    """Raise ValueError where hidden, ids, weights and sum do not belong together."""
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


def sum_dtype(experts: AnyExperts) -> torch.dtype:
    """In which a token's slots are summed."""
    return _dtypes(experts)[1]


def id_error(experts: AnyExperts) -> ValueError:
    """The error for an expert id out of range."""
    return ValueError(
        f"expert ids must be in [0, {experts.num_experts}), or -1 for an unused slot; "
        "an id outside that range was given"
    )


def _one_expert(row_RH: Tensor, expert: int, experts: AnyExperts) -> Tensor:
    if isinstance(experts, QuantizedExperts):
        return quantized.one_expert(row_RH, expert, experts)

    def project(row_RX: Tensor, weight_EYX: Tensor, bias_EY: Tensor | None) -> Tensor:
        bias_Y = None if bias_EY is None else bias_EY[expert].to(row_RX.dtype)
        return linear(row_RX, weight_EYX[expert].to(row_RX.dtype), bias_Y)

    inner_RF = experts.activation(project(row_RH, experts.gate_up_EGH, experts.gate_up_bias_EG))
    output_RH = project(inner_RF, experts.down_EHF, experts.down_bias_EH)
    return output_RH if experts.post_norm is None else experts.post_norm(output_RH)


def _dtypes(experts: AnyExperts) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the projections and of the weighted sum."""
    if isinstance(experts, QuantizedExperts):
        return torch.float32, torch.float32
    weight = experts.gate_up_EGH
    half = weight.dtype in (torch.float16, torch.bfloat16)
    compute = torch.float32 if half and weight.device.type == "cpu" else weight.dtype
    return compute, torch.promote_types(compute, torch.float32)
