"""The experts' arithmetic: entry points over the compiled CPU kernels, Triton and the reference.

`ExpertWeights` (reference.py) and `QuantizedExperts` (planes.py) hold one MoE layer's experts, and
`PlaneMatrix` one quantised matrix. `experts_forward` computes each token's weighted sum of expert
outputs; `linear_forward`, `row_linear` and `weighted_sum` compute the parts around it. Each call
takes the fastest kernel that supports its arguments: kernels/cpu in C++, kernels/triton on CUDA,
else kernels/reference.py in plain torch (gradients, unusual dtypes, other devices).
`choose_backend` chooses a model's kernels, `backend_status` says what the CPU uses and why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import reference
from kernels.backends import Backend, BackendError, Forward, choose_backend, triton_kernels
from kernels.cpu import backend_status, choose_kernel
from kernels.cpu.dense import MOST_CHOICES
from kernels.planes import PlaneMatrix, QuantizedExperts, arranged, arrangement_for
from kernels.reference import AnyExperts, ExpertWeights

__all__ = [
    "Backend",
    "BackendError",
    "ExpertWeights",
    "Forward",
    "PlaneMatrix",
    "QuantizedExperts",
    "arrange_experts",
    "arrange_for_cuda",
    "backend_status",
    "choose_backend",
    "draw_rows",
    "experts_forward",
    "linear_forward",
    "matrix_rows",
    "reads_nothing_back",
    "row_linear",
    "row_top_k",
    "weighted_sum",
]


def experts_forward(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: AnyExperts,
    add_to_TH: Tensor | None = None,
) -> Tensor:
    """Each token's weighted sum of its experts' outputs; see `kernels.reference.experts_forward`.

    Args:
        hidden_TH: (T, H) activations.
        expert_ids_TK: (T, K) int64 in [0, E), -1 for an unused slot.
        weights_TK: (T, K) float32 routing weights.
        experts: the layer's weights, on hidden's device.
        add_to_TH: (T, H) float32, contiguous: the sum over other experts' slots so far.

    Returns:
        (T, H) in hidden's dtype; or ``add_to_TH``, to which the sum was added in place.

    Raises:
        ValueError: an expert id outside [-1, E) or shapes that do not fit.
    """
    if hidden_TH.device.type == "cpu" and not _needs_grad(hidden_TH, weights_TK, experts):
        native, _ = choose_kernel()
        if native is not None and native.supports(hidden_TH, experts):
            return native.experts_forward(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
    if hidden_TH.device.type == "cuda" and not _needs_grad(hidden_TH, weights_TK, experts):
        triton = triton_kernels()
        if triton is not None and triton.supports(hidden_TH, experts):
            output_TH: Tensor = triton.experts_forward(
                hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH
            )
            return output_TH
    return reference.experts_forward(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)


def reads_nothing_back(hidden_TH: Tensor, experts: AnyExperts) -> bool:
    """Return whether `experts_forward` of these never waits for the GPU: a CUDA graph can capture
    it."""
    triton = triton_kernels() if hidden_TH.device.type == "cuda" else None
    return triton is not None and triton.supports(hidden_TH, experts)


def arrange_for_cuda(experts: QuantizedExperts, own: Sequence[int] | None = None) -> None:
    """The planes of a store's file are there: rearrange them where they lie, on any device.

    Args:
        own: the experts that have come; None for all.
    """
    triton = triton_kernels() if experts.scales[0].device.type == "cuda" else None
    if triton is not None and triton.arrange_in_place(experts, own):
        return
    for expert in range(experts.num_experts) if own is None else own:
        planes = experts.planes[expert]
        for plane, made in zip(planes, arranged(planes, experts.layouts, "cuda"), strict=True):
            plane.copy_(made)


def arrange_experts(experts: QuantizedExperts) -> QuantizedExperts:
    """A layer arranged for the device that it is on; for a GPU, planes change where they lie."""
    device = experts.scales[0].device
    if arrangement_for(device) != "cuda":
        return experts.for_device(device)
    if experts.first.arrangement == "cuda":
        return experts
    arrange_for_cuda(experts)
    return experts.relabelled("cuda")


def linear_forward(x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``x W^T + bias``: (T, N) in x's dtype; see kernels/reference.py for the arithmetic.

    Raises:
        ValueError: x is not (T, K).
    """
    if x_TK.device.type == "cpu":
        native, _ = choose_kernel()
        known = matrix.layout.for_cpus
        if native is not None and known and native.planes.supports(x_TK, matrix.scales):
            return native.planes.linear(x_TK, matrix)
    if x_TK.device.type == "cuda":
        triton = triton_kernels()
        if triton is not None and triton.supports_matrix(x_TK, matrix):
            output_TN: Tensor = triton.linear_forward(x_TK, matrix)
            return output_TN
    return reference.linear_forward(x_TK, matrix)


