"""What does it cost to verify drafts: a decode step of 1 to 4 rows of one sequence, by stage?

The rows are held-out text, as drafts that are right would be. Distinct experts make further rows
dear; what else they cost is by stage. Without the engine: compiled calls, and Python around them.

    OMP_NUM_THREADS=1 python -m lab.verification [--expert-bits 8] [--rows 1 2 3 4]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import environment, print_json, print_table
from kernels.cpu.stages import Stage, StageTime, measured_stages
from moe import MoE
from moe.kv.cache import SequenceCache
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work

ROOT = Path(__file__).parents[1]
BEFORE, STEPS = 200, 200
"""Tokens before the first step, and positions behind them that steps begin at."""
EXPERTS = (Stage.EXPERT_INPUT, Stage.EXPERT_FIRST, Stage.EXPERT_SECOND, Stage.EXPERT_SUM)


class Verification:
    """Steps of a sequence, again and again on the same text."""

    def __init__(self, model: MoE) -> None:
        self._backbone, self._experts = model._loaded.backbone, model._loaded.experts
        text = (ROOT / "tests/data/heldout_prose.txt").read_text("utf-8")
        self._ids = model.codec.encode(text)[: BEFORE + STEPS + 64]
        self._cache: SequenceCache = self._backbone.new_cache(len(self._ids))
        self._run(self._ids[:BEFORE], "prefill")

    def seconds(self, rows: int, least: float) -> list[float]:
        """Times of steps of so many rows, each a token further on, for at least so long."""
        found, end = list[float](), time.perf_counter() + least
        while time.perf_counter() < end:
            for at in range(BEFORE, BEFORE + STEPS):
                start = time.perf_counter()
                self._run(self._ids[at : at + rows], "decode")
                found.append(time.perf_counter() - start)
                self._cache.cut(at + 1)
            self._cache.cut(BEFORE)
        return found

    def _run(self, tokens: list[int], phase: Any) -> None:
        work = Work(tokens, self._cache, all_logits=True)
        lanes = self._backbone.lanes([work], phase)
        run_lanes(lanes, self._experts.run)
        for lane in lanes:
            lane.result()


def by_stage(stages: Mapping[Stage, StageTime], steps: int) -> dict[str, float]:
    """Microseconds of a step, those of experts together, and MB of experts that it reads."""
    found = dict.fromkeys(("experts", "expert_mb"), 0.0)
    for stage, own in stages.items():
        name = "experts" if stage in EXPERTS else stage.name.lower()
        found[name] = found.get(name, 0.0) + 1e6 * own.seconds / steps
        found["expert_mb"] += own.bytes / steps / 1e6 if stage in EXPERTS else 0.0
    return found


@torch.inference_mode()
def measure(model: MoE, rows: list[int], rounds: int, least: float) -> list[dict[str, Any]]:
    """Of each number of rows its microseconds, median of the rounds, and its stages."""
    verification, times = Verification(model), {count: list[float]() for count in rows}
    for round in range(rounds + 1):  # the first is a warm-up
        for count in rows:
            taken = verification.seconds(count, least)
            times[count] += [median(taken)] if round else []
    found = []
    for count in rows:
        with measured_stages() as stages:
            steps = len(verification.seconds(count, least))
            own = by_stage(stages(), steps)
        found.append({"rows": count, "us": 1e6 * median(times[count]), "stages": own})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    parser.add_argument("--expert-bits", type=int, default=None, help="default: as stored")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of each number of rows, a round"
    )
    args = parser.parse_args()
    bits = {"model": {"expert_bits": args.expert_bits}}
    model = MoE.from_pretrained(args.model, bits, speculation={"mode": "off"})
    found = measure(model, args.rows, args.rounds, args.seconds)
    one = found[0]["us"]
    names = sorted(found[0]["stages"], key=lambda name: -found[0]["stages"][name])
    names.remove("expert_mb")
    print_table(
        "A step by its rows: us, also by stage",
        ["rows", "us", "of the first", "expert MB", *names],
        [
            [
                str(own["rows"]), f"{own['us']:.0f}", f"{own['us'] / one:.2f}",
                f"{own['stages']['expert_mb']:.2f}",
                *(f"{own['stages'].get(name, 0):.1f}" for name in names),
            ]
            for own in found
        ],
    )  # fmt: skip
    print_json({"environment": environment(), "rows": found})


if __name__ == "__main__":
    main()
