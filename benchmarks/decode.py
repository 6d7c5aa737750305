"""How fast are decoding and prompts at 8, 4 and 2 bits, against transformers and llama.cpp?

    python -m benchmarks.decode [--quick] [--model 2b|30b|latent|demo|PATH] [--peer PEERS]
    python -m benchmarks.decode --peer /path/to/ik_llama.cpp    # a checkout that is built
    python -m benchmarks.decode --behind 2000                   # tokens of context, not 32

Contenders hold the same random weights, all matrices at one width (ours at 2 bits: the experts, the
rest at 4), and take turns in one process: tokens a second at batch 1, 4 and 16, and for prompts of
512 and 2048 tokens. Every sequence reads different random tokens (the same token everywhere would
choose the same experts and flatter everybody). Ours is the whole engine with scheduling, statistics
and the choice of tokens; the peers run their forward pass only. The peer ``unfused`` is ours by
transformers' own layers (``engine.fused`` off).

``bandwidth_fraction`` is bytes read a step (weights of the trunk, distinct experts, keys and
values) over the step's time and the read bandwidth, which is measured in each turn, too: on a
shared machine it changes by the minute. llama.cpp is measured
where the packages ``llama-cpp-python`` and ``gguf`` are installed. The last line is JSON: the
figures of the first width, and those of the others in ``other_bits``.

``30b`` is a store of Qwen3-30B-A3B's shape (`examples.models.random_store`), against a GGUF file
of the same shape. Two of them do not fit into most machines: there contenders come one after the
other. ``latent`` is a small store with latent attention, for ``--bits 0 --peer unfused``.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoConfig

from benchmarks.common import (
    environment,
    print_header,
    print_json,
    print_table,
    several,
)
from benchmarks.decode_contenders import Ours, contenders, model_folder
from benchmarks.decode_peers import Contender
from experts.manifest import is_store
from kernels.cpu.limits import read_speed
from moe.machine import give_back_freed_memory

BATCHES = (1, 4, 16)
PROMPTS = (512, 2048)
BEHIND = 32  # tokens before decoding starts


def measure(
    found: Sequence[Contender], vocab_size: int, options: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], float]:
    """Median tokens a second of every contender, by point, in turns, alternating the order; and
    the median of what memory reads, bytes a second."""
    times: dict[str, dict[str, list[float]]] = {}
    bandwidths = []
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    order = list(found)
    for _ in range(options.rounds):
        bandwidths.append(read_speed())
        for batch in BATCHES:
            rows = [tokens(options.behind) for _ in range(batch)]
            following = [tokens(options.steps) for _ in range(batch)]
            for each in order:
                point = times.setdefault(f"decode {batch}", {}).setdefault(each.name, [])
                point += [batch / s for s in each.decode(rows, following)[2:]]
        for length in options.prompts:
            prompt = tokens(length)
            for each in order:
                point = times.setdefault(f"prompt {length}", {}).setdefault(each.name, [])
                point.append(length / each.prefill(prompt))
        order.reverse()
    rates = {point: {n: median(v) for n, v in by.items()} for point, by in times.items()}
    return rates, median(bandwidths)


def bytes_by_batch(found: Sequence[Contender]) -> dict[str, dict[int, float]]:
    """Bytes that a step of ours reads, by contender and batch."""
    draw = random.Random(1)
    read: dict[str, dict[int, float]] = {}
    for each in (one for one in found if isinstance(one, Ours)):
        for batch in BATCHES:
            rows = [[draw.randrange(1, 1000) for _ in range(BEHIND)] for _ in range(batch)]
            each.decode(rows, [row[:8] for row in rows])
            read.setdefault(each.name, {})[batch] = each.bytes_a_step
    return read


def run(path: Path, options: argparse.Namespace) -> Iterator[tuple[Any, float, Any]]:
    """Rates, bandwidth and bytes of each group of contenders, which is gone before the next."""
    config = AutoConfig.from_pretrained(path).get_text_config()
    room = config.max_position_embeddings
    options.prompts = [length for length in options.prompts if length < room]
    for group in contenders(path, options):
        found = [make() for make in group]
        yield *measure(found, config.vocab_size, options), bytes_by_batch(found)
        for each in found:
            each.close()
        del found, each
        gc.collect()
        give_back_freed_memory()  # the next may need all there is


def by_bits(
    rates: dict[str, dict[str, float]], shares: dict[str, dict[int, float]], bits: Sequence[int]
) -> list[dict[str, Any]]:
    """The figures of decoding at each width of ours, which come first; without any, the peers'."""
    names = list(shares)[: len(bits)]
    own: list[tuple[str | None, int | None]] = [*zip(names, bits, strict=True)] or [(None, None)]

    def point(name: str | None, batch: int) -> dict[str, Any]:
        found = {each: round(rate, 2) for each, rate in rates[f"decode {batch}"].items()}
        return {
            "tokens_per_second": found[name] if name else None,
            "bandwidth_fraction": round(shares[name][batch], 3) if name else None,
            "peers": {each: rate for each, rate in found.items() if each not in names},
        }

    return [
        {"bits": width, "batch": {str(batch): point(name, batch) for batch in BATCHES}}
        for name, width in own
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the demo model, few steps")
    parser.add_argument("--model", default=None, help="2b, 30b, latent, demo, folder (default 2b)")
    parser.add_argument("--peer", default="transformers,llama.cpp")
    bits = several(int) | {"nargs": "*"}
    parser.add_argument("--bits", **bits, help="0: as it is (8 4 2; a store: its own); none: peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--behind", type=int, default=BEHIND, help="tokens before decoding starts")
    options = parser.parse_args()
    options.prompts = (512,) if options.quick else PROMPTS
    if options.quick:
        options.model, options.rounds = options.model or "demo", 1
        kept = [peer for peer in options.peer.split(",") if peer in ("transformers", "unfused")]
        options.peer = ",".join(kept)  # the demo model is not llama.cpp's kind
    return options


def main() -> None:
    options = parse()
    facts = environment()
    print_header(facts)
    path = model_folder(options.model)
    if path is None:
        print_json({**facts, "model": options.model, "skipped": True})
        return
    if options.bits is None:
        options.bits = [4, 2] if is_store(path) else [8, 4, 2]
    rates: dict[str, dict[str, float]] = {}
    shares: dict[str, dict[int, float]] = {}
    bandwidths = []
    for by_point, bandwidth, read in run(path, options):
        for point, by in by_point.items():
            rates.setdefault(point, {}).update(by)
        for name, sizes in read.items():
            each = {b: size * by_point[f"decode {b}"][name] / b for b, size in sizes.items()}
            shares[name] = {b: used / bandwidth for b, used in each.items()}
        bandwidths.append(bandwidth / 1e9)
    print_table(
        f"Tokens a second, {path.name}; memory reads {median(bandwidths):.1f} GB/s",
        ("", *rates),
        [[name, *(f"{by[name]:,.1f}" for by in rates.values())] for name in rates["decode 1"]],
    )
    print_table(
        "Share of the read bandwidth while decoding",
        ("", *(f"batch {batch}" for batch in BATCHES)),
        [[name, *(f"{share:.2f}" for share in by.values())] for name, by in shares.items()],
    )
    first, *others = by_bits(rates, shares, options.bits)
    print_json(
        {
            **facts,
            "model": path.name,
            "behind": options.behind,
            "bandwidth_gbps": round(median(bandwidths), 2),
            **first,
            "other_bits": others,
            "prompt": {str(length): rates[f"prompt {length}"] for length in options.prompts},
        }
    )


if __name__ == "__main__":
    main()
