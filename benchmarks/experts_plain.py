"""Are our plain experts at least as fast as every implementation that transformers has?

    python -m benchmarks.experts_plain [--quick]

One MoE layer call on the same weights, ours against transformers' own Qwen3MoeExperts module with
each `experts_implementation`: fp32 and bf16 weights, 1 to 512 tokens, two sizes of layer. Several
layers' weights take turns and every call has new tokens and routing, so that decoding reads memory
and not the cache. `--quick` takes under 50 seconds on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.common import (
    environment,
    print_header,
    print_json,
    print_table,
    take_turns,
)
from kernels import ExpertWeights, backend_status, experts_forward
from kernels.cpu.limits import read_speed

TOKENS = (1, 4, 16, 512)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = ("eager", "batched_mm", "grouped_mm")
# batched_mm copies each token's experts; beyond this it is left out.
MAX_COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class Size:
    name: str
    hidden: int
    experts: int
    width: int
    top_k: int
    layers: int


SIZES = (
    Size("2B layer", hidden=1024, experts=64, width=512, top_k=8, layers=2),
    Size("demo layer", hidden=256, experts=32, width=128, top_k=4, layers=16),
)


class Case(NamedTuple):
    hidden: Tensor
    ids: Tensor
    weights: Tensor


class Layers:
    """The layers' weights, as transformers' modules and as ours, sharing memory."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self.config = Qwen3MoeConfig(
            hidden_size=size.hidden,
            num_experts=size.experts,
            moe_intermediate_size=size.width,
            num_experts_per_tok=size.top_k,
        )
        self.modules = [self._module() for _ in range(size.layers)]
        self.weights = [_ours(module) for module in self.modules]

    def _module(self) -> Any:
        module = Qwen3MoeExperts(self.config).to(self.dtype).requires_grad_(False)
        for parameter in module.parameters():
            parameter.uniform_(-0.05, 0.05)
        return module

    def case(self, tokens: int) -> Case:
        scores = torch.randn(tokens, self.size.experts).softmax(-1)
        weights, ids = scores.topk(self.size.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return Case(torch.randn(tokens, self.size.hidden).to(self.dtype), ids, weights)

    def ours(self, call: int, case: Case) -> Tensor:
        weights = self.weights[call % self.size.layers]
        return experts_forward(case.hidden, case.ids, case.weights, weights)

    def peer(self, implementation: str, call: int, case: Case) -> Tensor:
        self.config._experts_implementation = implementation
        module = self.modules[call % self.size.layers]
        result: Tensor = module(case.hidden, case.ids, case.weights.to(self.dtype))
        return result

    def expert_bytes(self, cases: list[Case]) -> float:
        """Bytes of distinct experts that a call reads, on average."""
        distinct = [case.ids.unique().numel() for case in cases]
        return self.weights[0].expert_bytes * sum(distinct) / len(distinct)


def _ours(module: Any) -> ExpertWeights:
    return ExpertWeights(module.gate_up_proj, module.down_proj, module._apply_gate)


def measure(layers: Layers, tokens: int, seconds: float) -> dict[str, Any]:
    """One point: medians of all contenders, and how far ours is from eager's result."""
    cases = [layers.case(tokens) for _ in range(64 if tokens <= 16 else 8)]
    copied = tokens * layers.size.top_k * layers.weights[0].expert_bytes
    peers = [p for p in PEERS if p != "batched_mm" or copied <= MAX_COPY_BYTES]

    def peer(name: str) -> Callable[[int], object]:
        return lambda call: layers.peer(name, call, cases[call % len(cases)])

    contenders: dict[str, Callable[[int], object]] = {name: peer(name) for name in peers}
    contenders["ours"] = lambda call: layers.ours(call, cases[call % len(cases)])
    median = take_turns(contenders, seconds)
    best = min(peers, key=lambda name: median[name])
    expected = layers.peer("eager", 0, cases[0]).float()
    difference = (layers.ours(0, cases[0]).float() - expected).abs().max() / expected.abs().max()
    return {
        "ours_us": round(median["ours"] * 1e6, 1),
        "peers_us": {name: round(median[name] * 1e6, 1) for name in peers},
        "best_peer": best,
        "best_peer_us": round(median[best] * 1e6, 1),
        "ratio": round(median[best] / median["ours"], 3),
        "gbps": round(layers.expert_bytes(cases) / median["ours"] / 1e9, 2),
        "relative_difference": float(f"{difference.item():.2g}"),
    }


@torch.no_grad()
def run(seconds: float) -> list[dict[str, Any]]:
    """All points; `seconds` of timing each."""
    points = []
    for size in SIZES:
        for name, dtype in DTYPES.items():
            layers = Layers(size, dtype)
            for tokens in TOKENS:
                torch.manual_seed(tokens)
                point = {"size": size.name, "dtype": name, "tokens": tokens}
                points.append(point | measure(layers, tokens, seconds))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 50 seconds on two cores")
    seconds = 0.8 if parser.parse_args().quick else 5.0
    started = time.perf_counter()
    bandwidth = read_speed() / 1e9
    header = environment() | {"transformers": transformers.__version__}
    header |= {"kernel": backend_status()["name"], "read_gbps": round(bandwidth, 1)}
    print_header(header)
    points = run(seconds)
    columns = ("size", "dtype", "tokens", "ours us", *PEERS, "ratio", "GB/s", "of limit")
    rows = [
        (
            *(p[key] for key in ("size", "dtype", "tokens", "ours_us")),
            *(p["peers_us"].get(name, "-") for name in PEERS),
            f"{p['ratio']:.2f}x",
            p["gbps"],
            f"{100 * p['gbps'] / bandwidth:.0f}%",
        )
        for p in points
    ]
    print_table("One MoE layer, microseconds a call (median)", columns, rows)
    print_json(
        {
            "points": points,
            "at_least_as_fast": all(p["ratio"] >= 1 for p in points),
            "worst_ratio": min(p["ratio"] for p in points),
            "seconds": round(time.perf_counter() - started, 1),
            "environment": header,
        }
    )


if __name__ == "__main__":
    main()
