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

import numpy as np
import torch

from moe import MoE
from moe.prefill import Frequencies, chunk_sizes, distinct_experts, num_stages
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
        expert_bytes: of one expert.
        trunk_bytes: of all layers without experts, and of the output matrix.
        expert_operations, trunk_operations: for one token in one layer.
        pair_operations: for one query and one key in one layer.
        head_operations: for one row of logits.
    """

    layers: int
    expert_bytes: float
    trunk_bytes: float
    expert_operations: float
    trunk_operations: float
    pair_operations: float
    head_operations: float

    @classmethod
    def of(cls, model: MoE) -> Shape:
        network, config = model._trunk.model, model.config
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        experts, layers = model._experts.layers[0], len(model._experts.layers)
        head = network.get_output_embeddings().weight
        embedding = network.get_input_embeddings().weight
        trunk = sum(p.numel() for p in network.parameters() if p.dim() == 2)
        trunk -= head.numel() + (embedding.numel() if embedding is not head else 0)
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        return cls(
            layers=layers,
            expert_bytes=experts.expert_bytes,
            trunk_bytes=(trunk + head.numel()) * head.element_size(),
            expert_operations=2.0 * expert * config.num_experts_per_tok,
            trunk_operations=2.0 * trunk / layers,
            pair_operations=4.0 * heads * head_size,
            head_operations=2.0 * head.numel(),
        )


@dataclass(frozen=True)
class Part:
    """What one step reads of a prompt: positions ``start`` to ``end`` through some layers."""

    start: int
    end: int
    layers: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def pairs(self) -> float:
        return (self.end**2 - self.start**2) / 2


def parts_of(mode: str, prompt: int, decoding: int, chunk: int, layers: int) -> list[Part]:
    """The steps in which a mode reads a prompt, as `moe.prefill` would cut it."""
    settings = PrefillSettings(chunk_tokens=chunk, group_tokens=chunk)
    if mode == "whole":
        return [Part(0, prompt, layers)]
    if mode == "chunked":
        chunks = chunk_sizes(settings, prompt, decoding)
        ends = np.cumsum(chunks).tolist()
        return [Part(end - size, end, layers) for end, size in zip(ends, chunks, strict=True)]
    groups = np.array_split(range(layers), num_stages(settings, prompt, layers))
    return [Part(0, prompt, len(group)) for group in groups]


def predicted_loads(frequencies: Frequencies, parts: Sequence[Part], decoding: int) -> float:
    """Expert loads of one prompt, summed over layers (ALGORITHMS.md 2.3)."""
    layers = len(frequencies)
    alone = distinct_experts(frequencies, decoding)
    return sum(
        part.layers / layers * distinct_experts(frequencies, part.tokens + decoding)
        + (1 - part.layers / layers) * alone
        for part in parts
    )


def bounds(
    shape: Shape, machine: Machine, frequencies: Frequencies, parts: Sequence[Part], decoding: int
) -> dict[str, float]:
    """Bytes and operations until the first token; least seconds of all steps and of the longest.

    Frequencies are those of every layer; a stage of a wave touches its mean layer.
    """
    times, all_bytes, all_operations = [], 0.0, 0.0
    for part in parts:
        loads = predicted_loads(frequencies, [part], decoding)
        read = loads * shape.expert_bytes + shape.trunk_bytes
        row_layers = part.tokens * part.layers + decoding * shape.layers
        operations = row_layers * (shape.expert_operations + shape.trunk_operations)
        operations += part.pairs * part.layers * shape.pair_operations
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
