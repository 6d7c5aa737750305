"""Recording a trace: a model reads windows of text, and the seam tells where their tokens go.

Memory is bounded: expert ids are small, and activations are kept of as many tokens, spread over the
text, as a budget allows.
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
from moe.network.kv_cache import Work
from moe.network.lanes import ExpertCall, ExpertsRunner, run_lanes
from moe.network.moe_layer import MoELayers
from offload.layer import LayerExperts
from routing import Routing
from routing.routing import UNUSED

# ---- A compressed model reads a recorded text with its tokens sent where the original sent them.
#
# What its routers read then differs from the original's rows by the experts' errors alone, not by
# earlier routers' other choices: what routers that choose as the original's did will have to
# read.


class TeacherForcedExperts:
    """Experts behind recorded choices; takes the place of `MoELayers` in `record_trace`.

    Args:
        layers: experts of each layer, for their numbers.
        trace: whose windows are read, each once and in order.
        run: what runs the experts.
    """

    def __init__(self, layers: Sequence[LayerExperts], trace: Trace, run: ExpertsRunner) -> None:
        self.layers = list(layers)
        self._trace, self._run = trace, run
        self._read = [0] * len(self.layers)

    def run(self, layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        (call,) = calls  # one lane a pass
        start = self._read[layer]
        end = self._read[layer] = start + call.routing.num_tokens
        ids, weights = (
            own[layer][start:end] for own in (self._trace.expert_ids, self._trace.weights)
        )
        device = call.routing.weights.device
        chosen = Routing(ids.to(device).long(), weights.to(call.routing.weights))
        return self._run(layer, [replace(call, routing=chosen)])


# ----

ROW_BYTES = 1 << 30
"""Memory for kept activations."""

PASS_TOKENS = 2048
"""Read in one pass where sequences may share one, so that experts are read once for all."""


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
        experts: of the same; `TeacherForcedExperts` follow a trace's routing, not the router's.
        windows: token ids; at least one, none empty.
        row_bytes: memory for activations; 0 keeps none; None: `ROW_BYTES`, if affordable.
        on_tokens: hears how many tokens have been read.

    Raises:
        CalibrationError: activations are not finite.
    """
    if row_bytes is None:
        row_bytes = affordable(ROW_BYTES)
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


class _Recorder:
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
        self._read: list[list[Tensor]] = [[] for _ in range(count)]

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
        self._keep_rows(layer, rows)
        return self._experts.run(layer, calls)

    def _keep_rows(self, layer: int, rows: Tensor) -> None:
        if not self._stride:  # hidden size is known only now
            needed = self._total * len(self._num_experts) * rows.shape[-1] * 2
            self._stride = max(-(-needed // self._row_bytes), 1) if self._row_bytes else -1
        if self._stride < 0:
            return
        kept = slice(-self.done % self._stride, None, self._stride)
        self._read[layer].append(_half(rows[kept]))

    def trace(self, windows: Sequence[Sequence[int]]) -> Trace:
        rows = None
        if self._stride > 0:
            tokens = torch.arange(0, self._total, self._stride)
            rows = SampledRows(tokens, [torch.cat(parts) for parts in self._read])
        return Trace(
            torch.tensor([token for window in windows for token in window], dtype=torch.int32),
            [len(window) for window in windows],
            self._num_experts,
            [_stacked(parts, UNUSED) for parts in self._ids],
            [_stacked(parts, 0) for parts in self._weights],
            rows,
        )


def affordable(most: int) -> int:
    """Bytes up to so many that may be kept: the model may have filled memory."""
    available = memory_available()
    return most if available is None else max(1, min(most, available // 4))


def _stacked(parts: Sequence[Tensor], unused: int) -> Tensor:
    """Rows of all passes; some routers take another number of slots in each."""
    slots = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, slots - part.shape[1]), value=unused) for part in parts])


def _half(rows: Tensor) -> Tensor:
    limit = torch.finfo(torch.float16).max
    return rows.float().clamp(-limit, limit).to("cpu", torch.float16)


def window_batches(windows: Sequence[Sequence[int]], tokens: int) -> Iterator[list[int]]:
    """Indices of windows of at most ``tokens`` together, at least one at a time."""
    batch: list[int] = []
    for index, window in enumerate(windows):
        if batch and sum(len(windows[own]) for own in batch) + len(window) > tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch
