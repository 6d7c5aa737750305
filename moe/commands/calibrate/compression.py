"""``moe calibrate --compression``: measure what each MoE layer loses at fewer bits.

From the rows that experts read in the trace, `analyse` quantises a layer at every width as ``moe
convert`` would, and measures the error of each expert. It also reads a part of the text with only
that layer quantised, and measures the KL divergence of the predictions. It writes one file for each
layer and keeps existing ones, so that an interrupted run can be continued.

Beyond the model itself, memory holds one layer's planes and a few whole experts at a time; experts
may stay on disk. Legend: T tokens of a window, E experts, W widths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.compress.gptq import MIN_ROWS, output_errors, quantize_at_each_width, too_few
from experts.compress.statistics import LayerCalibration, LayerInputs, StatisticsError, usage
from experts.weights import dequantize_experts
from kernels import ExpertWeights, QuantizedExperts, experts_forward
from kernels.planes import PREFIX_BITS
from kernels.reference import AnyExperts
from moe.calibration.trace import Trace
from moe.commands.calibrate.record import window_batches
from moe.commands.console import OnStep
from moe.commands.evaluate.scoring import divergence, read_once
from moe.errors import CalibrationError
from moe.model import MoE
from moe.network.lanes import ExpertCall, Lane, run_lanes
from moe.network.packed_pass import Work
from offload.layer import LayerExperts, OffloadedExperts, held_experts

COMPRESSION_FOLDER = "compression"

PIECE_WEIGHTS = 1 << 25
"""Weights that `pieces` yields at a time: 128 MiB in float32."""

KEPT_BYTES = 256 << 20
"""Memory for outputs of the original experts; the others are computed again for each layer."""

LANE_TOKENS = 2048
"""Tokens of all lanes that run together: each lane holds its keys and values."""

_BIASES = ("gate_up_bias_EG", "down_bias_EH")
_ORIGINAL = -1

Lanes = dict[Lane[list[Tensor]], tuple[int, int]]
"""The window that a lane reads, and the version it reads with."""


@torch.inference_mode()
def analyse(
    model: MoE,
    trace: Trace,
    folder: Path,
    on_step: OnStep = lambda what, done, total: None,
    *,
    read_tokens: int = 2048,
    group_size: int = 64,
) -> list[str]:
    """Write the statistics of every MoE layer to `folder`; keep those of this trace already there.

    Args:
        read_tokens: tokens of the text to measure the KL divergence on; at least one sequence.
        group_size: of the quantisation.

    Returns:
        One sentence for each layer with experts that had too few tokens.

    Raises:
        CalibrationError: the trace has no rows, the model is not on the CPU, a layer's losses are
            not finite, or a file cannot be written.
    """
    if trace.rows is None:
        raise CalibrationError("compression needs the rows that experts read; the trace has none")
    if model.backbone.device.type != "cpu":
        raise CalibrationError(
            f"what fewer bits cost is measured on the CPU, and the model is on "
            f"{model.backbone.device}: add --set device=cpu"
        )
    original = LayerSensitivity(model, spread(trace, read_tokens))
    notices, count, job = [], len(trace.num_experts), _job(model, trace, read_tokens, group_size)
    for layer in range(count):
        on_step("measuring layers", layer, count)
        path, inputs = layer_path(folder, layer), layer_inputs(trace, layer)
        if not _finished(path, job):
            statistics = _analyse(model, layer, inputs, original, group_size)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                statistics.save(path, job)
            except OSError as error:
                raise CalibrationError(
                    f"cannot write the calibration to {path}: {error}; name another place with "
                    "--out, and repeat the command: it continues from here"
                ) from error
        if few := too_few(inputs, trace.num_experts[layer]):
            notices.append(
                f"layer {layer}: {len(few)} experts have fewer than {MIN_ROWS} tokens and are "
                f"rounded plainly: {', '.join(map(str, few))}"
            )
    on_step("measuring layers", count, count)
    return notices


def _analyse(
    model: MoE, layer: int, inputs: LayerInputs, original: LayerSensitivity, group_size: int
) -> LayerCalibration:
    experts, errors = model.experts.layers[layer], []
    at_widths: list[list[QuantizedExperts]] = [[] for _ in PREFIX_BITS]
    for ids, whole in pieces(experts):
        own = inputs.of_experts(ids)
        quantized = quantize_at_each_width(whole, own, group_size)
        errors.append(output_errors(whole, map(dequantize_experts, quantized), own))
        for parts, part in zip(at_widths, quantized, strict=True):
            parts.append(part)
    error_EW = torch.cat(errors)
    kl_W = original.losses(layer, [join_experts(parts) for parts in at_widths])
    if not bool(error_EW.isfinite().all() & kl_W.isfinite().all()):
        raise CalibrationError(
            f"MoE layer {layer}: what it loses at {PREFIX_BITS} bits is not finite (KL "
            f"{kl_W.tolist()}, {int((~error_EW.isfinite()).any(1).sum())} of {len(error_EW)} "
            "experts); the model's weights are damaged, or its dtype overflows (try --set "
            "model.dtype=float32)"
        )
    return LayerCalibration(inputs, *usage(inputs, experts.num_experts), error_EW, kl_W)


def _job(model: MoE, trace: Trace, read_tokens: int, group_size: int) -> str:
    """Digest of what the statistics depend on; it does not depend on the number of threads."""
    about = (model.config.to_json_string(), read_tokens, group_size, trace.lengths)
    digest = hashlib.sha256(repr(about).encode())
    digest.update(trace.token_ids.numpy().tobytes())
    for ids in trace.expert_ids:  # other weights would route the text differently
        digest.update(ids.numpy().tobytes())
    return digest.hexdigest()


def _finished(path: Path, job: str) -> bool:
    try:
        LayerCalibration.load(path, job)
    except StatisticsError:
        return False
    return True


def load_statistics(folder: Path, num_layers: int) -> list[LayerCalibration]:
    """The files of `analyse`. Raises `CalibrationError` if a layer is missing or damaged."""
    return [load_layer(folder, layer) for layer in range(num_layers)]


def load_layer(folder: Path, layer: int) -> LayerCalibration:
    """The file of `analyse` for one layer. Raises `CalibrationError` if missing or damaged."""
    try:
        return LayerCalibration.load(layer_path(folder, layer))
    except StatisticsError as error:
        raise CalibrationError(
            f"{error}; run moe calibrate MODEL --text FILE --compression first"
        ) from error


def layer_path(folder: Path, layer: int) -> Path:
    """The file of a layer's statistics in a calibration's folder."""
    return folder / COMPRESSION_FOLDER / f"layer-{layer:05}.safetensors"


def layer_inputs(trace: Trace, layer: int) -> LayerInputs:
    """The sampled rows of a layer, with their routing."""
    assert trace.rows is not None
    tokens = trace.rows.tokens
    ids, weights = trace.expert_ids[layer][tokens], trace.weights[layer][tokens]
    return LayerInputs(trace.rows.expert_inputs[layer], ids, weights)


def spread(trace: Trace, tokens: int) -> list[list[int]]:
    """Sequences spread evenly over the trace, with about ``tokens`` tokens; at least one."""
    sequences = trace.token_ids.split(trace.lengths)
    wanted = max(1, tokens * len(sequences) // trace.num_tokens)
    stride = max(1, len(sequences) // wanted)
    return [ids.tolist() for ids in sequences[::stride]]


class LayerSensitivity:
    """Measures the KL divergence of predictions when other experts replace those of one MoE layer.

    The original and every version of the layer read the text together, each in its own lane. Below
    the replaced layer all lanes are equal, so they share the original's expert outputs, which are
    also kept for the next layers. Above it the lanes meet at each layer, so that each expert is
    fetched once for all versions and windows. The last layer and the logits run one lane at a time,
    because logits take most memory.

    Args:
        model: on the CPU.
        windows: token ids.
    """

    def __init__(self, model: MoE, windows: Sequence[Sequence[int]]) -> None:
        self._model, self._windows = model, windows
        self._given: dict[tuple[int, int], Tensor] = {}  # by window and layer
        self._room = KEPT_BYTES

    @torch.inference_mode()
    def losses(self, layer: int, versions: Sequence[AnyExperts]) -> Tensor:
        """``(len(versions),)`` float64: KL divergence of each version, in bits per token.

        Raises:
            OffloadError: an expert cannot be read.
        """
        lost = torch.zeros(len(versions), dtype=torch.float64)
        with read_once(self._model.backbone, self._model.experts):
            for windows in window_batches(self._windows, LANE_TOKENS // (1 + len(versions))):
                lost += self._divergences(windows, layer, versions)
        return lost.clamp_min(0) / sum(map(len, self._windows))

    def _divergences(
        self, windows: Sequence[int], layer: int, versions: Sequence[AnyExperts]
    ) -> Tensor:
        """KL divergences summed over the tokens of these windows."""
        lanes: Lanes = {
            self._lane(self._windows[window]): (window, version)
            for window in windows
            for version in range(_ORIGINAL, len(versions))
        }
        run = partial(self._run, layer, versions, lanes)
        last = len(self._model.experts.layers) - 1
        run_lanes(list(lanes), run, pause_at=dict.fromkeys(lanes, last))
        for failed in [lane for lane in lanes if lane.finished]:
            failed.result()
        rows = run(last, [lane.call for lane in lanes if lane.call is not None])
        lost, before = torch.zeros(len(versions), dtype=torch.float64), torch.empty(0)
        for own, (_, version) in zip(rows, list(lanes.values()), strict=True):
            lane = next(iter(lanes))
            del lanes[lane]  # frees its logits in the next round
            if isinstance(own, Exception):
                raise own
            lane.resume(own)
            logprobs_TV = lane.result()[0].log_softmax(-1)
            if version == _ORIGINAL:
                before = logprobs_TV
            else:
                lost[version] += divergence(before, logprobs_TV)
        return lost

    def _lane(self, window: Sequence[int]) -> Lane[list[Tensor]]:
        backbone = self._model.backbone
        (lane,) = backbone.lanes(
            [Work(list(window), backbone.new_cache(len(window)), all_logits=True)]
        )
        return lane

    def _run(
        self,
        replaced: int,
        versions: Sequence[AnyExperts],
        lanes: Lanes,
        layer: int,
        calls: Sequence[ExpertCall],
    ) -> Sequence[Tensor | Exception]:
        """Expert outputs for the lanes that wait at a layer: kept ones, a version's, or new."""
        waiting = {id(lane.call): about for lane, about in lanes.items()}
        whose = [waiting[id(call)] for call in calls]
        if layer < replaced:  # all lanes are still equal
            whose = [(window, _ORIGINAL) for window, _ in whose]
        rows: dict[tuple[int, int], Tensor | Exception] = {}
        others: dict[tuple[int, int], ExpertCall] = {}
        for about, call in zip(whose, calls, strict=True):
            window, version = about
            if version == _ORIGINAL and (window, layer) in self._given:
                rows[about] = self._given[window, layer]
            elif version != _ORIGINAL and layer == replaced:
                ids, weights = call.routing.expert_ids, call.routing.weights
                rows[about] = experts_forward(call.hidden_states, ids, weights, versions[version])
            else:
                others[about] = call
        if others:
            rows |= zip(others, self._model.experts.run(layer, list(others.values())), strict=True)
        for (window, version), own in rows.items():
            new = version == _ORIGINAL and (window, layer) not in self._given
            if new and isinstance(own, Tensor) and own.nbytes <= self._room:
                self._room -= own.nbytes
                self._given[window, layer] = own
        found = [rows[about] for about in whose]
        return [own.clone() if isinstance(own, Tensor) else own for own in found]


