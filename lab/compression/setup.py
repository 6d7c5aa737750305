"""What `lab.compression` compares: test text, and a seed's calibrated experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from experts.compress.gptq import Moments, compensate, nearest, output_errors, spread
from experts.compress.statistics import LayerCalibration, LayerInputs, moments, usage
from experts.grid import quantize_exactly
from kernels import ExpertWeights
from kernels.planes import PREFIX_BITS, ZERO_CODE
from moe import MoE
from moe.commands.calibrate import compression
from moe.commands.calibrate.compression import LayerSensitivity, copied_experts
from moe.commands.calibrate.record import record_trace
from moe.commands.evaluate.scoring import Score, WindowReading, read, windows_of

ROOT = Path(__file__).parents[2]
TEXTS = ("prose", "python", "cpp")
WIDTHS = (0, 1, *PREFIX_BITS)
"""0 and 1 bits are measured to know what they would give; a store does not have them."""
GROUP_SIZE = 64
Bits = list[list[int]]

_CALIBRATION = 100_000
"""Where in the held-out files calibration text begins; test text is before it."""


def windows(model: MoE, start: int, length: int) -> tuple[list[list[int]], int]:
    """A part of each of the three texts, in windows; and its bytes."""
    texts = [
        (ROOT / f"tests/data/heldout_{name}.txt").read_text()[start : start + length]
        for name in TEXTS
    ]
    found = [window for text in texts for window in windows_of(model, text)]
    return found, sum(len(text.encode()) for text in texts)


class Text:
    """Test windows of three kinds, another part for each seed, and the original's readings."""

    def __init__(self, model: MoE, seed: int, bytes_a_text: int) -> None:
        assert (seed + 1) * bytes_a_text <= _CALIBRATION, "test text would run into calibration"
        own, self.num_bytes = windows(model, seed * bytes_a_text, bytes_a_text)
        self.model = model
        self.original = [read(model, window) for window in own]
        self.bits_per_byte = sum(one.bits for one in self.original) / self.num_bytes

    def score(
        self, layers: Mapping[int, ExpertWeights], *, original_routes: bool = False
    ) -> dict[str, Any]:
        """Return what changes with other experts; tokens go where they would, or where they
        went."""
        score = Score()
        for before in self.original:
            routes: WindowReading | None = before if original_routes else None
            score.add(read(self.model, before.token_ids, layers, routed_as=routes), before)
        found = score.difference()
        bits_per_byte = score.bits / self.num_bytes
        return {
            "bits_per_byte": bits_per_byte,
            "worse_percent": 100 * (bits_per_byte / self.bits_per_byte - 1),
            "kl": found.kl,
            "agreement": found.agreement,
            "routing": mean(found.routing),
            "routing_by_layer": [round(share, 4) for share in found.routing],
        }


class Calibrated:
    """A seed's calibration: its trace, statistics of all layers, their experts at each width."""

    def __init__(self, model: MoE, seed: int, bytes_a_text: int, read_tokens: int) -> None:
        own, _ = windows(model, _CALIBRATION + seed * bytes_a_text, bytes_a_text)
        self.trace = record_trace(model.backbone, model.experts, own)
        self.layers = range(len(self.trace.num_experts))
        self.whole = [
            copied_experts(experts, range(experts.num_experts)) for experts in model.experts.layers
        ]
        self.inputs = [compression.layer_inputs(self.trace, layer) for layer in self.layers]
        pairs = list(zip(self.whole, self.inputs, strict=True))
        self.alone = [{bits: alone(*pair, bits) for bits in WIDTHS} for pair in pairs]
        original = LayerSensitivity(model, compression.spread(self.trace, read_tokens))
        self.statistics = [self._measure(layer, original) for layer in self.layers]

    def at(self, bits: Bits) -> dict[int, ExpertWeights]:
        """Each expert at its own bits."""
        return {layer: self._layer(layer, bits[layer]) for layer in self.layers}

    def _measure(self, layer: int, original: LayerSensitivity) -> LayerCalibration:
        whole, inputs = self.whole[layer], self.inputs[layer]
        each = [self.alone[layer][bits] for bits in WIDTHS]
        error_EW = output_errors(whole, each, inputs)
        kl_W = original.losses(layer, each)
        return LayerCalibration(inputs, *usage(inputs, whole.num_experts), error_EW, kl_W)

    def _layer(self, layer: int, bits: Sequence[int]) -> ExpertWeights:
        own = self.alone[layer]
        firsts = [own[width].gate_up_EGH[expert] for expert, width in enumerate(bits)]
        seconds = [own[width].down_EHF[expert] for expert, width in enumerate(bits)]
        return replace(
            self.whole[layer], gate_up_EGH=torch.stack(firsts), down_EHF=torch.stack(seconds)
        )


def alone(whole: ExpertWeights, inputs: LayerInputs, bits: int) -> ExpertWeights:
    """All experts compensated for one width; nothing is left of an expert of 0 bits."""
    if bits == 0:
        nothing = torch.zeros_like(whole.gate_up_EGH), torch.zeros_like(whole.down_EHF)
        gate_up_EGH, down_EHF = (weight.float() for weight in nothing)
        return replace(whole, gate_up_EGH=gate_up_EGH, down_EHF=down_EHF)
    return prefixes(whole, inputs, [bits])[bits]


@torch.no_grad()
def prefixes(
    whole: ExpertWeights, inputs: LayerInputs, widths: Sequence[int], *, plain: bool = False
) -> dict[int, ExpertWeights]:
    """Return what the prefixes of each width of one code stand for, in float32.

    A code of 1 bit is a sign, and has a scale of its own: the group's mean magnitude.
    """
    found: dict[int, list[Tensor]] = defaultdict(list)
    every = moments(inputs, whole, range(whole.num_experts))
    for weight, moment in zip((whole.gate_up_EGH, whole.down_EHF), every, strict=True):
        codes, scales = quantize_exactly(weight, GROUP_SIZE)
        if list(widths) == [1]:
            sizes = weight.float().abs().unflatten(-1, (-1, GROUP_SIZE)).mean(-1)
            scales = (sizes / 64).half()
        if not plain:
            codes = compensate(weight, Moments.of(moment), scales, GROUP_SIZE, widths)
        scale = spread(scales, GROUP_SIZE, weight.shape[-1])
        for bits in widths:
            found[bits].append((nearest(codes.float(), bits) - ZERO_CODE) * scale)
    return {
        bits: replace(whole, gate_up_EGH=first, down_EHF=second)
        for bits, (first, second) in found.items()
    }
