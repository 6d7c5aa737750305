"""Whole, chunked and layered prefill on the same arrivals, in one engine.

    python -m benchmarks.prefill [--quick] [--model 2b|demo|PATH] [--chunk 512] [--prompts N]
                                 [--lengths 2048 8192] [--decoding 1 16]

Sequences decode all the time while prompts arrive one after the other. For each mode it counts
expert loads (distinct experts of every layer and step) and bytes from a prompt's arrival to its
first token, and measures time to first token (TTFT), time between tokens of the decoding sequences
(TBT) and the time to the end of a short answer. The modes alternate prompt by prompt. The random 2B
model (`examples.models.random_models`) reads random tokens, others read held-out text.

Predicted loads are those of `moe.engine.prefill_mode` with the model's own expert frequencies,
measured in the same run. Beside each time stands the least that bytes and operations allow
(`benchmarks.prefill_cost`). The last line is one JSON object: the figures of every point of the
sweep, and at its top level those of all points together.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    environment,
    print_header,
    print_json,
    print_table,
    several,
)
from benchmarks.prefill_cost import Machine, Shape, bounds, matmul_rate, parts_of, predicted_loads
from benchmarks.prefill_modes import MODES, Figures, Mode, savings
from examples.models.random_models import random_2b
from kernels.cpu.limits import read_speed
from moe import MoE

ROOT = Path(__file__).parents[1]

MakePrompt = Callable[[int], list[int]]
"""Token ids of a new prompt of so many tokens."""


@dataclass(frozen=True)
class Run:
    """What all points of a sweep share."""

    model: MoE
    machine: Machine
    chunk: int
    prompts: int
    make_prompt: MakePrompt

    def point(self, length: int, decoding: int) -> tuple[dict[str, Any], dict[str, Figures]]:
        """Figures of every mode for prompts of one length beside so many decoding sequences."""
        running = [self.make_prompt(32) for _ in range(decoding)]
        modes = {name: Mode(self.model, name, self.chunk, running) for name in MODES}
        for turn in range(self.prompts):
            prompt = self.make_prompt(length)
            for name in MODES if turn % 2 == 0 else MODES[::-1]:
                modes[name].answer(prompt)
        frequencies = [
            np.mean(layer, axis=0) for layer in zip(*modes["whole"].frequencies, strict=True)
        ]
        shape = Shape.of(self.model)
        result: dict[str, Any] = {"prompt_tokens": length, "decoding": decoding}
        for name, mode in modes.items():
            parts = parts_of(name, length, decoding, self.chunk, frequencies, shape.work)
            loads = predicted_loads(frequencies, parts, decoding)
            mode.figures.predicted_loads = loads * self.prompts
            least = bounds(shape, self.machine, frequencies, parts, decoding)
            result[name] = mode.figures.summary() | {"least": least}
        result |= savings({name: result[name] for name in MODES})
        return result, {name: mode.figures for name, mode in modes.items()}


def held_out_text(model: MoE) -> MakePrompt:
    """Excerpts of text that the shipped model was not trained on, from a random domain each."""
    choose = random.Random(0)

    def excerpt(length: int) -> list[int]:
        domain = choose.choice(("prose", "python", "cpp"))
        text = (ROOT / f"tests/data/heldout_{domain}.txt").read_text()
        start = choose.randrange(max(len(text) - 8 * length, 1))
        return model.codec.encode(text[start : start + 8 * length])[:length]

    return excerpt


def random_tokens(model: MoE) -> MakePrompt:
    choose = random.Random(0)
    return lambda length: choose.choices(range(model.codec.vocab_size), k=length)


def main() -> None:
    options = _parser().parse_args()
    is_2b = options.model == "2b" and not options.quick
    path = random_2b() if is_2b else _folder(options.model)
    if path is None:
        return
    model = MoE.from_pretrained(path)
    machine = Machine(read_speed(), matmul_rate())
    run = Run(
        model,
        machine,
        options.chunk,
        options.prompts or (2 if is_2b else 3 if options.quick else 5),
        random_tokens(model) if is_2b else held_out_text(model),
    )
    lengths = options.lengths or ((2048, 4096, 8192) if is_2b else (1024, 1920))
    sweep = [(n, b) for n in lengths for b in options.decoding]
    facts = {"model": path.name, "GB/s": machine.bytes_per_s / 1e9}
    print_header(environment() | facts | {"GFLOP/s": machine.operations_per_s / 1e9})
    points, figures = [], []
    for length, decoding in [(1024, 4)] if options.quick else sweep:
        point, one = run.point(length, decoding)
        print_table(
            f"{length} tokens, {decoding} decoding: {point['measured_saving']:.0%} fewer loads",
            (
                "ms",
                "loads",
                "predicted",
                "TTFT p50",
                "least",
                "TBT p99",
                "least",
                "answer",
                "stalls",
            ),
            [_row(name, point[name], run.prompts) for name in MODES],
        )
        points.append(point)
        figures.append(one)
    together = {name: Figures.together([f[name] for f in figures]).summary() for name in MODES}
    print_json(
        together
        | savings(together)
        | {"points": points, "prompts_a_point": run.prompts}
        | {"chunk": run.chunk, "machine": vars(machine)}
        | {"model": path.name, "environment": environment()}
    )


def _folder(name: str) -> Path:
    return ROOT / "examples/demo-model" if name in ("demo", "2b") else Path(name)


def _row(name: str, mode: dict[str, Any], prompts: int) -> list[str]:
    times = (
        *(mode["ttft_p50_s"], mode["least"]["ttft_s"]),
        *(mode["tbt_p99_s"], mode["least"]["longest_step_s"], mode["e2e_p50_s"]),
    )
    loads = [f"{mode[key] / prompts:,.0f}" for key in ("expert_loads", "predicted_loads")]
    return [name, *loads, *(f"{s * 1e3:,.0f}" for s in times), str(mode["stalled_steps"])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare prefill modes.")
    add = parser.add_argument
    add("--quick", action="store_true", help="the shipped model, one small point of the sweep")
    add("--model", default="2b", help="2b (random), demo or a folder (%(default)s)")
    add("--chunk", type=int, default=512, help="tokens of a chunk, and of a layer group")
    add("--prompts", type=int, help="prompts a point")
    add("--lengths", **several(int), help="tokens of a prompt, one or several")
    add("--decoding", **several(int), default=(1, 4, 16), help="sequences, one or several")
    return parser


if __name__ == "__main__":
    main()
