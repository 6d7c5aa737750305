"""How fast is a model that does not fit, against the disk's limit, fully resident, and llama.cpp?

    python -m benchmarks.offload [--quick] [--model 30b|2b|demo|STORE] [--residency 0.75 0.5 0.25]
                                 [--parts random replayed prompts plan]

Every run is a process under a real memory limit (a control group), which covers the resident share
of the experts, the other weights and what the process takes beside them; its highest use is read
from outside. Four questions:

- random: decoding with the model's own random routing, where no cache can do better than its size,
  against fully resident, against what the disk could give (bytes read over the bandwidth that is
  measured here), and against llama.cpp's memory-mapped file of the same weights under the limit;
- replayed: routing with the locality that was published for Qwen3-30B-A3B
  (`benchmarks.offload_routing`), this engine's default policy with prefetch against plain LRU;
- prompts: layered against chunked prefill, where each chunk reads the experts from disk again;
- plan (where asked for): what `moe plan` says of decode steps, beside what an engine then does, on
  disks of known speed and on this one, without a memory limit (`benchmarks.offload_plan`).

``bytes_per_token`` and ``stall_fraction`` are what the cache counted, ``disk_fraction`` is those
bytes over the disk's bandwidth and the time. Of prompts also the seconds that the disk takes for
their bytes and the processor for all else: with one thread, no first token comes before the longer
of the two. The last line is JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table, several
from benchmarks.offload_bench import Bench, measure
from benchmarks.offload_models import targets
from benchmarks.offload_plan import planned_cases, summary
from moe.commands.plan.speeds import disk_speed

PARTS = ("random", "replayed", "prompts", "plan")


def show(name: str, result: dict[str, Any]) -> None:
    """Tables of what was measured."""
    rows = []
    for part, kinds in (("residency", (None,)), ("replayed", ("default", "lru"))):
        for share, found in result.get(part, {}).items():
            for kind in kinds:
                one = found if kind is None else found[kind]
                rows.append((f"{kind or 'random'} {share}", *_figures(one), _peer(one)))
    columns = ("", "tokens/s", "hits", "MB a token", "stalled", "of the disk", "peak GB", "mmap")
    if rows:
        print_table(f"{name}; the disk gives {result['disk_gbps']:.2f} GB/s", columns, rows)
    rows = [
        (
            *(f"{length} {mode}", share, one[mode]["ttft_s"], one[mode]["bytes"] / 1e9),
            *(one[mode]["bytes"] / 1e9 / result["disk_gbps"], one[mode]["processor_s"]),
            one[mode]["stall_fraction"],
        )
        for share, found in result.get("prompts", {}).items()
        for length, one in found.get("prompts", {}).items()
        for mode in ("layered", "chunked")
    ]
    if rows:
        heads = ("", "resident", "first token s", "GB", "disk s", "processor s", "stalled")
        print_table(f"{name}: prompts", heads, rows)
    if planned := result.get("plan"):
        rows = [
            (
                *(f"{one['share']:g} {one['disk']}", one["batch"], one["planned"]),
                *(one["measured"], one["ratio"], one.get("bytes_ratio", "-")),
                one["uniform_ratio"],
            )
            for one in planned["rows"]
        ]
        heads = ("", "sequences", "planned", "measured", "ratio", "of the bytes", "uniform")
        print_table(f"{name}: tokens/s by moe plan and by an engine", heads, rows)
        print(", ".join(f"{what} {ratio:.2f}" for what, ratio in planned["summary"].items()))


def _peer(found: dict[str, Any]) -> str:
    peers = found.get("peers", {}).values()
    return ", ".join(f"{peer.get('tokens_per_second', 0):.2f}" for peer in peers) or "-"


def _figures(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"][:40], *"-----"]
    return [
        f"{found['tokens_per_second']:.2f}",
        f"{found['hit_ratio']:.3f}",
        f"{found['bytes_per_token'] / 1e6:,.1f}",
        f"{found['stall_fraction']:.2f}",
        f"{found['disk_fraction']:.2f}",
        f"{found['memory']['peak_bytes'] / 1e9:.2f}",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="the demo model, one residency, its own routing")
    add("--model", nargs="+", help="30b, 2b, demo or a store (default: 30b and 2b)")
    add("--residency", **several(float), default=[0.75, 0.5, 0.25])
    add("--parts", nargs="+", choices=PARTS, help=f"(default: {' '.join(PARTS[:3])})")
    add("--lengths", **several(int), default=[2048, 8192], help="tokens of prompts")
    options = parser.parse_args()
    if options.quick:
        options.model, options.residency = options.model or ["demo"], [0.5]
    options.parts = options.parts or (["random"] if options.quick else list(PARTS[:3]))
    options.model = options.model or ["30b", "2b"]
    return options


def main() -> None:
    options = parse()
    facts = environment()
    print_header(facts)
    results = {}
    for target in targets(options.model):
        disk = disk_speed(target.largest_file, target.expert_bytes)
        bench = Bench(target, options, disk.bytes_per_s)
        result = measure(bench, options.parts, options.residency) | {"reader": disk.reader}
        if "plan" in options.parts:
            rows = list(planned_cases(target.store, options.residency))
            result["plan"] = {"rows": rows, "summary": summary(rows)}
        show(target.store.name, result)
        results[target.store.name] = result
    first = next(iter(results.values()), {})
    print_json({**facts, **first, "models": results})


if __name__ == "__main__":
    main()
