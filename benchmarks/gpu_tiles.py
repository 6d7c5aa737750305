"""Which tiles are fast on this GPU? One projection of a layer at a time, by CUDA graphs.

    python -m benchmarks.gpu_tiles [--seconds 60]      # or: python -m benchmarks.gpu --step tiles

Experts of Qwen3-30B-A3B's shape in bf16 and as bit planes, an output head, and prompt attention,
each with every tile that the kernels choose from, and a few more. The kernels measure their tiles
by themselves; this shows what there is to choose from. Processes beside this one compile
all variants first, as compiling takes longer than measuring.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.kernels_gpu import (
    QWEN3_30B_A3B,
    Call,
    Size,
    random_call,
    random_planes,
    random_weights,
)
from kernels import ExpertWeights, QuantizedExperts
from kernels.triton import attention, experts, grouped, planes, tall
from kernels.triton.attention import KeyRows
from kernels.triton.routing import route
from kernels.triton.tiles import DECODE, PLANES, PREFILL, TALL, PlaneTile, TallTile, Tile

COMPILERS = 12
"""Processes that compile."""
LAYERS = 6
"""That take turns, so that weights come from memory."""
TOKENS = {"bf16": (1, 8), "planes": (1, 8, 64)}
"""Of decode steps."""
PROMPTS = (2048, 8192)
"""Tokens that whole weights and attention meet."""
KEYS = (64, 128)
"""Of a tile of prompt attention."""

Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Variant:
    """One way to compute one thing.

    Attributes:
        what, how: names of the thing and of the way.
        nbytes: of weights that a call reads; 0 where these are not the limit.
        make: the calls of several layers.
    """

    what: str
    how: str
    nbytes: float
    make: Callable[[], Calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="measure no longer than these")
    parser.add_argument("--compile", help="I/N: compile every Nth variant only")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device")
        print_json({"skipped": "torch finds no CUDA device"})
        return
    device = torch.device("cuda")
    if given.compile:
        index, count = map(int, given.compile.split("/"))
        compile_all(list(variants(QWEN3_30B_A3B, device, layers=1))[index::count])
        return
    print_header(environment() | {"gpu": torch.cuda.get_device_name()})
    found = measure(given.seconds)
    rows = [(what, how, us, gbps) for what, own in found.items() for how, us, gbps in own]
    print_table("Fastest first", ("what", "how", "us", "GB/s"), rows)
    print_json(found)


def measure(seconds: float) -> dict[str, list[tuple[str, float, float]]]:
    """Of each thing, the ways with their microseconds and GB/s, the fastest first."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_tiles", "--compile"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    compilers = [
        subprocess.Popen([*command, f"{i}/{COMPILERS}"], env=alone) for i in range(COMPILERS)
    ]
    for process in compilers:
        process.wait()
    found: dict[str, list[tuple[str, float, float]]] = {}
    for one in variants(QWEN3_30B_A3B, torch.device("cuda"), LAYERS):
        if time.monotonic() - began > seconds:
            break
        us = microseconds(one.make())
        found.setdefault(one.what, []).append((one.how, us, one.nbytes / us / 1e3))
    return {what: sorted(own, key=lambda row: row[1]) for what, own in found.items()}


@torch.no_grad()
def compile_all(own: Sequence[Variant]) -> None:
    for variant in own:
        variant.make()[0]()


