"""One measurement of `benchmarks.offload`, in a process of its own that a memory limit can hold.

    python -m benchmarks.offload_run JOB      (a `Job` as JSON; the result is the last line)

Tokens are given, the same for every contender and residency, so that all do the same work.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.decode_contenders import Ours
from benchmarks.decode_peers import LlamaCpp
from benchmarks.offload_foreseen import Foreseen
from benchmarks.offload_routing import Record, Replay, published_trace
from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from routing import PolicyChain


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        contender: ``moe`` or ``llama.cpp``.
        model: store, or GGUF file.
        bits: of ours; None as stored.
        settings: of the profile, nested.
        warm: steps, or prompt tokens of a peer, before the clock runs.
        steps: that are timed.
        prompts: lengths of prompts to read instead, by each of `modes`.
        modes: prefill modes.
        replay: route by `published_trace`.
        trace: where the routing of the timed steps and those before goes, as a ``.npy`` file.
    """

    contender: str
    model: str
    bits: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    warm: int = 32
    steps: int = 48
    prompts: tuple[int, ...] = ()
    modes: tuple[str, ...] = ("layered", "chunked")
    replay: bool = False
    trace: str | None = None

    def command(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.offload_run", json.dumps(asdict(self))]


def decode_ours(job: Job) -> dict[str, Any]:
    """Seconds a step of one sequence, and what the cache did meanwhile."""
    ours = Ours(Path(job.model), job.bits, **job.settings)
    model, record = ours.model, Record()
    model.experts.set_policies(
        PolicyChain((replay(model, job), record) if job.replay else (record,))
    )
    draw = random.Random(0)
    vocab_size = model.codec.vocab_size
    ours.decode([[1]], [[draw.randrange(vocab_size) for _ in range(job.warm)]])
    model.reset_stats()
    times = ours.decode([[1]], [[draw.randrange(vocab_size) for _ in range(job.steps)]])
    if job.trace:
        np.save(job.trace, record.trace)
    tokens = len(times) + 1  # that of the prompt, too
    return {
        "tokens": tokens,
        "tokens_per_second": len(times) / sum(times),
        "median_step_s": median(times),
        **cache_figures(model, tokens, sum(times)),
    }


def replay(model: MoE, job: Job) -> Replay:
    """Published locality for this model, and a predictor that knows it where one is wanted."""
    layers = model.experts.layers
    experts, top_k = layers[0].num_experts, model.config.get_text_config().num_experts_per_tok
    made = Replay(published_trace(job.warm + job.steps + 8, len(layers), experts, top_k))
    offloaded, wanted = model._loaded.offloaded, job.settings.get("offload", {})
    if offloaded is not None and wanted.get("prefetch", True):
        model.experts._prefetcher = offloaded.prefetch_with(Foreseen(made, experts))
    return made


def cache_figures(model: MoE, tokens: int, seconds: float) -> dict[str, Any]:
    """Of the tokens since the statistics were reset."""
    cache = model.stats().get("offload")
    if cache is None:
        return {"hit_ratio": 1.0, "bytes_per_token": 0.0, "stall_fraction": 0.0}
    read = ("demand_bytes", "streamed_bytes", "useful_bytes", "wasted_bytes")
    return {
        "hit_ratio": cache["hit_ratio"],
        "bytes_per_token": sum(cache[name] for name in read) / tokens,
        "prefetched_per_token": (cache["useful_bytes"] + cache["wasted_bytes"]) / tokens,
        "wasted_per_token": cache["wasted_bytes"] / tokens,
        "stall_fraction": cache["stall_seconds"] / seconds,
    }


def decode_llama(job: Job) -> dict[str, Any]:
    """llama.cpp maps its file: what the limit leaves of the page cache is its expert cache."""
    peer = LlamaCpp(Path(job.model), "mmap", torch.get_num_threads(), mapped=True)
    draw = random.Random(0)
    following = [draw.randrange(30_000) for _ in range(job.warm + job.steps)]
    times = peer.decode([[1]], [following])[job.warm :]
    return {"tokens_per_second": len(times) / sum(times), "median_step_s": median(times)}


def prefill_ours(job: Job) -> dict[str, Any]:
    """Seconds to the first token and bytes from disk, of each length and mode."""
    model = MoE.from_pretrained(Path(job.model), **job.settings)
    draw = random.Random(0)
    figures: dict[str, Any] = {}

    def tokens(count: int) -> list[int]:
        return [draw.randrange(model.codec.vocab_size) for _ in range(count)]

    for length in job.prompts:
        prompt, modes = tokens(length), {}
        for mode in job.modes:
            read_prompt(model, tokens(min(length, 256)), "whole")  # nobody begins with no experts
            modes[mode] = read_prompt(model, prompt, mode)
        figures[str(length)] = modes
    return {"prompts": figures}


def read_prompt(model: MoE, prompt: list[int], mode: str) -> dict[str, float]:
    profile = model.profile.profile
    prefill = profile.prefill.model_copy(update={"mode": mode})
    engine = Engine(model.backbone, model.experts, profile.model_copy(update={"prefill": prefill}))
    model.reset_stats()
    start, processor = time.perf_counter(), time.process_time()
    engine.submit(model.request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True)))
    while not engine.idle:
        engine.step()
    seconds = time.perf_counter() - start
    figures = cache_figures(model, 1, seconds)
    return {
        "ttft_s": seconds,
        "processor_s": time.process_time() - processor,
        "bytes": figures["bytes_per_token"],
        "expert_loads": sum(layer["expert_loads"] for layer in model.stats()["layers"]),
        "stall_fraction": figures["stall_fraction"],
    }


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    if job.prompts:
        result = prefill_ours(job)
    else:
        result = (decode_ours if job.contender == "moe" else decode_llama)(job)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
