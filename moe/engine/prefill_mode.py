"""``prefill.mode``: which mode reads the next prompts, and where a layered batch sleeps.

`PrefillPlanner` counts the expert reads of both modes over all layers, with B sequences decoding:
chunked ``sum_i N(c_i + B)``, layered ``N(P + B) + (G - 1) N(B)``, where ``N(t)`` is the number of
distinct experts of t tokens. N comes from the model's own measured expert frequencies p,
``N(t) = sum_e 1 - (1 - p_e)^t``: real models touch fewer experts than uniform routing would.

`layer_group_pauses` cuts the layers of a layered batch into groups, so that no step takes longer
than reading a chunk would. It compares steps by FLOPs and ignores memory traffic: a layer group
reads fewer experts than a chunk does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from experts.linear import QuantizedLinear
from kernels.reference import ExpertWeights
from moe.loading.hub import experts_per_token
from moe.network.moe_layer import MoELayers
from moe.settings import PrefillSettings
from offload.layer import LayerExperts, held_experts
from routing import RoutingStatistics

PrefillMode = Literal["whole", "chunked", "layered"]

Prompts = Sequence[range]
"""The positions that are read of each prompt."""
ChoosePauses = Callable[[Prompts], tuple[int, ...]]
"""The layers at which a layered batch sleeps, from its prompts."""
Frequencies = Sequence[NDArray[np.float64]]
"""Share of a layer's tokens that visit each expert, ``(E,)`` for every layer."""

SMALLEST_SAVING = 0.05
"""Layered prefill keeps a prompt's activations between steps; below this it is not worth it."""
_FLOPS_A_BYTE = 50
"""Operations of a CPU while a byte comes from a disk: 100 GFLOP/s against 2 GB/s."""


@dataclass(frozen=True)
class PrefillChoice:
    """Which mode reads the next prompts, and the expert loads predicted for both modes."""

    mode: PrefillMode
    chunked_loads: float
    layered_loads: float


class PrefillPlanner:
    """Chooses how the next prompts are read, by the routing statistics so far.

    Args:
        settings: modes and sizes.
        count_work: gives the FLOPs of a layer, once somebody needs them: it reads all modules.
        statistics: routing of the model; they grow while it runs.

    Attributes:
        last_choice: what `choose` decided last of prompts that take several steps.
    """

    def __init__(
        self,
        settings: PrefillSettings,
        count_work: Callable[[], LayerWork],
        statistics: RoutingStatistics,
    ) -> None:
        self._settings = settings
        self._count_work = count_work
        self._statistics = statistics
        self.last_choice: PrefillChoice | None = None

    @cached_property
    def _work(self) -> LayerWork:
        return self._count_work()

    def pauses(self, prompts: Prompts) -> tuple[int, ...]:
        """Layers at which a layered batch of these prompts sleeps until the next step."""
        frequencies = measured_frequencies(self._statistics, self._work.top_k)
        return layered_pauses(self._settings, frequencies, self._work, prompts)

    def choose(self, num_tokens: int, num_decoding: int) -> PrefillMode:
        """The mode for the next prompt tokens."""
        if num_tokens + num_decoding <= self._settings.chunk_tokens:
            return "chunked"  # one step reads them all: no way loads fewer experts
        frequencies = measured_frequencies(self._statistics, self._work.top_k)
        choice = choose_prefill(self._settings, frequencies, self._work, num_tokens, num_decoding)
        self.last_choice = choice
        return choice.mode


def distinct_experts(frequencies: Frequencies, num_tokens: int) -> float:
    """Expected distinct experts that ``num_tokens`` independent tokens visit, over all layers."""
    return float(sum((1 - (1 - p) ** num_tokens).sum() for p in frequencies))


def chunked_loads(frequencies: Frequencies, chunks: Sequence[int], num_decoding: int) -> float:
    """Expert loads of prompts read in steps of ``chunks`` tokens."""
    return sum(distinct_experts(frequencies, size + num_decoding) for size in chunks)


