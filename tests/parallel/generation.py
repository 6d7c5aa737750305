"""What is generated in every mode: by one process, or (as a script) by the ranks of a launch.

``python generation.py MODEL OUT PROFILE``; rank 0 writes what `run` returns.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from experts.placement import Placement
from experts.placement.rebalance import Moves
from moe import MoE, SamplingParams
from moe.parallel.coordinator import Coordinator
from moe.settings.profile import load_profile

RANDOM = random.Random(7)
PROMPTS = [[RANDOM.randrange(3, 90) for _ in range(n)] for n in (3, 40, 9, 70, 1, 25)]
SHARED = [RANDOM.randrange(3, 90) for _ in range(40)]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "memory": {"kv_tokens": 400, "prefix_tokens": 200},
    "engine": {"max_batch_size": 4},
}
MODES: dict[str, Any] = {
    "whole": {"prefill.mode": "whole"},
    "chunked": {"prefill.mode": "chunked", "prefill.chunk_tokens": 16},
    "layered": {"prefill.mode": "layered", "prefill.group_tokens": 16, "prefill.wave_tokens": 48},
}
PARAMS: dict[str, Any] = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 5, "max_new_tokens": 7, "top_p": 0.9, "logprobs": 2},
    "samples": {"temperature": 0.9, "seed": 6, "n": 2, "max_new_tokens": 5, "top_k": 30},
    "scored": {"temperature": 0.0, "prompt_logprobs": 1, "max_new_tokens": 3},
    "penalised": {
        **{"temperature": 0.8, "seed": 9, "max_new_tokens": 8, "repetition_penalty": 1.3},
        **{"frequency_penalty": 0.5, "logit_bias": {5: 4.0}, "stop_token_ids": (5,)},
    },
}


def run(model: MoE) -> dict[str, Any]:
    """Completions of all prompts, by mode and parameters."""
    whole, found = model.profile, {}
    for mode, settings in MODES.items():
        model.profile = load_profile(whole, settings)
        for name, params in PARAMS.items():
            found[f"{mode} {name}"] = said(model, PROMPTS, params)
    model.profile = load_profile(whole, MODES["chunked"] | {"memory.kv_tokens": 120})
    found["preempted"] = said(model, PROMPTS, PARAMS["greedy"] | {"max_new_tokens": 20})
    model.profile = whole
    found["known prefix"] = with_prefix(model)
    return found


def said(model: MoE, prompts: Any, params: Any) -> Any:
    completions = model.generate(prompts, SamplingParams(**params))
    return json.loads(json.dumps([asdict(completion) for completion in completions]))


class Restless:
    """Moves experts before every step; stands for `Rebalancer`."""

    def __init__(self, placements: Any) -> None:
        self.placements, self.epoch = placements, 0
        self.loads = 0

    def poll(self) -> Moves:
        self.epoch += 1
        layer = self.epoch % len(self.placements)
        old = self.placements[layer]
        experts = np.roll(old.experts_P, 1)
        self.placements[layer] = Placement(tuple(experts.tolist()), old.num_experts, old.ranks)
        return Moves(self.epoch, {layer: self.placements[layer]})

    def observe(self, loads: Any, seconds: float) -> None:
        self.loads += sum(int(load.sum()) for load in loads if load is not None)

    def close(self) -> None:
        """Nothing runs."""


def moved(model: MoE) -> dict[str, Any]:
    """What is said while experts move all the time. They are read where they go between steps."""
    coordinator = model._session
    assert isinstance(coordinator, Coordinator)
    assert coordinator._rebalancer is not None
    coordinator._rebalancer.close()
    restless = Restless(list(coordinator.worker.placements))
    coordinator._rebalancer = restless  # type: ignore[assignment]
    before = (model.stats()["offload"] or {}).get("misses")
    found = {name: said(model, PROMPTS, PARAMS[name]) for name in ("greedy", "seeded")}
    assert (model.stats()["offload"] or {}).get("misses") == before
    assert restless.epoch > 10
    assert restless.loads > 0
    return found


def with_prefix(model: MoE) -> Any:
    """One engine: the second time prompts begin as others that have ended. And what was saved."""
    engine, tokens = model.loop(), []
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    for turn in range(2):
        groups = [model.request([*SHARED, n, turn], params) for n in range(4)]
        for group in groups:
            engine.submit(group)
        cancelled = model.request(PROMPTS[3], replace(params, max_new_tokens=50))
        engine.submit(cancelled)
        engine.step()
        engine.cancel(cancelled)
        while not engine.idle:
            engine.step()
        tokens.append([group.sequences[0].token_ids for group in groups])
    prefixes = engine.status()["prefixes"]
    assert prefixes["hit_tokens"] >= 4 * 32, prefixes
    occupancy = engine.occupancy()
    assert not any(occupancy.values()), occupancy
    return tokens


def main() -> None:
    path, out, profile = sys.argv[1:]
    model = MoE.from_pretrained(path, profile, **SETTINGS)
    if model.rank:
        model.serve_rank()
    else:
        found = run(model)
        found["moved"] = moved(model)
        stats = model.stats()
        found["stats"] = stats["parallel"] | {"speculation": stats["speculation"]}
        found["slots"] = (model.stats()["offload"] or {}).get("slots")
        Path(out).write_text(json.dumps(found))
    model.close()


if __name__ == "__main__":
    main()
