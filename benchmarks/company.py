"""Does company show in an answer? Log probabilities behind prompts, read in several ways.

    python -m benchmarks.company [--quick] [--model demo|2b|PATH] [--threads 1,2]

Each prompt is read whole and alone, in two passes (a known prefix, and the rest: long, or of at
most 16 tokens), and beside another prompt; then a token is decoded alone and beside another one.
For several widths of the weights: how often any bit of the log probabilities differs, and by how
much at most.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.decode_contenders import model_folder
from moe import MoE
from moe.kv.cache import SequenceCache
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from routing import Phase

WIDTHS: dict[str, dict[str, Any]] = {
    "as the checkpoint has them": {},
    "experts 4 bits": {"expert_bits": 4},
    "experts 4, trunk 8": {"expert_bits": 4, "trunk_bits": 8},
    "experts 8, trunk 8, head 8": {"expert_bits": 8, "trunk_bits": 8, "head_bits": 8},
}
LONGEST, OTHER = 400, 200

Piece = tuple[SequenceCache, Sequence[int]]


def read(model: MoE, pieces: Sequence[Piece], phase: Phase = "prefill") -> Tensor:
    """Log probabilities behind the first piece; all are read in one pass."""
    with torch.inference_mode():
        lanes = model.backbone.lanes([Work(ids, cache) for cache, ids in pieces], phase)
        run_lanes(lanes, model.experts.run)
    first: Tensor = lanes[0].result()[0][-1]
    return first.log_softmax(-1)


def ways(
    model: MoE, ids: Sequence[int], other: Sequence[int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every way to read a prompt, what came of it, and what should have."""
    length = len(ids)

    def cache() -> SequenceCache:
        return model.backbone.new_cache(LONGEST + OTHER)

    def company() -> Piece:
        return cache(), other

    whole, beside = cache(), cache()
    expected = read(model, [(whole, ids)])
    for name, end in (("prefix, long rest", 16), ("prefix, short rest", (length - 1) // 16 * 16)):
        for where, others in (("", []), (" beside another", [company()])):
            own = cache()
            read(model, [(own, ids[:end])])
            yield name + where, read(model, [(own, ids[end:]), *others]), expected
    yield "whole beside another", read(model, [(beside, ids), company()]), expected
    another, step = cache(), ids[:1]
    read(model, [(another, other)])
    expected = read(model, [(whole, step)], "decode")
    got = read(model, [(beside, step), (another, step)], "decode")
    yield "a step beside another", got, expected


def measure(
    path: Path, width: dict[str, Any], prompts: int, threads: int
) -> dict[str, dict[str, float]]:
    """Of each way, how many of the prompts it changes, and the largest difference."""
    model = MoE.from_pretrained(path, model=width)
    torch.set_num_threads(threads)
    draw, vocabulary = random.Random(0), model.backbone.model.config.vocab_size
    found: dict[str, list[float]] = {}
    for _ in range(prompts):
        size = draw.randint(40, LONGEST)
        ids, other = ([draw.randrange(1, vocabulary) for _ in range(n)] for n in (size, OTHER))
        for name, got, expected in ways(model, ids, other):
            found.setdefault(name, []).append(float((got - expected).abs().max()))
    model.close()
    return {
        name: {"changed": sum(d > 0 for d in differences), "largest": max(differences)}
        for name, differences in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 prompts, one thread")
    parser.add_argument("--model", default="demo", help="demo, 2b or a folder")
    parser.add_argument("--threads", default=None, help="numbers of threads (default 1,2)")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    path = model_folder(options.model)
    if path is None:
        print_json({**facts, "model": options.model, "skipped": True})
        return
    prompts = 4 if options.quick else 12
    results: dict[str, Any] = {}
    for threads in map(int, (options.threads or ("1" if options.quick else "1,2")).split(",")):
        by_width = {name: measure(path, width, prompts, threads) for name, width in WIDTHS.items()}
        results[str(threads)] = by_width
        rows = [
            [way, *(f"{by[way]['changed']} ({by[way]['largest']:.0e})" for by in by_width.values())]
            for way in by_width["experts 4 bits"]
        ]
        print_table(
            f"of {prompts} prompts changed (largest difference), {threads} threads",
            ["read", *WIDTHS],
            rows,
        )
    print_json({**facts, "model": options.model, "prompts": prompts, "by_threads": results})


if __name__ == "__main__":
    main()
