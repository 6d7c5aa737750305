"""What `moe plan` says of decode steps from disk, beside what an engine then does; a part of
`benchmarks.offload`.

    python -m benchmarks.offload_plan JOB      (a `PlanJob` as JSON; the result is the last line)

Each case is a process, in which the plan measures the disk and the engine decodes random tokens a
few seconds later. A disk of known speed is benchmarks/slow_disk.cpp, preloaded. The plan gets the
routing of other tokens, as it has a calibration's; ``uniform`` is the plan without one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.decode_contenders import Ours
from benchmarks.offload_models import Target
from benchmarks.offload_routing import Record
from kernels.cpu.compiler import find_compiler
from moe.calibration.trace import Trace
from moe.commands.plan.command import plan_speed
from moe.commands.plan.decode_speed import BATCHES, UniformRouting, estimate_decode
from moe.commands.plan.traced_routing import TracedRouting
from moe.settings.profile import load_profile
from routing import PolicyChain

SOURCE = Path(__file__).with_name("slow_disk.cpp")
DISKS = (".5,100", "1,100", "")
"""GB/s and microseconds; empty: the disk as it is."""
KV_TOKENS = 4096
WARM, STEPS, TRACED = 24, 40, 40
TIMEOUT_S = 300


@dataclass(frozen=True)
class PlanJob:
    """A store, the share of its experts that has room, and the setting of `engine.pin_threads`."""

    store: str
    share: float
    pin_threads: bool = False


def compare(job: PlanJob) -> list[dict[str, Any]]:
    """A row for each batch: tokens/s and bytes by the plan, by the engine, and their ratio."""
    store = Path(job.store)
    target = Target.of(store)
    settings = target.settings(job.share, KV_TOKENS - 1024)
    settings["memory"] |= {"prefix_tokens": 0}
    settings |= {
        "offload": {"hot_set": False},
        "prefill": {"wave_tokens": 256},
        "engine": {"max_batch_size": max(BATCHES), "pin_threads": job.pin_threads},
    }
    ours = Ours(store, None, **{name: dict(section) for name, section in settings.items()})
    draw = random.Random(0)
    trace = _trace(ours, target, draw)
    plan = plan_speed(store, load_profile(None, settings))
    locality = TracedRouting(trace, plan_policy(settings))
    rows = []
    for batch in BATCHES:
        planned = estimate_decode(plan.sizes, plan.speeds, locality, batch)
        plain = estimate_decode(plan.sizes, plan.speeds, UniformRouting(plan.sizes), batch)
        _decode(ours, batch, WARM, draw)
        ours.model.reset_stats()
        times = _decode(ours, batch, STEPS, draw)
        rate = batch * len(times) / sum(times)
        row = {
            "batch": batch,
            "disk_gbps": (plan.speeds.disk or 0.0) / 1e9,
            "planned": planned.tokens_per_second,
            "measured": rate,
            "ratio": planned.tokens_per_second / rate,
            "uniform_ratio": plain.tokens_per_second / rate,
        }
        if (cache := ours.model.stats().get("offload")) is not None:
            read = cache["bytes_read"] / batch / (len(times) + 1)
            row["bytes_ratio"] = planned.disk_bytes_per_token / read if read else 1.0
            row["hit_ratio"] = cache["hit_ratio"]
        rows.append(row)
    return rows


def plan_policy(settings: dict[str, Any]) -> str:
    return load_profile(None, settings).profile.offload.policy


def _decode(ours: Ours, batch: int, steps: int, draw: random.Random) -> list[float]:
    size = ours.model.codec.vocab_size
    tokens = [[draw.randrange(size) for _ in range(steps)] for _ in range(batch)]
    return ours.decode([[1]] * batch, tokens)


def _trace(ours: Ours, target: Target, draw: random.Random) -> Trace:
    """The routing of decode steps of 16 sequences, one sequence after the other."""
    record, batch = Record(), max(BATCHES)
    ours.model.experts.set_policies(PolicyChain((record,)))
    _decode(ours, batch, TRACED, draw)
    ours.model.experts.set_policies(PolicyChain(()))
    steps = TRACED - 1
    seen = record.trace[-steps * batch :]
    layers = seen.shape[1]
    seen = np.sort(seen.reshape(steps, batch, layers, -1).swapaxes(0, 1), axis=-1)
    ids = torch.from_numpy(seen.reshape(steps * batch, layers, -1)).to(torch.int16).unbind(1)
    tokens, weights = torch.zeros(len(ids[0]), dtype=torch.int32), torch.ones(ids[0].shape)
    experts = [target.experts // layers] * layers
    return Trace(tokens, [len(tokens)], experts, list(ids), [weights.half()] * layers)


def planned_cases(store: Path, shares: list[float]) -> Iterator[dict[str, Any]]:
    """The rows of all cases, and of the resident model."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "slow_disk.so"
        flags = ("-O2", "-std=c++17", "-shared", "-fPIC", "-D_GNU_SOURCE")
        made = [*find_compiler(), *flags, str(SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(made, check=True)
        cases = [(1.0, "")] + [(share, disk) for share in shares for disk in DISKS]
        for share, disk in cases:
            slow = {"SLOW_DISK": disk, "LD_PRELOAD": str(library)} if disk else {}
            command = [sys.executable, "-m", "benchmarks.offload_plan"]
            done = subprocess.run(
                [*command, json.dumps(asdict(PlanJob(str(store), share)))],
                env=os.environ | slow,
                stdout=subprocess.PIPE,
                check=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            for row in json.loads(done.stdout.splitlines()[-1]):
                yield {"share": share, "disk": disk or "as it is", **row}


def worst(ratios: list[float]) -> float:
    """The ratio that is farthest from 1."""
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio))


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median and worst of planned by measured, from disk and resident. What has room for all
    experts is resident, whatever share was asked for."""
    found: dict[str, float] = {}
    for name, from_disk in (("resident", False), ("from disk", True)):
        ratios = [row["ratio"] for row in rows if ("bytes_ratio" in row) == from_disk]
        if ratios:
            found |= {f"{name}, median": median(ratios), f"{name}, worst": worst(ratios)}
    return found


if __name__ == "__main__":
    print(json.dumps(compare(PlanJob(**json.loads(sys.argv[1])))))
