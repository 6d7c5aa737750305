"""How close do the GPU's experts come to its memory, and to other implementations?

    python -m benchmarks.kernels_gpu [--quick]

One MoE layer of Qwen3-30B-A3B's size in Triton, as bf16, as bit planes of 8, 4, 3 and 2 bits, and
with the codes of FP8 and MXFP4 checkpoints, against plain torch and, where it is installed,
MegaBlocks. Layers take turns and every call has a routing of its own, so that weights come from
memory. Says so and stops where there is no CUDA device. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.common import environment, print_header, print_json, print_table, take_turns
from kernels import BackendError, ExpertWeights, experts_forward, reference
from kernels.planes import PREFIX_BITS, PlaneFormat, PlaneLayout
from kernels.reference import AnyExperts, QuantizedExperts
from moe.loader import BACKENDS

TOKENS = (1, 4, 16, 512, 2048)
ROUTINGS = 8
SYMMETRIC = PlaneFormat()
CHECKPOINTS = {"FP8": PlaneFormat(128, 8, "fp8"), "MXFP4": PlaneFormat(32, 4, "mxfp4")}


class Size(NamedTuple):
    hidden: int
    experts: int
    width: int
    top_k: int
    layers: int


QWEN3_30B_A3B = Size(hidden=2048, experts=128, width=768, top_k=8, layers=3)


class Call(NamedTuple):
    hidden: Tensor
    ids: Tensor
    weights: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seconds a point instead of ten")
    seconds = 2.0 if parser.parse_args().quick else 10.0
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device")
        print_json({"skipped": "torch finds no CUDA device"})
        return
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    header = environment() | {"gpu": torch.cuda.get_device_name(), "read_gbps": round(bandwidth)}
    print_header(header)
    points = run(QWEN3_30B_A3B, device, TOKENS, seconds)
    names = list(points[0]["us"])
    rows = [
        (p["tokens"], *(p["us"].get(name, "-") for name in names), f"{p['gbps']['bf16']:,.0f}")
        for p in points
    ]
    print_table("One layer, microseconds (median)", ("tokens", *names, "bf16 GB/s"), rows)
    print_json({"points": points, "environment": header})


@torch.no_grad()
def run(
    size: Size, device: torch.device, tokens: tuple[int, ...], seconds: float
) -> list[dict[str, Any]]:
    """All points: microseconds a call, and weight bytes of the chosen experts over time."""
    whole = [random_weights(size, device) for _ in range(size.layers)]
    layers: dict[str, list[AnyExperts]] = {"bf16": [*whole]}
    for bits in PREFIX_BITS[::-1]:
        layers[f"{bits} bits"] = [random_planes(size, device, bits) for _ in range(size.layers)]
    for name, own in CHECKPOINTS.items():
        layers[name] = [random_planes(size, device, 8, own) for _ in range(size.layers)]
    points = []
    for count in tokens:
        calls = [random_call(size, count, device) for _ in range(ROUTINGS)]
        contenders = {name: _contender(experts_forward, own, calls) for name, own in layers.items()}
        contenders["plain torch"] = _contender(reference.experts_forward, layers["bf16"], calls)
        for name in BACKENDS.names():
            make = BACKENDS.find(name)
            assert make is not None
            with suppress(BackendError):
                contenders[name] = _contender(make(device).forward, layers["bf16"], calls)
        median = take_turns(contenders, seconds)
        loads = sum(call.ids.unique().numel() for call in calls) / len(calls)
        gbps = {
            name: float(f"{loads * own[0].expert_bytes / median[name] / 1e9:.3g}")
            for name, own in layers.items()
        }
        us = {name: round(value * 1e6, 1) for name, value in median.items()}
        points.append({"tokens": count, "us": us, "gbps": gbps})
    return points


def _contender(
    forward: Callable[[Tensor, Tensor, Tensor, AnyExperts], Tensor],
    layers: list[AnyExperts],
    calls: list[Call],
) -> Callable[[int], object]:
    def run_one(number: int) -> None:
        forward(*calls[number % len(calls)], layers[number % len(layers)])
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for number in range(len(layers)):  # compiles, and measures tiles
        run_one(number)
    return run_one


def silu_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return silu(gate) * up


def random_call(size: Size, tokens: int, device: torch.device) -> Call:
    ids = torch.rand(tokens, size.experts, device=device).topk(size.top_k).indices
    hidden = torch.randn(tokens, size.hidden, device=device, dtype=torch.bfloat16)
    return Call(hidden, ids, torch.full(ids.shape, 1 / size.top_k, device=device))


def random_weights(size: Size, device: torch.device) -> ExpertWeights:
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    first = torch.randn(size.experts, 2 * size.width, size.hidden, **place) * size.hidden**-0.5
    second = torch.randn(size.experts, size.hidden, size.width, **place) * size.width**-0.5
    return ExpertWeights(first, second, silu_gate)


def random_planes(
    size: Size, device: torch.device, bits: int, own: PlaneFormat = SYMMETRIC
) -> QuantizedExperts:
    """Experts of random codes: as fast as real ones, without the minutes of quantizing."""
    first = PlaneLayout(size.width, size.hidden, *own, arrangement="cuda")
    second = PlaneLayout(size.hidden, size.width, *own, arrangement="cuda")
    layouts, experts = (first, first, second), range(size.experts)

    def blob(plane: int) -> Tensor:
        count = sum(layout.plane_bytes(plane) for layout in layouts)
        return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)

    planes = tuple(tuple(blob(plane) for plane in range(own.num_planes(bits))) for _ in experts)
    count = sum(layout.scale_bytes for layout in layouts)
    scale = torch.tensor(1e-3, dtype={"fp8": torch.float32}.get(own.scales, torch.float16))
    if own.scales == "mxfp4":
        scale = torch.tensor(117, dtype=torch.uint8)  # 2 ** -10
    scales = scale.repeat(count // scale.itemsize).view(first.scale_dtype).to(device)
    own_scales = tuple(scales.clone() for _ in experts)
    return QuantizedExperts(first, 2, second, planes, own_scales, silu_gate)


def read_bandwidth(device: torch.device) -> float:
    """GB/s at which torch.sum reads the GPU's memory, the best of several."""
    array = torch.ones(1 << 28, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        array.sum()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return array.numel() * array.element_size() / best / 1e9


if __name__ == "__main__":
    main()
