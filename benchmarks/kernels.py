"""How near are our CPU kernels on bit planes to what the machine can do, and to others' kernels?

    python -m benchmarks.kernels [--quick]

One MoE layer at 8, 4 and 2 bits against our kernels on whole weights and the plain reference; one
linear layer against torch's own int8 and int4 operators and its float ones; how fast 1 to 8 rows
read a matrix. Both limits are measured in the same run: a call can be no faster than its bytes at
the memory's speed (`kernels.cpu.limits`), nor than its products at the multipliers'. Weights
take turns, so that few tokens read memory and not the cache. `--quick` takes under a minute on two
cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    environment,
    print_header,
    print_json,
    print_table,
    take_turns,
)
from benchmarks.kernel_layers import (
    GROUP_SIZE,
    SIZES,
    Size,
    random_experts,
    random_matrix,
    whole_experts,
)
from benchmarks.kernels_peers import LINEAR_PEERS
from benchmarks.kernels_rows import few_rows
from kernels import backend_status, experts_forward, linear_forward, reference
from kernels.cpu.limits import Limits, measure_limits
from kernels.planes import PREFIX_BITS, num_planes

TOKENS = (1, 4, 16, 512)
PROMPT = 2048  # of layers: their outputs are beyond the caches
LINEAR_SIZE = 4096
LINEAR_COPIES = 12  # beyond every cache at 2 bits

Contender = Callable[[int], object]


def layer_points(size: Size, seconds: float) -> list[dict[str, Any]]:
    """One MoE layer at every number of tokens."""
    layers = [random_experts(size) for _ in range(size.copies)]
    kinds: dict[str, list[Any]] = {
        f"{bits} bits": [layer.at_most(bits) for layer in layers] for bits in PREFIX_BITS[::-1]
    }
    kinds["bf16"] = [whole_experts(size, torch.bfloat16) for _ in range(size.copies)]
    points = []
    for tokens in (*TOKENS, PROMPT):
        torch.manual_seed(tokens)
        calls = []
        for _ in range(32 if tokens <= 16 else 4):
            weights, ids = torch.randn(tokens, size.experts).softmax(-1).topk(size.top_k)
            calls.append((torch.randn(tokens, size.hidden), ids, weights))

        def contender(layers: list[Any], calls: list[Any] = calls) -> Contender:
            def run(call: int) -> Tensor:
                hidden, ids, weights = calls[call % len(calls)]
                return experts_forward(hidden, ids, weights, layers[call % len(layers)])

            return run

        medians = take_turns({name: contender(kind) for name, kind in kinds.items()}, seconds)
        if tokens == 1:
            start = time.perf_counter()
            reference.experts_forward(*calls[0], kinds["8 bits"][0])
            medians["reference"] = time.perf_counter() - start
        distinct = sum(ids.unique().numel() for _, ids, _ in calls) / len(calls)
        products = tokens * size.top_k * 3 * size.hidden * size.width
        sizes = {name: distinct * kind[0].expert_bytes for name, kind in kinds.items()}
        points.append(point(size.name, tokens, medians, sizes, products))
    return points


def linear_points(seconds: float) -> list[dict[str, Any]]:
    """One linear layer at every number of tokens."""
    whole = [random_matrix(LINEAR_SIZE) for _ in range(LINEAR_COPIES)]

    def ours(bits: int) -> list[Any]:
        return [replace(matrix, planes=matrix.planes[: num_planes(bits)]) for matrix in whole]

    def contender(run: Callable[[Tensor, Any], object], weights: list[Any], x: Tensor) -> Contender:
        return lambda call: run(x, weights[call % len(weights)])

    kinds: dict[str, tuple[Any, list[Any]]] = {
        f"{bits} bits": (linear_forward, ours(bits)) for bits in PREFIX_BITS[::-1]
    }
    sizes = {
        name: sum(blob.numel() * blob.element_size() for blob in (*m[0].planes, m[0].scales))
        for name, (_, m) in kinds.items()
    }
    for name, peer in LINEAR_PEERS.items():
        kinds[name] = peer.run, [peer.weight(LINEAR_SIZE, GROUP_SIZE) for _ in range(peer.copies)]
    points = []
    for tokens in TOKENS:
        torch.manual_seed(tokens)
        x = torch.randn(tokens, LINEAR_SIZE)
        # torch's own weight-only operators have no kernel for many rows: seconds a call.
        names = [n for n in kinds if n not in LINEAR_PEERS or tokens <= LINEAR_PEERS[n].most_tokens]
        medians = take_turns({name: contender(*kinds[name], x) for name in names}, seconds)
        name = f"linear {LINEAR_SIZE}"
        points.append(point(name, tokens, medians, sizes, tokens * LINEAR_SIZE**2))
    return points


def point(
    name: str,
    tokens: int,
    medians: Mapping[str, float],
    sizes: Mapping[str, float],
    products: float,
) -> dict[str, Any]:
    """Microseconds of all; of those with a size in bytes, how fast they read it."""
    return {
        "layer": name,
        "tokens": tokens,
        "us": {kind: round(seconds * 1e6, 1) for kind, seconds in medians.items()},
        "gbps": {kind: round(size / medians[kind] / 1e9, 2) for kind, size in sizes.items()},
        "gops": {kind: round(2 * products / medians[kind] / 1e9, 1) for kind in medians},
    }


def of_limit(p: Mapping[str, Any], limits: Limits) -> dict[str, float]:
    """The least time that a call can take, as a fraction of ours."""
    return {
        kind: round(max(gbps * 1e9 / limits.bytes, p["gops"][kind] * 5e8 / limits.products), 3)
        for kind, gbps in p["gbps"].items()
        if kind.endswith("bits")
    }


def print_points(title: str, points: list[dict[str, Any]]) -> None:
    kinds = list(dict.fromkeys(kind for p in points for kind in p["us"]))
    bits = list(points[0]["of_limit"])
    columns = ("layer", "tokens", *kinds, *(f"{kind} of limit" for kind in bits))
    rows = [
        (
            p["layer"],
            p["tokens"],
            *(f"{p['us'][kind]:,.0f}" if kind in p["us"] else "-" for kind in kinds),
            *(f"{100 * p['of_limit'][kind]:.0f}%" for kind in bits),
        )
        for p in points
    ]
    print_table(title, columns, rows)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    seconds = 0.5 if parser.parse_args().quick else 5.0
    started = time.perf_counter()
    header = environment() | {"kernel": backend_status()["name"]}
    before = measure_limits()
    layers = [p for size in SIZES for p in layer_points(size, seconds)]
    linear = linear_points(seconds)
    rows = few_rows(seconds)
    # Before and after, the better of the two: a neighbour may have been busy.
    after = measure_limits()
    limits = Limits(max(before.bytes, after.bytes), max(before.products, after.products))
    header |= {
        "read_gbps": round(limits.bytes / 1e9, 1),
        "int8_gops": round(2 * limits.products / 1e9),
    }
    print_header(header)
    for p in layers + linear:
        p["of_limit"] = of_limit(p, limits)
    print_points("One MoE layer, microseconds a call (median)", layers)
    print_points("One linear layer, microseconds a call (median)", linear)
    print_table(
        "One matrix, GB/s of weights (median)",
        ("rows", *(f"{bits} bits" for bits in rows["1"])),
        [(count, *by_bits.values()) for count, by_bits in rows.items()],
    )
    print_json(
        {
            "points": layers + linear,
            "few_rows": rows,
            "seconds": round(time.perf_counter() - started, 1),
            "environment": header,
        }
    )


if __name__ == "__main__":
    main()