def layered_loads(
    frequencies: Frequencies, num_tokens: int, num_layer_groups: int, num_decoding: int
) -> float:
    """Expert loads of prompts read in ``num_layer_groups`` groups of layers."""
    batch = distinct_experts(frequencies, num_tokens + num_decoding)
    return batch + (num_layer_groups - 1) * distinct_experts(frequencies, num_decoding)


def measured_frequencies(
    statistics: RoutingStatistics, top_k: float = 1.0
) -> list[NDArray[np.float64]]:
    """Expert frequencies of each layer so far; uniform over ``top_k`` before any token."""
    frequencies, tokens = [], statistics.tokens
    counts = statistics.tokens_of_all().numpy().astype(np.float64) if any(tokens) else np.empty(0)
    for layer, num_experts in enumerate(statistics.num_experts):
        if tokens[layer]:
            frequencies.append(counts[layer, :num_experts] / tokens[layer])
        else:
            frequencies.append(np.full(num_experts, min(top_k / num_experts, 1.0)))
    return frequencies


def chunk_sizes(settings: PrefillSettings, num_tokens: int, num_decoding: int) -> list[int]:
    """Prompt tokens of each step when a step has ``chunk_tokens`` in all."""
    room = max(settings.chunk_tokens - num_decoding, 1)
    return [min(room, num_tokens - start) for start in range(0, num_tokens, room)]


def layered_pauses(
    settings: PrefillSettings, frequencies: Frequencies, work: LayerWork, prompts: Prompts
) -> tuple[int, ...]:
    """`layer_group_pauses`, with the experts a token visits by their measured frequencies."""
    visits = sum(float(layer.sum()) for layer in frequencies)
    measured = replace(work, top_k=visits / len(frequencies))
    return layer_group_pauses(measured, settings.group_tokens, prompts, len(frequencies))


def choose_prefill(
    settings: PrefillSettings,
    frequencies: Frequencies,
    work: LayerWork,
    num_tokens: int,
    num_decoding: int,
) -> PrefillChoice:
    """The mode with fewer expert loads for the next prompt tokens, taken as one prompt."""
    num_layer_groups = len(layered_pauses(settings, frequencies, work, [range(num_tokens)])) + 1
    layered = layered_loads(frequencies, num_tokens, num_layer_groups, num_decoding)
    chunks = chunk_sizes(settings, num_tokens, num_decoding)
    chunked = chunked_loads(frequencies, chunks, num_decoding)
    mode: PrefillMode = "layered" if layered <= (1 - SMALLEST_SAVING) * chunked else "chunked"
    return PrefillChoice(mode, chunked, layered)


@dataclass(frozen=True)
class LayerWork:
    """FLOPs of the mean layer, two for each multiplication.

    Attributes:
        backbone: of one token outside attention and experts.
        pair: of one query and one key.
        expert: of one token in one expert.
        top_k: experts of a token.
    """

    backbone: float
    pair: float
    expert: float
    top_k: float

    @property
    def experts(self) -> float:
        """FLOPs of one token in all its experts."""
        return self.expert * self.top_k

    @classmethod
    def of(cls, network: PreTrainedModel, layers: Sequence[LayerExperts]) -> LayerWork:
        """Count weights, and take attention and ``top_k`` from the configuration."""
        config = network.config.get_text_config()
        return cls(
            backbone=2.0 * backbone_weights(network) / len(layers),
            pair=_pair_operations(config) / len(layers),
            expert=2.0 * sum(map(_expert_weights, layers)) / len(layers),
            top_k=experts_per_token(config),
        )


def backbone_weights(network: PreTrainedModel) -> int:
    """Elements of all matrices but embeddings, output head and experts."""
    head = network.get_output_embeddings()
    modules = (m for m in network.modules() if m is not head and not isinstance(m, nn.Embedding))
    return sum(map(_matrix_weights, modules))