def matrix_rows(ids_T: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``(T, K)`` float32 rows of the weights that bit planes stand for, by their numbers.

    Raises:
        IndexError: a number is not that of a row.
    """
    if not len(ids_T):
        return torch.empty(0, matrix.layout.columns, device=matrix.scales.device)
    if not 0 <= int(ids_T.min()) <= int(ids_T.max()) < matrix.layout.rows:
        raise IndexError(f"rows must be in [0, {matrix.layout.rows}), got {ids_T.tolist()[:8]}")
    native = choose_kernel()[0] if matrix.scales.device.type == "cpu" else None
    own = matrix.layout
    if native is not None and own.scales != "symmetric" and own.for_cpus:
        return native.planes.rows(ids_T, matrix)
    return reference.matrix_rows(ids_T, matrix)


def row_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, but a row's bits do not depend on the other rows.

    That holds on a CPU, without gradients, for float32 and bfloat16 rows; else this is torch's own.
    """
    native = choose_kernel()[0] if x.device.type == "cpu" else None
    if native is not None and native.linear.supports(x, weight_NK):
        return native.linear.linear(x, weight_NK, bias_N)
    return linear(x, weight_NK, bias_N)


def row_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` of the last dimension, but of equal values the lower id comes first.

    torch leaves their order open. That holds on a CPU, without gradients, for float32 rows of at
    most 1,024 numbers; else this is torch's own.
    """
    native = choose_kernel()[0] if x.device.type == "cpu" else None
    if native is not None and native.norms.supports(x) and 0 < k <= x.shape[-1] <= MOST_CHOICES:
        return native.norms.top_k(x, k)
    values, ids = torch.topk(x, k)
    return values, ids


def draw_rows(probabilities_TV: Tensor, uniform_TV: Tensor) -> Tensor:
    """``(T,)``: an id of each float32 row on the CPU, with its probability, as torch draws it: the
    largest ratio of probability and exponential variate, -log(1 - u), the first of equal ones.

    Args:
        uniform_TV: contiguous float64 numbers u in [0, 1); what they are afterwards is not said.
    """
    native = choose_kernel()[0]
    if native is not None and native.norms.supports(probabilities_TV):
        return native.norms.draw(probabilities_TV, uniform_TV)
    exponential_TV = uniform_TV.neg_().log1p_().neg_().to(probabilities_TV.dtype)
    return (probabilities_TV / exponential_TV).argmax(-1)


def weighted_sum(
    row_AH: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    dtype: torch.dtype,
    more_BH: Tensor | None = None,
) -> Tensor:
    """``(T, H)`` in ``dtype``: `sum_k weights[t, k] * row[position[t, k]]`, on any kernel.

    Products are rounded, then added in slot order, in the rows' dtype. So expert outputs that other
    ranks computed give the bits of `experts_forward` with all experts on one rank.

    Args:
        row_AH: (A, H) experts' outputs before their weights, in the dtype of the sum.
        position_TK: integer row of each slot, negative for an unused one.
        weights_TK: float32.
        dtype: of the result, rounded once at the end.
        more_BH: (B, H) rows with positions A to A + B - 1, in memory of their own.
    """
    more_BH = row_AH[:0] if more_BH is None else more_BH
    native = None
    if (
        row_AH.device.type == "cpu"
        and row_AH.dtype == torch.float32
        and dtype in (torch.float32, torch.bfloat16)
    ):
        native, _ = choose_kernel()
    if native is not None:
        position_TK, weights_TK = position_TK.int().contiguous(), weights_TK.contiguous()
        rows = row_AH.contiguous(), more_BH.contiguous()
        return native.whole.weighted_sum(rows[0], position_TK, weights_TK, dtype, rows[1])
    row_AH = torch.cat([row_AH, more_BH])
    output_TH = row_AH.new_zeros(position_TK.shape[0], row_AH.shape[1])
    if len(row_AH):
        weights_TK = weights_TK.to(row_AH.dtype).masked_fill(position_TK < 0, 0)
        for k, position_T in enumerate(position_TK.clamp(min=0).unbind(1)):
            used_T1 = (position_TK[:, k, None] >= 0).to(row_AH.device)
            product_TH = weights_TK[:, k, None] * row_AH[position_T]
            output_TH += product_TH.where(used_T1, product_TH.new_zeros(()))
    return output_TH.to(dtype)


def _needs_grad(hidden_TH: Tensor, weights_TK: Tensor, experts: AnyExperts) -> bool:
    if not torch.is_grad_enabled():
        return False
    inputs = [hidden_TH, weights_TK, experts.gate_up_bias_EG, experts.down_bias_EH]
    if isinstance(experts, ExpertWeights):
        inputs += [experts.gate_up_EGH, experts.down_EHF]
    return any(x is not None and x.requires_grad for x in inputs)
