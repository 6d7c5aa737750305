"""What reading the next layer ahead saves a prompt, on a disk that is simulated.

    python -m lab.offload.ahead [--gbps 0.3 0.5 1 2] [--share 0.25] [--us 322 264]

The real cache and policy; 48 layers of 128 experts of 2.5 MB, all of which a prompt asks for; after
decoding some tokens with published locality and one prompt, others are read: of 256 and 512 tokens
and of 2,048, whole and in chunks of 512. A layer takes so many microseconds a token outside of its
experts and in them (by default what one thread of an Intel Xeon with AMX takes, in processor time).
Every figure is a function of these. The last line is JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table, several
from benchmarks.offload_routing import published_trace
from lab.offload.simulated import EXPERT_BYTES, EXPERTS, LAYERS, TOP_K
from offload.cache import ExpertCache
from offload.layer import read_ahead
from offload.policies import POLICIES
from offload.slots import SlotSizes
from tests.oracles.simulated_disk import Clock, Disk, Room

PROMPTS = {"256": (256, 1), "512": (512, 1), "2048 in chunks": (512, 4), "2048 whole": (2048, 1)}
"""Tokens of a pass, and passes."""
DECODED = 24


class Run:
    """A cache that has decoded and read a prompt."""

    def __init__(self, gbps: float, share: float, us: list[float], *, ahead: bool) -> None:
        self.clock, self.ahead = Clock(), ahead
        self.outside_s, self.inside_s = (each / 1e6 for each in us)
        disk = Disk(self.clock, EXPERT_BYTES / gbps / 1e9)
        sizes = SlotSizes.equal([EXPERTS] * LAYERS, EXPERT_BYTES)
        policy = POLICIES["forecast"](LAYERS, EXPERTS)
        self.cache = ExpertCache(sizes, int(share * LAYERS * EXPERTS), Room(), disk, policy)
        for token in published_trace(DECODED, LAYERS, EXPERTS, TOP_K):
            for layer, wanted in enumerate(token.tolist()):
                self.visit(layer, wanted, 1)
        self.read(512)

    def read(self, tokens: int) -> None:
        for layer in range(LAYERS):
            self.visit(layer, range(EXPERTS), tokens)

    def visit(self, layer: int, wanted: Any, tokens: int) -> None:
        self.clock.now += self.outside_s * tokens
        with self.cache.acquire(layer, wanted) as held:
            for ready in held.rounds:
                self.clock.now += self.inside_s * tokens * len(ready.experts) / len(wanted)
        if self.ahead:
            read_ahead(self.cache, layer, len(wanted))


def measure(gbps: float, prompt: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and gigabytes of a prompt, without and with reading ahead."""
    tokens, passes = PROMPTS[prompt]
    found: dict[str, Any] = {"gbps": gbps, "prompt": prompt}
    found["computing_s"] = LAYERS * tokens * passes * sum(options.us) / 1e6
    for name, ahead in (("without", False), ("ahead", True)):
        run = Run(gbps, options.share, options.us, ahead=ahead)
        run.cache.statistics.reset()
        began = run.clock.now
        for _ in range(passes):
            run.read(tokens)
        done = run.cache.statistics.total
        read = done.demand_bytes + done.streamed_bytes + done.useful_bytes + done.wasted_bytes
        found[name] = {"seconds": run.clock.now - began, "gigabytes": read / 1e9}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--gbps", **several(float), default=[0.3, 0.5, 1.0, 2.0], help="of the disk")
    add("--share", type=float, default=0.25, help="of the experts in memory")
    add("--us", type=float, nargs=2, default=[322, 264], help="a token and layer, see above")
    options = parser.parse_args()
    print_header(environment())
    results = [measure(gbps, prompt, options) for gbps in options.gbps for prompt in PROMPTS]
    rows = [
        (
            *(one["gbps"], one["prompt"], one["computing_s"]),
            *(one[way][key] for key in ("seconds", "gigabytes") for way in ("without", "ahead")),
        )
        for one in results
    ]
    columns = ("GB/s", "prompt", "computing s", "s", "s, ahead", "GB", "GB, ahead")
    print_table(f"{options.share:.0%} resident", columns, rows)
    print_json({**environment(), "results": results})


if __name__ == "__main__":
    main()
