"""What offloading's own work costs, and what reading ahead gains, on a disk that is simulated.

    python -m lab.offload.simulated [CONTENDER ...] [--counted 0.7] [--rounds 2]
                                           [--read-ms 1.36] [--layer-ms 1.98] [--share 0.25]
                                           [--swept-mb 20]

The real cache, policy and prefetcher, routing with published locality (48 layers of 128 experts,
top 8, see `benchmarks.offload_routing`), a disk that reads one expert after the other and layers
that take a fixed time. Of the step loop's own processor time a share passes, too; with
``--counted 0`` none does, and every figure but that of the processor is a function of the trace. So
two contenders can be told apart by less than a real disk or a busy machine allows; threads, and
what reading costs the processor, are left out. Before each visit so many bytes are read as kernels
read of a layer's weights, in no time that counts: the step loop finds nothing in the processor's
caches then, which takes it twice as long; ``--swept-mb 0`` leaves them alone.

A contender is a policy, with ``+KIND`` behind it to read ahead by a predictor that claims a recall
of 0.788: ``right`` (it is as good), ``wrong`` (always) or ``fickle`` (12 tokens each in turn). Each
is compared with the first. Rounds are whole runs, in turn; the median of each is printed, and how
far the ratios of the rounds lie apart. The last line is JSON.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.offload_foreseen import Foreseen
from benchmarks.offload_routing import Replay, published_trace
from offload.cache import ExpertCache
from offload.policies import POLICIES
from offload.prefetch import Prefetcher
from offload.slots import SlotSizes
from tests.oracles.simulated_disk import Clock, Disk, Room

LAYERS, EXPERTS, TOP_K = 48, 128, 8
EXPERT_BYTES = 2_510_000
TRUTHS = {"right": 1.0, "wrong": 0.0, "fickle": 0.5}


class Run:
    """One contender on one trace."""

    def __init__(self, contender: str, replay: Replay, options: argparse.Namespace) -> None:
        policy, _, predictor = contender.partition("+")
        self.replay, self.clock = replay, Clock(options.counted)
        self._half_s, read_s = options.layer_ms / 2e3, options.read_ms / 1e3
        self._weights = np.ones(int(options.swept_mb * 1e6) // 8)
        self.cache = ExpertCache(
            SlotSizes.equal([EXPERTS] * LAYERS, EXPERT_BYTES),
            int(options.share * LAYERS * EXPERTS),
            Room(),
            Disk(self.clock, read_s),
            POLICIES[policy](LAYERS, EXPERTS),
        )
        self.prefetcher: Prefetcher | None = None
        if predictor:
            foreseen = Foreseen(replay, EXPERTS, truth=TRUTHS[predictor])
            self.prefetcher = Prefetcher(
                self.cache, [EXPERTS] * LAYERS, foreseen, read_s, lambda: read_s, self.clock
            )

    def tokens(self, count: int) -> dict[str, float]:
        """Figures of the next so many tokens."""
        self.cache.statistics.reset()
        began, processor = self.clock.now, self.clock.processor_s
        for _ in range(count):
            if self.prefetcher is not None:
                self.prefetcher.start([[0]])
            for layer in range(LAYERS):
                self._visit(layer)
        done = self.cache.statistics.total
        read = done.demand_bytes + done.streamed_bytes + done.useful_bytes + done.wasted_bytes
        return {
            "ms": 1e3 * (self.clock.now - began) / count,
            "processor_us": 1e6 * (self.clock.processor_s - processor) / count / LAYERS,
            "hit_ratio": done.hits / (done.hits + done.misses),
            "mb": read / count / 1e6,
        }

    def _visit(self, layer: int) -> None:
        self.clock.aside(self._weights.sum)
        self.clock.now += self._half_s
        row = self.replay.trace[self.replay.position(layer), layer]
        routing = self.replay.route(layer, torch.ones(1, TOP_K))
        wanted = row.tolist()
        with self.cache.acquire(layer, wanted) as held:
            if self.prefetcher is not None:
                self.prefetcher.visit(layer, wanted, torch.zeros(1, 8), routing)
            for ready in held.rounds:
                ready.slot_ids.take(routing.expert_ids)
                self.clock.now += self._half_s * len(ready.experts) / len(wanted)


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each contender the medians, and the ratios of its rounds to the first contender's."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options.contenders}
    trace = published_trace(options.warm + options.tokens + 2, LAYERS, EXPERTS, TOP_K)
    for _ in range(options.rounds):
        for name, found in rounds.items():
            run = Run(name, Replay(trace), options)
            run.tokens(options.warm)
            found.append(run.tokens(options.tokens))
    base = rounds[options.contenders[0]]
    results: dict[str, dict[str, Any]] = {}
    for name, found in rounds.items():
        medians = {key: median(one[key] for one in found) for key in found[0]}
        ratios = [one["ms"] / other["ms"] for one, other in zip(found, base, strict=True)]
        results[name] = medians | {"ratio": median(ratios), "apart": max(ratios) - min(ratios)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    default = ["forecast", "forecast+wrong", "forecast+fickle", "forecast+right", "lru"]
    add("contenders", nargs="*", default=default, metavar="CONTENDER")
    add("--counted", type=float, default=0.7, help="share of the processor time that passes")
    add("--rounds", type=int, default=2)
    add("--read-ms", type=float, default=1.36, help="for one expert")
    add("--layer-ms", type=float, default=1.98, help="for one layer, without waiting")
    add("--share", type=float, default=0.25, help="of the experts in memory")
    add("--swept-mb", type=float, default=20, help="read before each visit, in no time")
    add("--warm", type=int, default=64, help="tokens before those that count")
    add("--tokens", type=int, default=96, help="that count")
    options = parser.parse_args()
    print_header(environment())
    results = measure(options)
    columns = ("", "ms a token", "ratio", "apart", "processor us a visit", "hits", "MB a token")
    rows = [
        (
            name,
            *(f"{one[key]:.3f}" for key in ("ms", "ratio", "apart")),
            f"{one['processor_us']:.0f}",
            f"{one['hit_ratio']:.4f}",
            f"{one['mb']:.1f}",
        )
        for name, one in results.items()
    ]
    print_table(f"{options.share:.0%} resident, {options.counted:g} counted", columns, rows)
    print_json({**environment(), "contenders": results})


if __name__ == "__main__":
    main()
