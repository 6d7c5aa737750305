"""The experts' arithmetic: one entry point over the compiled CPU kernel, Triton and the reference.

The reference (plain torch) serves what the others do not: gradients, unusual dtypes or layouts,
other devices. `backend_status()` says what the CPU uses and why,
`choose_backend` what a model uses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import quantized, reference
from kernels.backends import Backend, Forward, choose_backend, triton_kernels, weighted_sum
from kernels.cpu import backend_status, choose_kernel
from kernels.megablocks import BackendError
from kernels.planes import PlaneMatrix, QuantizedExperts
from kernels.reference import AnyExperts, ExpertWeights

__all__ = [
    "Backend",
    "BackendError",
    "ExpertWeights",
    "Forward",
    "PlaneMatrix",
    "QuantizedExperts",
    "backend_status",
    "choose_backend",
    "experts_forward",
    "linear_forward",
    "reads_nothing_back",
    "row_linear",
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
        add_to_TH: (T, H) float32, contiguous: what other experts' slots have given so far.

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
    """Whether `experts_forward` of these leaves the host out, so that a graph can record it."""
    triton = triton_kernels() if hidden_TH.device.type == "cuda" else None
    return triton is not None and triton.supports(hidden_TH, experts)


def linear_forward(x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
    """``x W^T + bias``: (T, N) in x's dtype; see kernels/quantized.py for the arithmetic.

    Raises:
        ValueError: x is not (T, K).
    """
    if x_TK.device.type == "cpu":
        native, _ = choose_kernel()
        if native is not None and native.planes.supports(x_TK, matrix.scales):
            return native.planes.linear(x_TK, matrix)
    if x_TK.device.type == "cuda":
        triton = triton_kernels()
        if triton is not None and triton.supports_matrix(x_TK, matrix):
            output_TN: Tensor = triton.linear_forward(x_TK, matrix)
            return output_TN
    return quantized.linear_forward(x_TK, matrix)


def row_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, whose bits for a row depend on the other rows; ours do not.

    On a CPU, without gradients, of float32 and bfloat16 rows; torch's own otherwise.
    """
    native = choose_kernel()[0] if x.device.type == "cpu" else None
    if native is not None and native.linear.supports(x, weight_NK):
        return native.linear.linear(x, weight_NK, bias_N)
    return linear(x, weight_NK, bias_N)


def _needs_grad(hidden_TH: Tensor, weights_TK: Tensor, experts: AnyExperts) -> bool:
    if not torch.is_grad_enabled():
        return False
    inputs = [hidden_TH, weights_TK, experts.gate_up_bias_EG, experts.down_bias_EH]
    if isinstance(experts, ExpertWeights):
        inputs += [experts.gate_up_EGH, experts.down_EHF]
    return any(x is not None and x.requires_grad for x in inputs)
