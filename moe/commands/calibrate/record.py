"""Record a trace: the model reads windows of text, and each MoE layer's routing is kept.

Memory is bounded: expert ids are small, and the experts' input rows are kept only for as many
tokens, evenly spread over the text, as a budget allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.calibration.trace import SampledRows, Trace
from moe.errors import CalibrationError
from moe.machine import memory_available
from moe.network.backbone import Backbone
from moe.network.lanes import ExpertCall, ExpertsRunner, run_lanes
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from offload.layer import LayerExperts
from routing import Routing
from routing.routing import UNUSED

ROW_BYTES = 1 << 29
"""Memory for sampled rows, at most; at most an eighth of what is available."""

PASS_TOKENS = 2048
"""Tokens of one pass, if the model can pack sequences: a pass fetches each expert once."""


class TeacherForcedExperts:
    """Replaces `MoELayers` in `record_trace`, and routes tokens as a recorded trace did.

    The rows that reach the routers of a compressed model then differ from the original's by the
    errors of experts only, not by other choices of earlier routers.

    Args:
        layers: the experts of each layer.
        trace: its windows are read once each, in order.
        run: runs the experts.
    """

    def __init__(self, layers: Sequence[LayerExperts], trace: Trace, run: ExpertsRunner) -> None:
        self.layers = list(layers)
        self._trace, self._run = trace, run
        self._tokens_read = [0] * len(self.layers)

    def run(self, layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        (call,) = calls  # one lane a pass
        start = self._tokens_read[layer]
        end = self._tokens_read[layer] = start + call.routing.num_tokens
        ids, weights = (
            own[layer][start:end] for own in (self._trace.expert_ids, self._trace.weights)
        )
        device = call.routing.weights.device
        chosen = Routing(ids.to(device).long(), weights.to(call.routing.weights))
        return self._run(layer, [replace(call, routing=chosen)])


@torch.inference_mode()
def record_trace(
    backbone: Backbone,
    experts: MoELayers | TeacherForcedExperts,
    windows: Sequence[Sequence[int]],
    *,
    row_bytes: int | None = None,
    on_tokens: Callable[[int], object] = lambda done: None,
) -> Trace:
    """Read each window as a sequence of its own.

    Args:
        backbone: of a loaded model.
        experts: of the same model; `TeacherForcedExperts` follow a trace instead of the router.
        windows: token ids; at least one, none empty.
        row_bytes: memory for sampled rows; 0 keeps none; None: `ROW_BYTES`, or less if memory is
            short.
        on_tokens: called with the number of tokens read.

    Raises:
        CalibrationError: activations are not finite.
    """
    if row_bytes is None:
        available = memory_available()
        row_bytes = ROW_BYTES if available is None else max(1, min(ROW_BYTES, available // 8))
    recorder = _Recorder(experts, sum(map(len, windows)), row_bytes)
    for indices in window_batches(windows, PASS_TOKENS if backbone.packed else 0):
        batch = [windows[index] for index in indices]
        lanes = backbone.lanes([Work(list(ids), backbone.new_cache(len(ids))) for ids in batch])
        run_lanes(lanes, recorder.run)
        for lane in lanes:
            lane.result()
        recorder.done += sum(map(len, batch))
        on_tokens(recorder.done)
    return recorder.trace(windows)


def window_batches(windows: Sequence[Sequence[int]], tokens: int) -> Iterator[list[int]]:
    """Indices of windows that have at most ``tokens`` together, or of one longer window."""
    batch: list[int] = []
    for index, window in enumerate(windows):
        if batch and sum(len(windows[own]) for own in batch) + len(window) > tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch


class _Recorder:
    """Runs the experts and keeps the routing and samples of the rows.

    Attributes:
        done: tokens that all layers have read.
    """

    def __init__(
        self, experts: MoELayers | TeacherForcedExperts, total: int, row_bytes: int
    ) -> None:
        self.done = 0
        self._experts = experts
        self._num_experts = [layer.num_experts for layer in experts.layers]
        self._total, self._row_bytes = total, row_bytes
        self._stride = 0
        count = len(self._num_experts)
        self._ids: list[list[Tensor]] = [[] for _ in range(count)]
        self._weights: list[list[Tensor]] = [[] for _ in range(count)]
        self._rows: list[list[Tensor]] = [[] for _ in range(count)]

    def run(self, layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        (call,) = calls  # one lane a pass
        rows, routing = call.hidden_states, call.routing
        if not bool(torch.isfinite(rows).all() & torch.isfinite(routing.weights).all()):
            bad = int((~torch.isfinite(rows).all(-1)).sum())
            raise CalibrationError(
                f"MoE layer {layer}: {bad} of {len(rows)} rows are not finite after "
                f"{self.done} tokens; the model's weights are damaged, or its dtype overflows "
                "(try --set model.dtype=float32)"
            )
        self._ids[layer].append(routing.expert_ids.to("cpu", torch.int16))
        self._weights[layer].append(routing.weights.to("cpu", torch.float16))
        self._sample(layer, rows)
        return self._experts.run(layer, calls)

    def _sample(self, layer: int, rows: Tensor) -> None:
        if not self._stride:  # the hidden size is known only now
            needed = self._total * len(self._num_experts) * rows.shape[-1] * 2
            self._stride = max(-(-needed // self._row_bytes), 1) if self._row_bytes else -1
        if self._stride > 0:
            sampled = rows[-self.done % self._stride :: self._stride].float()
            limit = torch.finfo(torch.float16).max
            self._rows[layer].append(sampled.clamp(-limit, limit).to("cpu", torch.float16))

    def trace(self, windows: Sequence[Sequence[int]]) -> Trace:
        rows = None
        if self._stride > 0:
            tokens = torch.arange(0, self._total, self._stride)
            rows = SampledRows(tokens, [torch.cat(parts) for parts in self._rows])
        return Trace(
            torch.tensor([token for window in windows for token in window], dtype=torch.int32),
            [len(window) for window in windows],
            self._num_experts,
            [_stacked(parts, UNUSED) for parts in self._ids],
            [_stacked(parts, 0) for parts in self._weights],
            rows,
        )


def _stacked(parts: Sequence[Tensor], unused: int) -> Tensor:
    """The rows of all passes, padded: some routers choose a different K in each pass."""
    slots = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, slots - part.shape[1]), value=unused) for part in parts])