def microseconds(calls: Calls) -> float:
    """Of one call, the best of several replays of all."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1e3 / len(calls)


@torch.no_grad()
def variants(
    size: Size, device: torch.device, layers: int, prompts: Sequence[int] = PROMPTS
) -> Iterator[Variant]:
    """All of them; one kind of weights is in memory at a time."""
    whole = [random_weights(size, device) for _ in range(layers)]
    for tokens in TOKENS["bf16"]:
        for tile in (*DECODE, *(replace(tile, depth=64) for tile in DECODE if tile.depth > 64)):
            yield from _projections("bf16", size, whole, tokens, tile, _whole, device)
    for tokens, tile in product(prompts, PREFILL):
        yield from _projections("bf16", size, whole, tokens, tile, _whole, device)
    del whole
    for bits in (4, 8):
        quantized = [random_planes(size, device, bits) for _ in range(layers)]
        name = f"{bits} bits"
        for tokens in TOKENS["planes"]:
            for own in PLANES:
                yield from _projections(name, size, quantized, tokens, own, _planes, device)
        for tokens, tall_tile in product(prompts, TALL):
            yield from _projections(name, size, quantized, tokens, tall_tile, _planes, device)
        del quantized
    for tokens in prompts:
        yield from _attention(device, tokens)


def _projections(
    name: str,
    size: Size,
    layers: Sequence[Any],
    tokens: int,
    tile: Tile | PlaneTile | TallTile,
    call_of: Callable[..., Callable[[], object]],
    device: torch.device,
) -> Iterator[Variant]:
    calls = [random_call(size, tokens, device) for _ in layers]
    chosen = sum(call.ids.unique().numel() for call in calls) / len(calls)
    for index, (what, share) in enumerate((("first", 2 / 3), ("second", 1 / 3))):
        if not isinstance(tile, PlaneTile) and not tile.fits(2 - index):
            continue
        one = partial(call_of, size, tile, index)
        yield Variant(
            f"{name}, {tokens} tokens, {what} projection",
            str(tile),
            chosen * layers[0].expert_bytes * share,
            lambda one=one: [*map(one, layers, calls)],  # type: ignore[misc]
        )


def _whole(
    size: Size, tile: Tile, index: int, layer: ExpertWeights, call: Call
) -> Callable[[], object]:
    blocks = route(call.ids, size.experts, tile.rows, size.experts)
    if index:
        x = _inner(size, call)
        return lambda: grouped.project_whole(x, layer.down_EHF, None, blocks, tile)
    epilogue = experts._plan(layer, call.hidden.device).epilogue
    return lambda: grouped.project_whole(
        call.hidden, layer.gate_up_EGH, None, blocks, tile, share=size.top_k, epilogue=epilogue
    )


def _planes(
    size: Size, tile: PlaneTile | TallTile, index: int, layer: QuantizedExperts, call: Call
) -> Callable[[], object]:
    blocks = route(call.ids, size.experts, tile.rows, size.experts)
    plan = experts._plan(layer, call.hidden.device)
    x, how = call.hidden, dict[str, Any](share=size.top_k, epilogue=plan.epilogue)
    if index:
        x, how = _inner(size, call), {}
    project: Callable[..., object] = planes.project_planes
    if isinstance(tile, TallTile):
        x, project = tall.turned(x), partial(tall.project_tall, turn=index == 0)
    given = x, plan.tables_EP5[index], (layer.first, layer.second)[index], None, blocks, tile
    return partial(project, *given, planes=plan.planes, **how)


def _inner(size: Size, call: Call) -> Tensor:
    return call.hidden.new_empty(call.ids.numel(), size.width).normal_()


def _attention(device: torch.device, tokens: int) -> Iterator[Variant]:
    """Prompts of one sequence, 32 heads with 4 of keys, 128 numbers each."""
    query = torch.randn(tokens, 32, 128, device=device, dtype=torch.bfloat16)
    rows = KeyRows(*(torch.randn_like(query[:, :4]).transpose(0, 1) for _ in range(2)))
    firsts = torch.zeros(tokens, dtype=torch.int32, device=device)
    for keys in KEYS:
        tile = attention.prompt_tile(128, torch.bfloat16)._replace(keys=keys)
        most = tile.rows // 8
        at = torch.arange(0, tokens, most, dtype=torch.int32)
        spans = torch.stack([at * 0, at, at * 0 + most, at], 1).to(device)

        def run(tile: Any = tile, most: int = most, spans: Tensor = spans) -> object:
            with patch.object(attention, "prompt_tile", lambda *_: tile):
                return attention.attend(
                    query, rows, spans, firsts, scale=128**-0.5, most_queries=most,
                    most_keys=tokens, dtype=torch.bfloat16,
                )  # fmt: skip

        yield Variant(f"attention, a prompt of {tokens}", str(tile), 0.0, lambda run=run: [run])  # type: ignore[misc]


if __name__ == "__main__":
    main()
