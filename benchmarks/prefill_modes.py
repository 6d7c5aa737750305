"""One prefill mode under measurement, and what it needed.

A prompt arrives while other sequences decode; loads and bytes are counted from its arrival to its
first token, times until the end of a short answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.engine.prefill_batch import SequenceGroup
from moe.engine.prefill_mode import Frequencies, measured_frequencies

MODES = ("whole", "chunked", "layered")
ANSWER = 8  # tokens of the answer to each prompt that arrives


@dataclass
class Figures:
    """What one mode needed; a list entry a prompt or token."""

    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    loads: int = 0
    bytes_read: int = 0
    stalled_steps: int = 0
    predicted_loads: float = 0.0

    def summary(self) -> dict[str, float]:
        def at(values: list[float], percent: int) -> float:
            return float(np.percentile(values, percent))

        return {
            "ttft_p50_s": at(self.ttft_s, 50),
            "ttft_p99_s": at(self.ttft_s, 99),
            "tbt_p50_s": at(self.tbt_s, 50),
            "tbt_p99_s": at(self.tbt_s, 99),
            "e2e_p50_s": at(self.e2e_s, 50),
            "expert_bytes": self.bytes_read,
            "expert_loads": self.loads,
            "predicted_loads": self.predicted_loads,
            "stalled_steps": self.stalled_steps,
        }

    @classmethod
    def together(cls, parts: Sequence[Figures]) -> Figures:
        whole = cls()
        for part in parts:
            for name in vars(whole):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return whole


class Mode:
    """One prefill mode with its own copy of nothing but settings: weights are shared."""

    def __init__(self, model: MoE, mode: str, chunk: int, decoding: list[list[int]]) -> None:
        profile = model.profile.profile
        prefill = profile.prefill.model_copy(
            update={"mode": mode, "chunk_tokens": chunk, "group_tokens": chunk}
        )
        self.engine = Engine(
            model.backbone, model.experts, profile.model_copy(update={"prefill": prefill})
        )
        self.model = model
        self.figures = Figures()
        self.frequencies: list[Frequencies] = []
        most = (model.context_length or 1 << 20) - max(map(len, decoding))
        endless = SamplingParams(
            max_new_tokens=min(600, most), temperature=1.0, seed=1, ignore_eos=True
        )
        for prompt in decoding:
            self.engine.submit(model.request(prompt, endless))
        while len(self.engine.scheduler.running) < len(decoding):
            self.engine.step()

    def answer(self, prompt: list[int]) -> None:
        """One prompt arrives and gets its answer while the others go on."""
        params = SamplingParams(max_new_tokens=ANSWER, temperature=0.0, ignore_eos=True)
        group = self.model.request(prompt, params)
        self.model.reset_stats()
        start = time.perf_counter()
        self.engine.submit(group)
        self._steps(group, until=1)
        self.figures.ttft_s.append(time.perf_counter() - start)
        stats = self.model.stats()
        self.frequencies.append(measured_frequencies(self.model.experts.statistics))
        self.figures.loads += sum(layer["expert_loads"] for layer in stats["layers"])
        self.figures.bytes_read += stats["expert_bytes_read"]
        self._steps(group, until=ANSWER)
        self.figures.e2e_s.append(time.perf_counter() - start)

    def _steps(self, group: SequenceGroup, until: int) -> None:
        sequence = group.sequences[0]
        while len(sequence.token_ids) < until:
            decoding = set(self.engine.scheduler.running) - {sequence}
            start = time.perf_counter()
            outcomes = self.engine.step()
            self.figures.tbt_s.append(time.perf_counter() - start)
            self.figures.stalled_steps += not decoding <= {s for s, _ in outcomes}


def savings(modes: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Share of chunked prefill's expert loads that layered prefill does not need."""
    layered, chunked = modes["layered"], modes["chunked"]
    return {
        "predicted_saving": 1 - layered["predicted_loads"] / chunked["predicted_loads"],
        "measured_saving": 1 - layered["expert_loads"] / chunked["expert_loads"],
    }
