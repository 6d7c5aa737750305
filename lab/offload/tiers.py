"""What should host memory keep of what a GPU has? Two tiers on real routings, without any data.

    python -m lab.offload.tiers [--tokens 2048]

The shipped model reads held-out text of each domain; its routings are replayed through the caches
of a device and of host memory (`offload/offloaded.py`), at batch 1. Counted is what comes from
disk, as
a share of the experts asked for. `inclusive`: host memory values all units alike. `half`: it gives
up first what is safest on the device, the more valuable half (what is done). `none`: it gives up
first all that is on the device. `one cache`: as if both were one, the least there can be; two tiers
would have to copy back to host memory all that the device drops. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import environment, print_header, print_json, print_table
from lab.offload.traces import Recorded, recordings
from moe import MoE
from offload.cache import ExpertCache
from offload.offloaded import HostPolicy
from offload.policies import POLICIES, Values
from offload.replay import hit_ratio
from offload.slots import SlotSizes

MODEL = Path(__file__).parents[2] / "examples/demo-model"
SIZES = ((0.125, 0.25), (0.25, 0.25), (0.25, 0.5), (0.25, 0.75), (0.5, 0.5))
"""Of the device and of host memory, as shares of all experts."""
POLICY = "forecast"


class Inclusive(HostPolicy):
    def values(self) -> Values:
        return self._policy.values()


class NoCopies(HostPolicy):
    def values(self) -> Values:
        values = self._policy.values()
        return np.where(self._present(), values.min() - values, values)


WAYS: dict[str, type[HostPolicy]] = {
    "inclusive": Inclusive,
    "half": HostPolicy,
    "none": NoCopies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of each domain")
    tokens = parser.parse_args().tokens
    model = MoE.from_pretrained(str(MODEL))
    print_header(environment())
    rows = [compare(recorded, *sizes) for recorded in recordings(model, tokens) for sizes in SIZES]
    columns = [*WAYS, "one cache"]
    print_table(
        "from disk, of all experts asked for (%)",
        ["trace", "device", "host", "hits on device", *columns],
        [
            [row["trace"], *(100 * row[name] for name in ("device", "host", "hits"))]
            + [100 * row["disk"][way] for way in columns]
            for row in rows
        ],
    )
    mean = {way: float(np.mean([row["disk"][way] for row in rows])) for way in columns}
    print_json({**environment(), "results": rows, "mean_share_from_disk": mean})


def compare(recorded: Recorded, device: float, host: float) -> dict[str, Any]:
    """Of one pair of sizes."""
    total = sum(recorded.trace.num_experts)
    slots, host_slots = int(device * total), int(host * total)
    row: dict[str, Any] = {"trace": recorded.name, "device": device, "host": host, "disk": {}}
    for name, make in WAYS.items():
        near, far = stack(recorded, slots, host_slots, make)
        for units in recorded.calls(1):
            layer = units[0] // recorded.width
            with near.acquire(layer, [unit % recorded.width for unit in units]) as held:
                for _ in held.rounds:
                    pass
        asked = near.statistics.total.hits + near.statistics.total.misses
        row["hits"] = near.statistics.total.hit_ratio
        row["disk"][name] = far.statistics.total.misses / asked
    policy = POLICIES[POLICY](recorded.num_layers, recorded.width)
    both = hit_ratio(recorded.calls(1), slots + host_slots, policy, recorded.width)
    row["disk"]["one cache"] = 1 - both
    return row


def stack(
    recorded: Recorded, slots: int, host_slots: int, make: type[HostPolicy]
) -> tuple[ExpertCache, ExpertCache]:
    """A device over host memory, whose transfers take no time."""
    sizes = SlotSizes.equal(recorded.trace.num_experts, 1)
    policy = POLICIES[POLICY](recorded.num_layers, recorded.width)
    values = make(policy, lambda: device.present)
    host = ExpertCache(sizes, host_slots, Nowhere(host_slots), AtOnce(), values)
    device = ExpertCache(sizes, slots, Nowhere(slots), FromHost(host), policy)
    return device, host


class Nowhere:
    """Slots without memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def move(self, source: int, target: int) -> None: ...

    def resize(self, grains: int) -> None: ...


class Done:
    """A transfer that has ended."""

    done, failed = True, None

    def wait(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def hasten(self) -> None: ...


class AtOnce:
    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Done:
        return Done()


class FromHost:
    def __init__(self, host: ExpertCache) -> None:
        self._host = host

    def fetch(self, layer: int, expert: int, slot: int, *, urgent: bool) -> Done:
        pin = self._host.pin(layer, expert, urgent=urgent)
        assert pin is not None, "nothing else is pinned"
        pin.release()
        return Done()


if __name__ == "__main__":
    main()
