"""What calibration finds out about the experts of one MoE layer, and its file.

Legend: E experts, W widths (`kernels.planes.PREFIX_BITS`), T tokens, H hidden, K slots a token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from experts.compress.inputs import LayerInputs
from kernels.planes import PREFIX_BITS


class StatisticsError(ValueError):
    """A file of statistics is absent, damaged or of another calibration."""


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of a layer.

    Attributes:
        inputs: what its experts were given.
        frequency_E: share of the tokens that each expert was chosen for.
        weight_E: its mean routing weight over those tokens.
        importance_E: the mean L1 norm of their rows.
        error_EW: squared error of the layer's output over all tokens when that expert alone has so
            many bits.
        kl_W: bits of information a token that the model's output loses when all of the layer's
            experts have so many bits, and no other layer's.
    """

    inputs: LayerInputs
    frequency_E: Tensor
    weight_E: Tensor
    importance_E: Tensor
    error_EW: Tensor
    kl_W: Tensor

    def save(self, path: Path, job: str) -> None:
        """Write them; `job` says what they belong to. Raises OSError."""
        unfinished = path.with_suffix(".unfinished")
        tensors = {
            part.name: getattr(owner, part.name).contiguous()
            for owner, parts in ((self.inputs, fields(self.inputs)), (self, fields(self)[1:]))
            for part in parts
        }
        save_file(tensors, unfinished, {"job": job})
        unfinished.rename(path)

    @classmethod
    def load(cls, path: Path, job: str | None = None) -> LayerStatistics:
        """Read them; with a `job`, only of that one. Raises `StatisticsError`."""
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

    def _checked(self, path: Path) -> LayerStatistics:
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