def _pair_operations(config: Any) -> float:
    """FLOPs of a query and a key, summed over layers with full attention. (Sliding windows and
    recurrent states cost the same for every token.)"""
    layers = config.per_layer_config  # sizes may differ from layer to layer
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    operations = 0.0
    for layer, kind in zip(layers, kinds, strict=False):
        heads = layer.num_attention_heads
        own = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        key = getattr(layer, "qk_head_dim", None) or own
        value = getattr(layer, "v_head_dim", None) or own
        operations += 2.0 * heads * (key + value) * (kind == "full_attention")
    return operations


def _matrix_weights(module: nn.Module) -> int:
    if isinstance(module, QuantizedLinear):
        return module.in_features * module.out_features
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)


def _expert_weights(layer: LayerExperts) -> int:
    experts = held_experts(layer)
    parts = (
        experts.gate_up_EGH.shape[1] // experts.intermediate_size
        if isinstance(experts, ExpertWeights)
        else experts.parts
    )
    return (parts + 1) * experts.intermediate_size * experts.hidden_size


def layer_group_pauses(
    work: LayerWork, group_tokens: int, prompts: Prompts, num_layers: int
) -> tuple[int, ...]:
    """MoE layers before whose experts a batch of prompts sleeps until the next step.

    The fewest pauses that keep each step within the longest chunk of ``group_tokens``. Lanes sleep
    behind a layer's attention, so the first group has one attention more than experts and the last
    one less. A group has at least one of each, so very long batches can exceed the limit.
    """
    num_tokens = sum(map(len, prompts))
    pairs = sum(prompt.stop**2 - prompt.start**2 for prompt in prompts) / 2
    attention = num_tokens * work.backbone + pairs * work.pair
    experts = num_tokens * work.experts
    # done[i]: work behind which layer i's experts wait; the last entry is all of it
    done = [(layer + 1) * attention + layer * experts for layer in range(num_layers)]
    done.append(num_layers * (attention + experts))
    longest = num_layers * _longest_chunk(work, group_tokens, prompts) * (1 + 1e-9)
    pauses: list[int] = []
    begin = 0.0
    for layer in range(num_layers):
        if done[layer + 1] - begin > longest:
            pauses.append(layer)
            begin = done[layer]
    return tuple(pauses)


def _longest_chunk(work: LayerWork, group_tokens: int, prompts: Prompts) -> float:
    """FLOPs of the most expensive chunk in one layer.

    A chunk is compared with all keys up to its end; the causal mask of a whole prompt saves half.
    """
    longest, chunk, room = 0.0, 0.0, group_tokens
    for prompt in prompts:
        end = prompt.start
        while end < prompt.stop:
            if not room:
                chunk, room = 0.0, group_tokens
            size = min(room, prompt.stop - end)
            end += size
            room -= size
            chunk += size * (work.backbone + work.experts + work.pair * end)
            longest = max(longest, chunk)
    return longest


@dataclass(frozen=True)
class RereadCost:
    """The cost of reading tokens again: their arithmetic, and the experts that come from disk.

    Attributes:
        work: of a layer.
        experts: with the routing so far, which says how many distinct experts tokens visit.
        miss_ratio: of a layer, the share of experts asked for that are read from disk; None: all
            are in memory.
    """

    work: LayerWork
    experts: MoELayers
    miss_ratio: Callable[[int], float] | None = None

    def __call__(self, tokens: int) -> float:
        """In FLOPs."""
        layers = self.experts.layers
        cost = tokens * len(layers) * (self.work.backbone + self.work.experts)
        if self.miss_ratio is None:
            return cost
        frequencies = measured_frequencies(self.experts.statistics, self.work.top_k)
        for index, (layer, own) in enumerate(zip(layers, frequencies, strict=True)):
            read = distinct_experts([own], tokens) * self.miss_ratio(index)
            cost += read * layer.expert_bytes * _FLOPS_A_BYTE
        return cost
