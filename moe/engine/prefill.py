"""How many experts reading a prompt will touch, by prefill mode, and which mode to take.

Counted a layer and summed over layers, with B sequences decoding:
chunked ``sum_i N(c_i + B)``, layered ``N(P + B) + (G - 1) N(B)``, where ``N(t)`` is the number of
distinct experts of t tokens. N comes from the model's own measured expert frequencies p,
``N(t) = sum_e 1 - (1 - p_e)^t``: real models touch fewer experts than uniform routing would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe.engine.stages import LayerWork, Prompts, stage_pauses
from moe.settings import PrefillSettings
from routing import RoutingStatistics

Mode = Literal["whole", "chunked", "layered"]
Frequencies = Sequence[NDArray[np.float64]]
"""Share of a layer's tokens that visit each expert, ``(E,)`` for every layer."""

SMALLEST_SAVING = 0.05
"""Layered prefill keeps a prompt's activations between steps; below this it is not worth it."""


@dataclass(frozen=True)
class PrefillChoice:
    """Which mode reads the next prompts, and the expert loads predicted for both ways."""

    mode: Mode
    chunked_loads: float
    layered_loads: float


def distinct_experts(frequencies: Frequencies, num_tokens: int) -> float:
    """Expected distinct experts that ``num_tokens`` independent tokens visit, over all layers."""
    return float(sum((1 - (1 - p) ** num_tokens).sum() for p in frequencies))


def chunked_loads(frequencies: Frequencies, chunks: Sequence[int], num_decoding: int) -> float:
    """Expert loads of prompts read in steps of ``chunks`` tokens."""
    return sum(distinct_experts(frequencies, size + num_decoding) for size in chunks)


def layered_loads(
    frequencies: Frequencies, num_tokens: int, num_stages: int, num_decoding: int
) -> float:
    """Expert loads of prompts read in ``num_stages`` groups of layers."""
    wave = distinct_experts(frequencies, num_tokens + num_decoding)
    return wave + (num_stages - 1) * distinct_experts(frequencies, num_decoding)


def measured_frequencies(
    statistics: RoutingStatistics, top_k: float = 1.0
) -> list[NDArray[np.float64]]:
    """Expert frequencies of each layer so far; before any token, ``top_k`` experts evenly."""
    frequencies = []
    for layer, num_experts in enumerate(statistics.num_experts):
        if statistics.tokens[layer]:
            counts = statistics.tokens_per_expert(layer).numpy().astype(np.float64)
            frequencies.append(counts / statistics.tokens[layer])
        else:
            frequencies.append(np.full(num_experts, min(top_k / num_experts, 1.0)))
    return frequencies


def chunk_sizes(settings: PrefillSettings, num_tokens: int, num_decoding: int) -> list[int]:
    """Prompt tokens of each step when a step has ``chunk_tokens`` in all."""
    room = max(settings.chunk_tokens - num_decoding, 1)
    return [min(room, num_tokens - start) for start in range(0, num_tokens, room)]


def pauses(
    settings: PrefillSettings, frequencies: Frequencies, work: LayerWork, prompts: Prompts
) -> tuple[int, ...]:
    """`stage_pauses` of a layered wave, with the experts a token visits by their frequencies."""
    visits = sum(float(layer.sum()) for layer in frequencies)
    measured = replace(work, top_k=visits / len(frequencies))
    return stage_pauses(measured, settings.group_tokens, prompts, len(frequencies))


def choose(
    settings: PrefillSettings,
    frequencies: Frequencies,
    work: LayerWork,
    num_tokens: int,
    num_decoding: int,
) -> PrefillChoice:
    """What ``auto`` takes for the next prompt tokens, as if of one prompt: the fewer loads."""
    num_stages = len(pauses(settings, frequencies, work, [range(num_tokens)])) + 1
    layered = layered_loads(frequencies, num_tokens, num_stages, num_decoding)
    chunks = chunk_sizes(settings, num_tokens, num_decoding)
    chunked = chunked_loads(frequencies, chunks, num_decoding)
    mode: Mode = "layered" if layered <= (1 - SMALLEST_SAVING) * chunked else "chunked"
    return PrefillChoice(mode, chunked, layered)


class PrefillPlanner:
    """How the next prompts are read, from what the router has done so far.

    Args:
        settings: modes and sizes.
        work: what a layer costs.
        statistics: of the model, growing.

    Attributes:
        last_choice: what `choose` decided last.
    """

    def __init__(
        self, settings: PrefillSettings, work: LayerWork, statistics: RoutingStatistics
    ) -> None:
        self._settings = settings
        self._work = work
        self._statistics = statistics
        self.last_choice: PrefillChoice | None = None

    def pauses(self, prompts: Prompts) -> tuple[int, ...]:
        """Layers at which a layered wave of these prompts sleeps until the next step."""
        frequencies = measured_frequencies(self._statistics, self._work.top_k)
        return pauses(self._settings, frequencies, self._work, prompts)

    def choose(self, num_tokens: int, num_decoding: int) -> Mode:
        """The mode for the next prompt tokens."""
        frequencies = measured_frequencies(self._statistics, self._work.top_k)
        choice = choose(self._settings, frequencies, self._work, num_tokens, num_decoding)
        self.last_choice = choice
        return choice.mode
