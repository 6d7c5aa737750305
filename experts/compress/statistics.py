"""Measures a layer's experts in calibration: their inputs (`LayerInputs`), how often they are used
and what fewer bits cost (`LayerCalibration`), and the file of both.

Input rows are kept instead of each expert's second moments, which would take more room than the
experts themselves. Legend: T tokens, H hidden, F intermediate, K slots a token, R rows of one
expert, X experts of a chunk, E experts, W widths (`kernels.planes.PREFIX_BITS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from kernels import ExpertWeights
from kernels.planes import PREFIX_BITS


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
        """The same tokens with these experts alone, renumbered from 0 in this order."""
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
    """Second moments of the inputs of both projections of some experts.

    Rows are weighted by the square of their routing weight, as that much of an expert's squared
    error reaches the layer's output.

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
    """``(R, F)`` float32: the input of an expert's second projection."""
    bias = None if whole.gate_up_bias_EG is None else whole.gate_up_bias_EG[expert].float()
    return whole.activation(linear(rows_RH, whole.gate_up_EGH[expert].float(), bias))


def output(whole: ExpertWeights, expert: int, rows_RH: Tensor) -> Tensor:
    """``(R, H)`` float32: an expert's output before routing weights."""
    bias = None if whole.down_bias_EH is None else whole.down_bias_EH[expert].float()
    rows_RH = linear(inner(whole, expert, rows_RH), whole.down_EHF[expert].float(), bias)
    return rows_RH if whole.post_norm is None else whole.post_norm(rows_RH)


def _moment(rows: Tensor) -> Tensor:
    return rows.T @ rows


class StatisticsError(ValueError):
    """A file of statistics is absent, damaged or of another calibration."""


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """Statistics of a layer's experts from calibration.

    Attributes:
        inputs: of its experts.
        frequency_E: share of the tokens that each expert was chosen for.
        weight_E: its mean routing weight over those tokens.
        importance_E: the mean L1 norm of their rows.
        error_EW: squared error of the layer's output over all tokens when that expert alone has
            these bits.
        kl_W: KL divergence of the model's output, in bits a token, when all experts of this layer,
            and of no other, have these bits.
    """

    inputs: LayerInputs
    frequency_E: Tensor
    weight_E: Tensor
    importance_E: Tensor
    error_EW: Tensor
    kl_W: Tensor

    def save(self, path: Path, job: str) -> None:
        """Write them; `job` identifies the calibration. Raises OSError."""
        unfinished = path.with_suffix(".unfinished")
        tensors = {
            part.name: getattr(owner, part.name).contiguous()
            for owner, parts in ((self.inputs, fields(self.inputs)), (self, fields(self)[1:]))
            for part in parts
        }
        save_file(tensors, unfinished, {"job": job})
        unfinished.rename(path)

    @classmethod
    def load(cls, path: Path, job: str | None = None) -> LayerCalibration:
        """Read them. Raises `StatisticsError`, also if they belong to another `job`."""
        try:
            with safe_open(path, "pt") as file:
                found = (file.metadata() or {}).get("job")
                if job is not None and found != job:
                    raise StatisticsError(f"{path} belongs to another calibration")
                inputs = LayerInputs(*(file.get_tensor(part.name) for part in fields(LayerInputs)))
                own = [file.get_tensor(part.name) for part in fields(cls)[1:]]
        except (OSError, SafetensorError) as error:
            raise StatisticsError(f"{path} cannot be used: {error}") from error
        return cls(inputs, *own)._checked(path)

    def _checked(self, path: Path) -> LayerCalibration:
        count, tokens = len(self.frequency_E), len(self.inputs.hidden_TH)
        widths = len(PREFIX_BITS)
        shapes = [
            (self.inputs.expert_ids_TK, (tokens, *self.inputs.weights_TK.shape[1:])),
            (self.inputs.weights_TK, tuple(self.inputs.expert_ids_TK.shape)),
            (self.weight_E, (count,)),
            (self.importance_E, (count,)),
            (self.error_EW, (count, widths)),
            (self.kl_W, (widths,)),
        ]
        if any(tensor.shape != shape for tensor, shape in shapes):
            raise StatisticsError(f"{path} cannot be used: its tensors do not fit together")
        numbers = (self.frequency_E, self.weight_E, self.error_EW, self.kl_W)
        if not all(bool(t.isfinite().all() & (t >= 0).all()) for t in numbers):
            raise StatisticsError(f"{path} cannot be used: it holds numbers that are not finite")
        return self


def usage(inputs: LayerInputs, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(E,)`` float64 each: frequency, mean routing weight, mean L1 norm; 0 for the unused."""
    used = inputs.expert_ids_TK >= 0
    ids = inputs.expert_ids_TK[used].long()
    norms = inputs.hidden_TH.double().abs().sum(-1, keepdim=True).expand(used.shape)

    def sums(values: Tensor) -> Tensor:
        return torch.zeros(num_experts, dtype=torch.float64).index_add(0, ids, values[used])

    counts = sums(torch.ones(used.shape, dtype=torch.float64))
    each = counts.clamp_min(1)
    frequency = counts / max(len(inputs.hidden_TH), 1)
    return frequency, sums(inputs.weights_TK.double()) / each, sums(norms) / each
