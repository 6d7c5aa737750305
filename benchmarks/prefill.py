"""Whole, chunked and layered prefill on the same arrivals, in one engine.

    python -m benchmarks.prefill [--quick] [--model PATH] [--chunk 512]

Sequences decode all the time while prompts arrive one after the other. For each mode it counts
expert loads (distinct experts of every layer and step) and bytes from a prompt's arrival to its
first token, and measures time to first token (TTFT), time between tokens of the decoding sequences
(TBT) and the time to the end of a short answer. The modes alternate prompt by prompt.

Predicted loads are those of ALGORITHMS.md 2.3, a layer: chunked ``sum N(c_i + B)``, layered
``N(P + B) + (G - 1) N(B)``, with N from the model's own expert frequencies p measured in the same
run: ``N(t) = sum_e 1 - (1 - p_e)^t``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import environment, print_header, print_json, print_table
from moe import MoE, SamplingParams
from moe.engine import Engine
from moe.prefill import Frequencies, choose, distinct_experts, measured_frequencies
from moe.scheduler import Group
from moe.settings import PrefillSettings

ROOT = Path(__file__).parents[1]
MODES = ("whole", "chunked", "layered")
ANSWER = 8  # tokens of the answer to each prompt that arrives


@dataclass
class Figures:
    """What one mode needed for one point of the sweep; a list entry a prompt or token."""

    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    loads: int = 0
    bytes_read: int = 0
    stalled_steps: int = 0

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
            "stalled_steps": self.stalled_steps,
        }


class Mode:
    """One prefill mode with its own copy of nothing but settings: weights are shared."""

    def __init__(self, model: MoE, mode: str, chunk: int, decoding: list[list[int]]) -> None:
        profile = model.profile.profile
        prefill = profile.prefill.model_copy(
            update={"mode": mode, "chunk_tokens": chunk, "group_tokens": chunk}
        )
        engine = model.engine()
        self.engine = Engine(
            engine.trunk, engine.experts, profile.model_copy(update={"prefill": prefill})
        )
        self.model = model
        self.figures = Figures()
        endless = SamplingParams(max_new_tokens=600, temperature=1.0, seed=1, ignore_eos=True)
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
        self.figures.loads += sum(layer["expert_loads"] for layer in stats["layers"])
        self.figures.bytes_read += stats["expert_bytes_read"]
        self._steps(group, until=ANSWER)
        self.figures.e2e_s.append(time.perf_counter() - start)

    def _steps(self, group: Group, until: int) -> None:
        sequence = group.sequences[0]
        while len(sequence.token_ids) < until:
            decoding = set(self.engine.scheduler.running) - {sequence}
            start = time.perf_counter()
            outcomes = self.engine.step()
            self.figures.tbt_s.append(time.perf_counter() - start)
            self.figures.stalled_steps += not decoding <= {s for s, _ in outcomes}


def predicted_loads(
    length: int, decoding: int, chunk: int, frequencies: Frequencies
) -> dict[str, float]:
    """Expert loads of one prompt in each mode, summed over layers."""
    settings = PrefillSettings(chunk_tokens=chunk, group_tokens=chunk)
    choice = choose(settings, frequencies, length, decoding)
    return {
        "whole": distinct_experts(frequencies, length + decoding),
        "chunked": choice.chunked_loads,
        "layered": choice.layered_loads,
    }


def excerpt(model: MoE, length: int, choose: random.Random) -> list[int]:
    """Token ids from the middle of held-out text of a random domain."""
    domain = choose.choice(("prose", "python", "cpp"))
    text = (ROOT / f"tests/data/heldout_{domain}.txt").read_text()
    start = choose.randrange(max(len(text) - 8 * length, 1))
    return model.codec.encode(text[start : start + 8 * length])[:length]


def sweep_point(model: MoE, length: int, decoding: int, chunk: int, prompts: int) -> dict[str, Any]:
    choose = random.Random(length + decoding)
    running = [excerpt(model, 32, choose) for _ in range(decoding)]
    modes = {name: Mode(model, name, chunk, running) for name in MODES}
    arrivals = [excerpt(model, length, choose) for _ in range(prompts)]
    model.reset_stats()
    model.batch_logits(arrivals)
    frequencies = measured_frequencies(model.engine().experts.statistics)
    for turn, prompt in enumerate(arrivals):
        order = MODES if turn % 2 == 0 else MODES[::-1]
        for name in order:
            modes[name].answer(prompt)
    predicted = predicted_loads(length, decoding, chunk, frequencies)
    result: dict[str, Any] = {"prompt_tokens": length, "decoding": decoding, "chunk": chunk}
    for name, mode in modes.items():
        result[name] = mode.figures.summary() | {"predicted_loads": predicted[name] * prompts}
    loads = {name: result[name]["expert_loads"] for name in MODES}
    result["predicted_saving"] = 1 - predicted["layered"] / predicted["chunked"]
    result["measured_saving"] = 1 - loads["layered"] / loads["chunked"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare prefill modes.")
    parser.add_argument("--quick", action="store_true", help="one small point of the sweep")
    parser.add_argument("--model", default=str(ROOT / "examples/demo-model"))
    parser.add_argument("--chunk", type=int, default=512)
    arguments = parser.parse_args()
    model = MoE.from_pretrained(arguments.model)
    print_header(environment() | {"model": arguments.model})
    sweep = [(1024, 4)] if arguments.quick else [(n, b) for n in (1024, 1920) for b in (1, 4, 16)]
    prompts = 3 if arguments.quick else 5
    points = [sweep_point(model, n, b, arguments.chunk, prompts) for n, b in sweep]
    columns = ("prompt", "decoding", "mode", "expert loads", "predicted", "TTFT p50", "TBT p99")
    print_table(
        "prefill",
        (*columns, "answer p50", "stalls"),
        [_row(point, name) for point in points for name in MODES],
    )
    print_json({"points": points} | (points[0] if arguments.quick else {}))


def _row(point: dict[str, Any], name: str) -> list[object]:
    mode = point[name]
    times = [f"{mode[key] * 1e3:.0f} ms" for key in ("ttft_p50_s", "tbt_p99_s", "e2e_p50_s")]
    loads = (f"{mode['expert_loads']:,}", f"{mode['predicted_loads']:,.0f}")
    return [point["prompt_tokens"], point["decoding"], name, *loads, *times, mode["stalled_steps"]]


if __name__ == "__main__":
    main()
