"""What would a decode step and a prompt take on machines with many cores? A model on paper.

    python -m lab.many_cores [STORE] [--quick] [--line-ns 100]

The machine at hand measures each stage of a step with one thread: its milliseconds, bytes of
weights and runs. On C cores a stage is taken to last

    max(ms / min(C, tasks), bytes / memory's speed) + runs x hand-over(C)

and what lies between stages (Python) lasts as long as here. Tasks: rows of tokens where a stage
works on rows, else 16 rows of a matrix. Hand-over: a thread takes tasks from a counter of its share
and adds what it has done to another, beside the C / 8 threads of the share, and 8 shares add to the
counter that all watch (kernels/cpu/turns.h); each such turn moves a cache line between cores, which
takes `--line-ns`. No machine of these sizes was at hand: the one check is the same model for two
threads, beside what two threads take here. `--quick` takes the shipped model. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.texts import ROOT
from kernels.cpu.limits import read_speed
from moe import MoE
from moe.commands.bench import stages_of_runs

DEMO = ROOT / "examples" / "demo-model"
SHARES = 8
"""`Turns::MOST_SHARES`."""
MATRIX_ROWS = 16
"""Of a task of a stage that reads weights."""
Stages = Mapping[str, Mapping[str, float]]


class Machine(NamedTuple):
    """Cores, and bytes a second that memory gives them: .85 of what its channels could."""

    name: str
    cores: int
    bytes: float
    sockets: int = 1


MACHINES = (
    Machine("16 cores, 4 channels of DDR5-5200", 16, 0.85 * 166e9),
    Machine("64 cores, 12 channels of DDR5-4800", 64, 0.85 * 461e9),
    Machine("2 x 64 cores, 12 channels each", 128, 0.85 * 922e9, 2),
)


def hand_over(cores: int, line: float, sockets: int = 1) -> float:
    """Seconds from the last task of a stage to the first of the next.

    Args:
        line: seconds in which a cache line goes from one core to another; twice that to another
            socket, which the counter that all watch needs.
    """
    if cores == 1:
        return 0.0
    shares = min(SHARES, cores)
    return line * (2 * -(-cores // shares) + sockets * shares)


def tasks(stage: Mapping[str, float], tokens: int, row_bytes: int) -> float:
    """Into how many tasks a run of a stage falls."""
    if not stage["bytes"]:
        return tokens
    return max(1.0, stage["bytes"] / stage["runs"] / (MATRIX_ROWS * row_bytes))


def predicted(
    stages: Stages, machine: Machine, tokens: int, row_bytes: int, line: float
) -> dict[str, float]:
    """Milliseconds of a step with these stages of one thread: computing or reading, handing over,
    and between the stages."""
    working = handing = 0.0
    for name, stage in stages.items():
        if name in ("between", "all") or not stage["runs"]:
            continue
        threads = min(machine.cores, tasks(stage, tokens, row_bytes))
        working += max(stage["ms"] / threads, 1e3 * stage["bytes"] / machine.bytes)
        handing += 1e3 * stage["runs"] * hand_over(machine.cores, line, machine.sockets)
    between = stages["between"]["ms"]
    all_ms = working + handing + between
    return {"ms": all_ms, "working": working, "handing_over": handing, "between": between}


def measured(model: MoE, threads: int, prompt: int, tokens: int) -> dict[str, Stages]:
    """`stages_of_runs` with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        stages_of_runs(model, prompt, tokens)  # warm-up
        found: dict[str, Stages] = stages_of_runs(model, prompt, tokens)["stages"]
    finally:
        torch.set_num_threads(before)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", nargs="?", default=str(DEMO))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--line-ns", type=float, default=100.0)
    options = parser.parse_args()
    model = MoE.from_pretrained(options.store, {"memory.prefix_tokens": 0})
    prompt, new = (128, 16) if options.quick else (512, 64)
    own = Machine("here, 2 threads", 2, read_speed())
    one, two = (measured(model, threads, prompt, new) for threads in (1, 2))
    row_bytes = (
        model.config.get_text_config().hidden_size
    )  # a byte a weight: fewer bits, more tasks
    print_header({"store": options.store, "line_ns": options.line_ns, **environment()})
    results: list[dict[str, Any]] = []
    for name, stages in one.items():
        tokens = prompt if name.startswith("prompt") else int(name.split()[1])
        for machine in (own, *MACHINES):
            found = predicted(stages, machine, tokens, row_bytes, options.line_ns * 1e-9)
            found["tokens/s"] = 1e3 * tokens / found["ms"]
            found["of memory"] = 1e3 * stages["all"]["bytes"] / found["ms"] / machine.bytes
            real = two[name]["all"]["ms"] if machine is own else None
            results.append({"step": name, "machine": machine.name, **found, "measured": real})
    print_table(
        "A step on paper",
        ("step", "machine", "ms", "measured", "working", "handing over", "between", "tokens/s",
         "of memory's speed"),
        [
            (r["step"], r["machine"], f"{r['ms']:.2f}",
             f"{r['measured']:.2f}" if r["measured"] else "",
             f"{r['working']:.2f}", f"{r['handing_over']:.2f}", f"{r['between']:.2f}",
             f"{r['tokens/s']:,.0f}", f"{r['of memory']:.0%}")
            for r in results
        ],
    )  # fmt: skip
    print_json({"results": results, **environment()})


if __name__ == "__main__":
    main()
