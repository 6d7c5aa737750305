"""A trace: which experts each token of a text used, and what the experts read for some tokens.

`moe.commands.calibrate.record` records it for any model that loads. Predictors are fitted to it,
`moe plan` takes its expected hit ratio from it and `moe trace` its findings.
Legend: N tokens, S sequences, K slots a token, R kept rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moe.errors import CalibrationError
from routing.predict import contexts

VERSION = "1"


@dataclass(frozen=True)
class SampledRows:
    """Inputs of experts for a sample of the tokens.

    Attributes:
        tokens: ``(R,)`` int64, which tokens of the trace, ascending.
        expert_inputs: for each layer ``(R, H)`` float16.
    """

    tokens: Tensor
    expert_inputs: list[Tensor]


@dataclass(frozen=True)
class Trace:
    """The routing of N tokens.

    Attributes:
        token_ids: ``(N,)`` int32, sequences one after the other.
        lengths: of the sequences; they add up to N.
        num_experts: E of each MoE layer.
        expert_ids: for each layer ``(N, K)`` int16, ascending, -1 for none.
        weights: for each layer ``(N, K)`` float16.
        rows: for calibration; never saved.
    """

    token_ids: Tensor
    lengths: list[int]
    num_experts: list[int]
    expert_ids: list[Tensor]
    weights: list[Tensor]
    rows: SampledRows | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def contexts(self, width: int) -> Tensor:
        """``(N, width)`` int64: for each token those before it in its sequence, then itself."""
        return torch.cat([contexts(ids, width) for ids in self.token_ids.split(self.lengths)])

    def sequences(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield each sequence: its token ids ``(n,)``, and expert ids ``(n, K)`` for each layer."""
        layers = [ids.split(self.lengths) for ids in self.expert_ids]
        for index, tokens in enumerate(self.token_ids.split(self.lengths)):
            yield tokens, [layer[index] for layer in layers]

    def save(self, path: Path) -> None:
        """Write all but the rows. Raises `OSError`."""
        tensors = {"token_ids": self.token_ids, "lengths": torch.tensor(self.lengths)}
        for layer, (ids, weights) in enumerate(zip(self.expert_ids, self.weights, strict=True)):
            tensors[f"expert_ids.{layer}"] = ids.contiguous()
            tensors[f"weights.{layer}"] = weights.contiguous()
        experts = ",".join(map(str, self.num_experts))
        path.write_bytes(save(tensors, {"moe_trace": VERSION, "num_experts": experts}))

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote. Raises `CalibrationError` if the file is not a whole trace."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no iterator
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"{path} cannot be read as a trace: {error}") from error
        if about.get("moe_trace") != VERSION:
            raise CalibrationError(
                f"{path} has trace version {str(about.get('moe_trace'))[:20]}, this program reads "
                f"version {VERSION}; run moe calibrate again"
            )
        try:
            num_experts = [int(count) for count in about["num_experts"].split(",")]
            layers = range(len(num_experts))
            trace = cls(
                tensors["token_ids"],
                tensors["lengths"].tolist(),
                num_experts,
                [tensors[f"expert_ids.{layer}"] for layer in layers],
                [tensors[f"weights.{layer}"] for layer in layers],
            )
        except (KeyError, ValueError) as error:
            raise CalibrationError(f"{path} is no whole trace: {error} is missing") from error
        return trace._checked(path)

    def _checked(self, path: Path) -> Trace:
        count = self.num_tokens
        if sum(self.lengths) != count or any(length < 1 for length in self.lengths):
            raise CalibrationError(
                f"{path} holds {count} tokens, but its sequences add up to {sum(self.lengths)}"
            )
        layers: Sequence[tuple[Tensor, Tensor, int]]
        layers = list(zip(self.expert_ids, self.weights, self.num_experts, strict=True))
        for layer, (ids, weights, experts) in enumerate(layers):
            if ids.shape != weights.shape or ids.ndim != 2 or ids.shape[0] != count:
                raise CalibrationError(
                    f"{path}: layer {layer} has expert ids {tuple(ids.shape)} and weights "
                    f"{tuple(weights.shape)} for {count} tokens"
                )
            if bool(((ids < -1) | (ids >= experts)).any()):
                raise CalibrationError(f"{path}: layer {layer} names experts beyond {experts}")
        return self