def pieces(layer: LayerExperts) -> Iterator[tuple[Sequence[int], ExpertWeights]]:
    """All experts of a layer, a few at a time: their ids and their weights, dequantised.

    Raises:
        OffloadError: an expert cannot be read.
    """
    held = held_experts(layer)
    weights = 3 * held.hidden_size * held.intermediate_size
    size = max(1, PIECE_WEIGHTS // weights)
    for start in range(0, layer.num_experts, size):
        ids = range(start, min(start + size, layer.num_experts))
        yield ids, copied_experts(layer, ids)


def copied_experts(layer: LayerExperts, experts: Sequence[int]) -> ExpertWeights:
    """Some experts of a layer, ids ascending, as a layer of their own; read from disk if needed.

    Raises:
        OffloadError: an expert cannot be read.
    """
    if not isinstance(layer, OffloadedExperts):
        return _taken(layer, experts)
    found = []
    with layer.cache.acquire(layer.layer, list(experts)) as held:
        for ready in held.rounds:
            slots = ready.slot_ids[torch.tensor(ready.experts)].tolist()
            found.append(_taken(layer.slots, slots))
    return _joined(found)


def join_experts(parts: Sequence[QuantizedExperts]) -> QuantizedExperts:
    """Several pieces as one layer, experts in order."""
    own: dict[str, Any] = {name: _cat([getattr(part, name) for part in parts]) for name in _BIASES}
    own["planes"] = tuple(planes for part in parts for planes in part.planes)
    own["scales"] = tuple(scales for part in parts for scales in part.scales)
    return replace(parts[0], **own)


def _taken(layer: AnyExperts, experts: Sequence[int]) -> ExpertWeights:
    """A copy of the experts and their biases."""
    chosen = torch.tensor(experts)
    own: dict[str, Any] = {
        name: None if (bias := getattr(layer, name)) is None else bias[chosen] for name in _BIASES
    }
    if isinstance(layer, QuantizedExperts):
        own["planes"] = tuple(layer.planes[expert] for expert in experts)
        own["scales"] = tuple(layer.scales[expert] for expert in experts)
        return dequantize_experts(replace(layer, **own))
    own |= {"gate_up_EGH": layer.gate_up_EGH[chosen], "down_EHF": layer.down_EHF[chosen]}
    return replace(layer, **own)


def _joined(layers: Sequence[ExpertWeights]) -> ExpertWeights:
    names = ("gate_up_EGH", "down_EHF", *_BIASES)
    own: dict[str, Any] = {name: _cat([getattr(part, name) for part in layers]) for name in names}
    return replace(layers[0], **own)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
