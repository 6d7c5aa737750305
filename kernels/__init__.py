"""The experts' arithmetic: one entry point over the compiled CPU kernel and the reference.

The reference (plain torch) serves what the compiled kernel does not: other devices, gradients,
unusual dtypes or layouts. `backend_status()` says what the CPU uses and why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import backend_status, choose_kernel
from kernels.reference import ExpertWeights

__all__ = ["ExpertWeights", "backend_status", "experts_forward"]


def experts_forward(
    hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights
) -> Tensor:
    """Each token's weighted sum of its experts' outputs; see `kernels.reference.experts_forward`.

    Args:
        hidden_TH: (T, H) activations.
        expert_ids_TK: (T, K) int64 in [0, E), -1 for an unused slot.
        weights_TK: (T, K) float32 routing weights.
        experts: the layer's weights, on hidden's device.

    Returns:
        (T, H) in hidden's dtype.

    Raises:
        ValueError: an expert id outside [-1, E) or shapes that do not fit.
    """
    if hidden_TH.device.type == "cpu" and not _needs_grad(hidden_TH, weights_TK, experts):
        native, _ = choose_kernel()
        if native is not None and native.supports(hidden_TH, experts):
            return native(hidden_TH, expert_ids_TK, weights_TK, experts)
    return reference.experts_forward(hidden_TH, expert_ids_TK, weights_TK, experts)


def _needs_grad(hidden_TH: Tensor, weights_TK: Tensor, experts: ExpertWeights) -> bool:
    inputs = (
        hidden_TH,
        weights_TK,
        experts.gate_up_EGH,
        experts.down_EHF,
        experts.gate_up_bias_EG,
        experts.down_bias_EH,
    )
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
