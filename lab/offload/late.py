"""What does it cost, and save, to serve late experts by a prefix of their bits?

    python -m lab.offload.late [--tokens N] [--residency 0.25 0.5]

The shipped model as a store of 8 bits, with memory for a share of its experts, reads held-out text
of three kinds one token after the other, as decoding does, with a cache that is empty at first.
Each way has the same memory: experts of 8 or 4 bits, waiting for them whole, or `offload.late:
prefix` with several bits ("behind" a share); and 3 bits of all. Of each: held-out
bits per byte and what that is more than waiting for 8 bits, bytes read from disk and reads a token,
the share of experts asked for that were computed with a prefix, and that had to be read again
whole; and stall, which says little on a busy machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, print_header, print_json, print_table, several
from benchmarks.scorer import ROOT
from benchmarks.texts import TEXTS, heldout
from experts.manifest import read_manifest
from moe import MoE
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.settings import ModelSettings
from offload.capacity import fixed_bytes, slot_bytes

BITS = 8
PREFIXES = {8: ((4, 0.6), (4, 0.3), (2, 0.9), (2, 0.6), (2, 0.3)),
            4: ((3, 0.6), (2, 0.9), (2, 0.6), (2, 0.3))}  # fmt: skip
"""Of experts of so many bits, bits and share of the method."""
PROFILE: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 64},
    "engine": {"max_batch_size": 1},
    "offload": {"hot_set": False},
}
IN_MEMORY = {"bytes_read": 0, "hits": 1, "misses": 0, "hit_ratio": 1.0, "prefixes": 0, "refined": 0,
             "stall_seconds": 0.0}  # fmt: skip
"""Where all experts have room."""
COLUMNS = ["way", "bits/byte", "% more", "KB a token", "reads a token", "hits", "prefixes",
           "read again", "stall ms a token"]  # fmt: skip


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return what is compared, and the settings of each."""
    for bits, prefixes in PREFIXES.items():
        model = {"expert_bits": bits}
        yield f"{bits} bits, wait", {"model": model}
        for late_bits, share in prefixes:
            method = {"late_prefix": {"bits": late_bits, "share": share}}
            late = {"offload": {"late": "prefix"}, "methods": method}
            settings = {"lossless": False, "model": model} | late
            yield f"{bits}, {late_bits} behind {share}", settings
    yield "3 bits, wait", {"model": {"expert_bits": 3}}


def load(store: Path, room: float, settings: dict[str, Any]) -> MoE:
    """With GiB for everything."""
    sections = {
        name: PROFILE.get(name, {}) | settings.get(name, {}) for name in ("offload", "model")
    }
    memory = PROFILE["memory"] | {"device_gib": room}
    rest = {"memory": memory, "lossless": settings.get("lossless", True)}
    return MoE.from_pretrained(store, PROFILE | sections | rest)


def read(model: MoE, texts: Sequence[tuple[Sequence[int], int]]) -> dict[str, float]:
    """Texts of token ids and bytes, each read one token after the other."""
    loaded = model._loaded
    bits, tokens = 0.0, 0
    for ids, _ in texts:
        cache = loaded.backbone.new_cache(len(ids))
        for token, following in pairwise(ids):
            with torch.inference_mode():
                (lane,) = loaded.backbone.lanes([Work([token], cache)], "decode")
                run_lanes([lane], loaded.experts.run)
            (logits,) = lane.result()
            bits -= float(logits.flatten().log_softmax(0)[following]) / math.log(2)
            tokens += 1
    found = loaded.offloaded.statistics() if loaded.offloaded else IN_MEMORY
    asked = found["hits"] + found["misses"]
    return {
        "bits_per_byte": bits / sum(nbytes for _, nbytes in texts),
        "bytes_per_token": found["bytes_read"] / tokens,
        "reads_per_token": found["misses"] / tokens,
        "hit_ratio": found["hit_ratio"],
        "prefixes": found["prefixes"] / asked,
        "refined": found["refined"] / asked,
        "stall_seconds_per_token": found["stall_seconds"] / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=700, help="of each text")
    parser.add_argument("--residency", **several(float), default=[0.25, 0.5])
    arguments = parser.parse_args()
    report: dict[str, Any] = environment() | {"tokens": arguments.tokens}
    print_header(report)
    with tempfile.TemporaryDirectory() as folder:
        demo = ROOT / "examples/demo-model"
        store = convert(
            demo, Path(folder) / "store", ModelSettings.model_validate({"expert_bits": BITS})
        )
        whole, manifest = MoE.from_pretrained(store, PROFILE), read_manifest(store).without_drafts()
        texts = []
        for name in TEXTS:
            ids = whole.codec.encode(heldout(name))[: arguments.tokens]
            texts.append((ids, len(whole.codec.decode(ids[1:]).encode())))
        experts = sum(layer.experts for layer in manifest.layers)
        rest = sum(line.bytes for line in whole.memory_plan.lines if line.name != "experts")
        for residency in arguments.residency:
            slots = round(residency * experts) * slot_bytes(manifest, BITS)
            room = (rest + slots + fixed_bytes(manifest) + 16) / GIB
            report[str(residency)] = found = {}
            for name, settings in ways():
                with load(store, room, settings) as model:
                    found[name] = read(model, texts)
            print_table(f"memory of {residency:.0%} of the experts", COLUMNS, rows(found))
    print_json(report)


def rows(found: dict[str, dict[str, float]]) -> list[list[object]]:
    usual = next(iter(found.values()))["bits_per_byte"]
    return [
        [
            name,
            f"{of['bits_per_byte']:.4f}",
            f"{100 * (of['bits_per_byte'] / usual - 1):+.2f}",
            f"{of['bytes_per_token'] / 1000:.0f}",
            f"{of['reads_per_token']:.2f}",
            f"{of['hit_ratio']:.1%}",
            f"{of['prefixes']:.1%}",
            f"{of['refined']:.1%}",
            f"{1000 * of['stall_seconds_per_token']:.2f}",
        ]
        for name, of in found.items()
    ]


if __name__ == "__main__":
    main()
