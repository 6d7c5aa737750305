"""What `benchmarks.compression` compares: test text, a seed's calibration, ways to allot bits."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.compress.allocation import allocate
from experts.compress.damage import predicted_damage
from experts.compress.gptq import compensate, nearest, spread
from experts.compress.inputs import LayerInputs, moments
from experts.compress.statistics import LayerStatistics
from experts.grid import quantize_exactly
from kernels import ExpertWeights
from kernels.planes import PREFIX_BITS, ZERO_CODE
from moe import MoE
from moe.calibrate.compression import analyse, inputs_of, load_statistics, whole_layer
from moe.calibrate.record import record
from moe.scoring import Score, read, windows_of

ROOT = Path(__file__).parents[1]
TEXTS = ("prose", "python", "cpp")
WIDTHS = (2, 3, 4, 8)
GROUP_SIZE = 64
METHODS = ("uniform", "frequency", "error", "paper", "paper, one budget", "ours")
Bits = list[list[int]]


class Text:
    """Test windows of three kinds, and the original's readings of them."""

    def __init__(self, model: MoE, bytes_a_text: int) -> None:
        texts = [_text(name)[:bytes_a_text] for name in TEXTS]
        self.model = model
        self.num_bytes = sum(len(text.encode()) for text in texts)
        windows = [window for text in texts for window in windows_of(model, text)]
        self.original = [read(model, window) for window in windows]
        self.bits_per_byte = sum(one.bits for one in self.original) / self.num_bytes

    def score(self, layers: Mapping[int, ExpertWeights]) -> dict[str, float]:
        score = Score()
        for before in self.original:
            score.add(read(self.model, before.token_ids, layers), before)
        found = score.difference()
        return {
            "bits_per_byte": score.bits / self.num_bytes,
            "kl": found.kl,
            "agreement": found.agreement,
            "routing": mean(found.routing),
        }


class Calibrated:
    """A seed's calibration: statistics of all layers, and their experts at every width alone."""

    def __init__(self, model: MoE, seed: int, bytes_a_text: int, read_tokens: int) -> None:
        start = 100_000 + seed * bytes_a_text
        texts = [_text(name)[start : start + bytes_a_text] for name in TEXTS]
        windows = [window for text in texts for window in windows_of(model, text)]
        trace = record(model._trunk, model._experts, windows)
        self.layers = range(len(trace.num_experts))
        self.whole = [whole_layer(model, layer) for layer in self.layers]
        self.inputs = [inputs_of(trace, layer) for layer in self.layers]
        with tempfile.TemporaryDirectory() as folder:
            analyse(model, trace, Path(folder), read_tokens=read_tokens)
            self.statistics = load_statistics(Path(folder), len(self.layers))
        self._alone = [
            {bits: prefixes(whole, inputs, [bits])[bits] for bits in WIDTHS}
            for whole, inputs in zip(self.whole, self.inputs, strict=True)
        ]

    def at(self, bits: Bits) -> dict[int, ExpertWeights]:
        """Each expert at its own bits."""
        return {layer: self._layer(layer, bits[layer]) for layer in self.layers}

    def _layer(self, layer: int, bits: Sequence[int]) -> ExpertWeights:
        alone = self._alone[layer]
        firsts = [alone[width].gate_up_EGH[expert] for expert, width in enumerate(bits)]
        seconds = [alone[width].down_EHF[expert] for expert, width in enumerate(bits)]
        return replace(
            self.whole[layer], gate_up_EGH=torch.stack(firsts), down_EHF=torch.stack(seconds)
        )


@torch.no_grad()
def prefixes(
    whole: ExpertWeights, inputs: LayerInputs, widths: Sequence[int], *, plain: bool = False
) -> dict[int, ExpertWeights]:
    """What the prefixes of each width of one code stand for, in float32."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    every = moments(inputs, whole, range(whole.num_experts))
    for weight, moment in zip((whole.gate_up_EGH, whole.down_EHF), every, strict=True):
        codes, scales = quantize_exactly(weight, GROUP_SIZE)
        if not plain:
            codes = compensate(weight, moment, scales, GROUP_SIZE, widths)
        scale = spread(scales, GROUP_SIZE, weight.shape[-1])
        for bits in widths:
            found[bits].append((nearest(codes.float(), bits) - ZERO_CODE) * scale)
    return {
        bits: replace(whole, gate_up_EGH=first, down_EHF=second)
        for bits, (first, second) in found.items()
    }


def allotted(method: str, bits: float, statistics: Sequence[LayerStatistics], seed: int) -> Bits:
    """Bits of every expert by one of `METHODS`, `bits` in the mean."""
    counts = [len(layer.frequency_E) for layer in statistics]
    if method == "uniform":
        return _uniform(bits, counts, seed)
    if method == "paper":
        return [_allocate([layer], "paper", bits)[0] for layer in statistics]
    damage = {"ours": "measured", "paper, one budget": "paper"}.get(method, method)
    return _allocate(statistics, damage, bits)


def _uniform(bits: float, counts: Sequence[int], seed: int) -> Bits:
    """The two nearest widths, in shares that give the mean, whoever the experts are."""
    low = max(width for width in WIDTHS if width <= bits)
    high = min(width for width in WIDTHS if width >= bits)
    total = sum(counts)
    finer = 0 if low == high else round(total * (bits - low) / (high - low))
    drawn = np.full(total, low)
    drawn[np.random.default_rng(seed).permutation(total)[:finer]] = high
    return _by_layer(drawn, counts)


def _allocate(statistics: Sequence[LayerStatistics], damage: str, bits: float) -> Bits:
    counts = [len(layer.frequency_E) for layer in statistics]
    sizes = np.tile(np.array(PREFIX_BITS), (sum(counts), 1))
    choice = allocate(predicted_damage(statistics, damage), sizes, int(bits * sum(counts)))
    return _by_layer(np.array(PREFIX_BITS)[choice], counts)


def _by_layer(bits: Any, counts: Sequence[int]) -> Bits:
    return [part.tolist() for part in np.split(bits, np.cumsum(counts)[:-1])]


def _text(name: str) -> str:
    return (ROOT / f"tests/data/heldout_{name}.txt").read_text()
