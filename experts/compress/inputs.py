"""What a layer's experts were given in calibration: the rows, and who was chosen for them.

The rows are kept instead of each expert's second moments, which would take more room than the
experts themselves. Legend: T tokens, H hidden, F intermediate, K slots a token, R rows of one
expert, X experts of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import ExpertWeights


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Calibration tokens at one MoE layer.

    Attributes:
        hidden_TH: rows that went into the experts, floating point.
        expert_ids_TK: integers, -1 for an unused slot.
        weights_TK: routing weights.
    """

    hidden_TH: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor

    def rows_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """``(R, H)`` float32 rows of an expert and their ``(R, 1)`` routing weights."""
        tokens, slots = (self.expert_ids_TK == expert).nonzero(as_tuple=True)
        weights = self.weights_TK[tokens, slots].float()
        return self.hidden_TH[tokens].float(), weights[:, None]

    def of_experts(self, experts: Sequence[int]) -> LayerInputs:
        """The same tokens where these experts, counted from 0 in this order, are all there are."""
        new = torch.full((max(int(self.expert_ids_TK.max()), *experts) + 2,), -1, dtype=torch.int64)
        new[torch.tensor(experts)] = torch.arange(len(experts))
        return LayerInputs(self.hidden_TH, new[self.expert_ids_TK.long()], self.weights_TK)

    def counts(self, num_experts: int) -> Tensor:
        """``(E,)`` tokens of each expert."""
        chosen = self.expert_ids_TK[self.expert_ids_TK >= 0]
        return torch.bincount(chosen.flatten().long(), minlength=num_experts)


@torch.no_grad()
def moments(
    inputs: LayerInputs, whole: ExpertWeights, experts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Second moments of what both projections of some experts are given.

    Rows count with the square of their routing weight: that is how much of an expert's error
    reaches the layer's output.

    Returns:
        ``(X, H, H)`` and ``(X, F, F)`` float32.
    """
    first, second = [], []
    for expert in experts:
        rows_RH, weights_R1 = inputs.rows_of(expert)
        inner_RF = inner(whole, expert, rows_RH)
        first.append(_moment(rows_RH * weights_R1))
        second.append(_moment(inner_RF * weights_R1))
    return torch.stack(first), torch.stack(second)


def inner(whole: ExpertWeights, expert: int, rows_RH: Tensor) -> Tensor:
    """``(R, F)`` float32: what an expert's second projection is given."""
    bias = None if whole.gate_up_bias_EG is None else whole.gate_up_bias_EG[expert].float()
    return whole.activation(linear(rows_RH, whole.gate_up_EGH[expert].float(), bias))


def output(whole: ExpertWeights, expert: int, rows_RH: Tensor) -> Tensor:
    """``(R, H)`` float32: an expert's output before routing weights."""
    bias = None if whole.down_bias_EH is None else whole.down_bias_EH[expert].float()
    rows_RH = linear(inner(whole, expert, rows_RH), whole.down_EHF[expert].float(), bias)
    return rows_RH if whole.post_norm is None else whole.post_norm(rows_RH)


def _moment(rows: Tensor) -> Tensor:
    return rows.T @ rows
