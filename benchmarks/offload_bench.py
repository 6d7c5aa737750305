"""The runs of `benchmarks.offload` on one model, and what they are measured against."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory_group import Usage, drop_from_cache, run_limited
from benchmarks.offload_models import Target, limit_of
from benchmarks.offload_routing import Trace
from benchmarks.offload_run import Job
from offload.replay import calls_of
from tests.oracles.replay_bounds import belady

TIMEOUT_S = 1800
PLAIN = {"policy": "lru", "prefetch": False}
"""What the default is measured against."""


def run(job: Job, limit_bytes: int, *files: Path) -> dict[str, Any]:
    """The figures of a job; ``error`` where it could not be done, and ``memory`` always."""
    drop_from_cache(*files)
    try:
        done, usage = run_limited(job.command(), limit_bytes, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {TIMEOUT_S} s"}
    memory = {"memory": asdict(usage)}
    if done.returncode:
        return {"error": _why(done, usage), **memory}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | memory


def _why(done: subprocess.CompletedProcess[str], usage: Usage) -> str:
    if usage.killed:
        return "killed by the kernel for want of memory"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def late_belady(trace: Trace, experts: int, slots: int, timed: int) -> float:
    """Hit ratio over the last ``timed`` tokens of what evicts knowing the future, or a little less:
    hits of all tokens without the most that those before could have."""

    def hits(part: Trace) -> tuple[float, int]:
        calls = calls_of(part, experts)
        asked = sum(map(len, calls))
        return (belady(calls, slots) * asked if asked else 0.0), asked

    (all_hits, all_asked), (early_hits, early_asked) = hits(trace), hits(trace[:-timed])
    return (all_hits - early_hits) / (all_asked - early_asked)


class Bench:
    """The runs of one model.

    Args:
        target: the model, and what its processes take.
        options: of the command line.
        disk: bytes a second of random reads of whole experts.
    """

    def __init__(self, target: Target, options: argparse.Namespace, disk: float) -> None:
        self.target, self.options, self.disk = target, options, disk
        self.quick = options.quick

    def ours(self, share: float, **changed: Any) -> dict[str, Any]:
        """This engine with a share of the experts resident."""
        settings = self.target.settings(share, max(changed.get("prompts", (64,))))
        limit = limit_of(settings)
        settings["offload"] = changed.pop("offload", {}) | {"hot_set": False}
        job = Job("moe", str(self.target.store), settings=settings)
        if self.quick:
            job = replace(job, warm=8, steps=16)
        found = run(replace(job, **changed), limit, *self.target.store.glob("*.safetensors"))
        if "bytes_per_token" in found:
            found["disk_fraction"] = (
                found["bytes_per_token"] * found["tokens_per_second"] / self.disk
            )
        return found

    def random(self, share: float, resident: float) -> dict[str, Any]:
        """Decoding with the model's own routing."""
        found = self.traced(share)
        found["resident_tokens_per_second"] = resident
        found["peers"] = self.peers(share)
        return found

    def traced(self, share: float, **changed: Any) -> dict[str, Any]:
        """As `ours`, and what the best of all caches would have hit."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.npy"
            found = self.ours(share, trace=str(file), **changed)
            if "error" not in found:
                trace, slots = np.load(file), int(share * self.target.experts)
                experts = self.target.experts // trace.shape[1]
                timed = found["tokens"]
                found["belady_hit_ratio"] = late_belady(trace, experts, slots, timed)
        return found

    def peers(self, share: float) -> dict[str, Any]:
        file = self.target.gguf
        if file is None or not file.exists() or not find_spec("llama_cpp"):
            return {}
        job = Job("llama.cpp", str(file), warm=2, steps=2 if self.quick else 6)
        return {"llama.cpp mmap": run(job, self.target.peer_limit(share), file)}

    def replayed(self, share: float) -> dict[str, Any]:
        """Decoding with published locality: the default against plain LRU without prefetch."""
        found = {"default": self.traced(share, replay=True)}
        found["lru"] = self.ours(share, replay=True, offload=PLAIN)
        rates = [each.get("tokens_per_second", 0.0) for each in found.values()]
        return found | {"speedup": rates[0] / rates[1] if rates[1] else None}

    def prompts(self, share: float) -> dict[str, Any]:
        """Prompts by each mode."""
        lengths = (1024,) if self.quick else tuple(self.options.lengths)
        found = self.ours(share, prompts=lengths)
        for modes in found.get("prompts", {}).values():
            layered, chunked = modes["layered"], modes["chunked"]
            modes["ttft_ratio"] = layered["ttft_s"] / chunked["ttft_s"]
            modes["bytes_ratio"] = layered["bytes"] / max(chunked["bytes"], 1)
        return found


def measure(bench: Bench, parts: list[str], shares: list[float]) -> dict[str, Any]:
    """All that was asked for of one model."""
    result: dict[str, Any] = {"disk_gbps": bench.disk / 1e9}
    if "random" in parts:
        resident = bench.ours(1.0)
        result["resident"] = resident
        rate = resident.get("tokens_per_second", 0.0)
        result["residency"] = {f"{s:g}": bench.random(s, rate) for s in shares}
    for part in ("replayed", "prompts"):
        if part in parts:
            result[part] = {f"{s:g}": getattr(bench, part)(s) for s in shares if s <= 0.5}
    return result
