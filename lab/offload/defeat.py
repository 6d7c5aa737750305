"""Can prefetching slow a run down? A predictor that is sure and wrong, on and off in turn.

    python -m lab.offload.defeat [--model 30b] [--share 0.25] [--rounds 4] [--steps 24]

One process, one cache, routing with published locality (`benchmarks.offload_routing`). Two
predictors claim a recall of 0.788: the `wrong` one names experts that nobody asks for, always; the
`fickle` one is as good as it says for 12 tokens and wrong for the next 12, so that whoever believes
what was true a moment ago loses. Prefetching is on and off in turn (on, off, off, on, ...) after a
stretch in which the governor has met the predictor; for each: seconds, seconds of processor time
and bytes read a token. Nobody may lose more than 2 %, which a real disk resolves on a quiet machine
at best; `lab.offload.simulated` tells it anywhere, without threads. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.decode_contenders import Ours
from benchmarks.offload_foreseen import Foreseen
from benchmarks.offload_models import targets
from benchmarks.offload_routing import Replay, published_trace
from benchmarks.offload_run import cache_figures
from offload.prefetch import Prefetcher
from routing import PolicyChain

TRUTHS = {"wrong": 0.0, "fickle": 0.5}
WARM = 64


class Run:
    """A model that decodes one sequence, with a lying predictor that can be switched off."""

    def __init__(self, store: Path, settings: dict[str, Any], truth: float, tokens: int) -> None:
        self._ours = Ours(store, None, **settings | {"offload": {"hot_set": False}})
        model = self._ours.model
        layers, top_k = model.experts.layers, model.config.get_text_config().num_experts_per_tok
        experts = layers[0].num_experts
        replay = Replay(published_trace(tokens, len(layers), experts, top_k))
        model.experts.set_policies(PolicyChain((replay,)))
        assert model._loaded.offloaded is not None
        predictor = Foreseen(replay, experts, truth=truth)
        self._prefetcher: Prefetcher = model._loaded.offloaded.prefetch_with(predictor)
        self._draw = random.Random(0)

    def decode(self, steps: int, on: bool) -> dict[str, float]:
        """Figures a token."""
        model = self._ours.model
        model.experts._prefetcher = self._prefetcher if on else None
        model.reset_stats()
        tokens = [self._draw.randrange(model.codec.vocab_size) for _ in range(steps)]
        processor = time.process_time()
        times = self._ours.decode([[1]], [tokens])
        processor = time.process_time() - processor
        read = cache_figures(model, steps + 1, sum(times))["bytes_per_token"]
        seconds = sum(times) / len(times)
        return {"seconds": seconds, "cpu_seconds": processor / (steps + 1), "bytes": read}


def order(rounds: int) -> Iterator[bool]:
    for number in range(rounds):
        yield from (True, False) if number % 2 == 0 else (False, True)


def measure(store: Path, settings: dict[str, Any], truth: float, options: Any) -> dict[str, Any]:
    tokens = WARM + (options.steps + 1) * 2 * options.rounds + 8
    run = Run(store, settings, truth, tokens)
    run.decode(WARM, True)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for on in order(options.rounds):
        found[on].append(run.decode(options.steps, on))
    means = {
        name: {key: sum(one[key] for one in rows) / len(rows) for key in rows[0]}
        for name, rows in (("on", found[True]), ("off", found[False]))
    }
    return means | {"ratio": {key: means["on"][key] / means["off"][key] for key in means["on"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="30b", help="30b, 2b, demo or a store")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts in memory")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    print_header(environment())
    results = {}
    for target in targets([options.model]):
        settings = target.settings(options.share, 64)
        for name, truth in TRUTHS.items():
            results[name] = measure(target.store, settings, truth, options)
    columns = ("predictor", "ms a token", "without", "ratio", "CPU ratio", "bytes ratio")
    rows = [
        (
            name,
            *(f"{1e3 * one[side]['seconds']:.1f}" for side in ("on", "off")),
            *(f"{one['ratio'][key]:.3f}" for key in ("seconds", "cpu_seconds", "bytes")),
        )
        for name, one in results.items()
    ]
    print_table(f"{options.model}, {options.share:.0%} resident", columns, rows)
    print_json({**environment(), "predictors": results})


if __name__ == "__main__":
    main()
