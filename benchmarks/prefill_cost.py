"""What bytes and operations allow: the least time of each prefill mode on this machine.

A step takes at least as long as reading its weights at the measured bandwidth, and at least as long
as its multiplications at the measured rate of matrix products; the larger of the two is its bound.
Counted are the trunk's matrices, the experts, and attention (only what the causal mask lets
through). Not counted are keys and values read, activations, norms, sampling and Python.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from moe import MoE
from moe.engine.prefill_mode import (
    Frequencies,
    LayerWork,
    backbone_weights,
    chunk_sizes,
    distinct_experts,
    layered_pauses,
)
from moe.settings import PrefillSettings


@dataclass(frozen=True)
class Machine:
    """Bytes a second read from memory, and operations a second of a large matrix product."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Shape:
    """What a model costs; operations are two for each multiplication.

    Attributes:
        layers: MoE layers; every layer is taken to be one.
        work: operations of a layer.
        expert_bytes: of one expert.
        trunk_bytes: of all layers without experts, and of the output matrix.
        head_operations: for one row of logits.
    """

    layers: int
    work: LayerWork
    expert_bytes: float
    trunk_bytes: float
    head_operations: float

    @classmethod
    def of(cls, model: MoE) -> Shape:
        network, layers = model.backbone.model, model.experts.layers
        head = network.get_output_embeddings().weight
        return cls(
            layers=len(layers),
            work=LayerWork.of(network, layers),
            expert_bytes=layers[0].expert_bytes,
            trunk_bytes=(backbone_weights(network) + head.numel()) * head.element_size(),
            head_operations=2.0 * head.numel(),
        )


@dataclass(frozen=True)
class Part:
    """What one step reads of a prompt: positions ``start`` to ``end`` through some layers.

    Attributes:
        attentions: layers whose attention it computes.
        experts: layers whose experts it computes.
    """

    start: int
    end: int
    attentions: int
    experts: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def pairs(self) -> float:
        return (self.end**2 - self.start**2) / 2


def parts_of(
    mode: str,
    prompt: int,
    decoding: int,
    chunk: int,
    frequencies: Frequencies,
    work: LayerWork,
) -> list[Part]:
    """The steps in which a mode reads a prompt, as `moe.engine.prefill_mode` would cut it."""
    settings = PrefillSettings(chunk_tokens=chunk, group_tokens=chunk)
    layers = len(frequencies)
    if mode == "whole":
        return [Part(0, prompt, layers, layers)]
    if mode == "chunked":
        chunks = chunk_sizes(settings, prompt, decoding)
        ends = np.cumsum(chunks).tolist()
        return [
            Part(end - size, end, layers, layers) for end, size in zip(ends, chunks, strict=True)
        ]
    asleep = layered_pauses(settings, frequencies, work, [range(prompt)])
    attentions = pairwise([0, *(layer + 1 for layer in asleep), layers])
    experts = pairwise([0, *asleep, layers])
    return [
        Part(0, prompt, last - first, end - start)
        for (first, last), (start, end) in zip(attentions, experts, strict=True)
    ]


def predicted_loads(frequencies: Frequencies, parts: Sequence[Part], decoding: int) -> float:
    """Expert loads of one prompt, summed over layers."""
    layers = len(frequencies)
    alone = distinct_experts(frequencies, decoding)
    return sum(
        part.experts / layers * distinct_experts(frequencies, part.tokens + decoding)
        + (1 - part.experts / layers) * alone
        for part in parts
    )


def bounds(
    shape: Shape, machine: Machine, frequencies: Frequencies, parts: Sequence[Part], decoding: int
) -> dict[str, float]:
    """Bytes and operations until the first token; least seconds of all steps and of the longest.

    Frequencies are those of every layer; a stage of a wave touches its mean layer.
    """
    work = shape.work
    times, all_bytes, all_operations = [], 0.0, 0.0
    for part in parts:
        loads = predicted_loads(frequencies, [part], decoding)
        read = loads * shape.expert_bytes + shape.trunk_bytes
        rows = decoding * shape.layers
        operations = (part.tokens * part.experts + rows) * work.experts
        operations += (part.tokens * part.attentions + rows) * work.backbone
        operations += part.pairs * part.attentions * work.pair
        operations += decoding * shape.head_operations
        times.append(max(read / machine.bytes_per_s, operations / machine.operations_per_s))
        all_bytes += read
        all_operations += operations
    return {
        "bytes": all_bytes,
        "operations": all_operations,
        "ttft_s": sum(times),
        "longest_step_s": max(times),
    }


def matmul_rate(size: int = 1536) -> float:
    """Operations a second of a float32 matrix product with all threads, the best of several."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
