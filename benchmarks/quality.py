"""What do fewer bits cost? Held-out bits per byte of the shipped model at every prefix.

    python -m benchmarks.quality [--quick]

The model's experts are replaced by what a prefix of 2, 3, 4 or 8 bits stands for, and held-out text
of three kinds is scored: nested prefixes with half-step centring (ours), the same prefixes merely
truncated, and weights rounded to nearest at that width alone (symmetric, or asymmetric with a zero
point, which costs another 16 bits a group). Beside it: the engine's own kernel on the planes, which
also rounds activations to 8 bits; how far predictions move (Kullback-Leibler divergence in bits a
token, which needs less text than bits per byte to tell two ways apart, and a standard error of the
latter); and how many of the original's choices of experts are kept. Last, the experts as they are
with keys and values in 16, 8 and 4 bits (`memory.kv_bits`; `benchmarks.keys_values` reads longer
windows). Nothing here is timed.
`--quick` scores a part of the text. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.keys_values import pool_of
from benchmarks.scorer import ROOT, Experts, Scorer
from experts.weights import quantize_experts
from kernels import ExpertWeights
from kernels.planes import PREFIX_BITS, PlaneLayout, dequantize, num_planes, pack, pack_scales
from kernels.planes import quantize as quantize_codes
from moe import MoE

Change = Callable[[Tensor], Tensor]


def changed(experts: ExpertWeights, change: Change) -> ExpertWeights:
    """The experts with `change` applied to both projections, in float32."""
    return replace(
        experts,
        gate_up_EGH=change(experts.gate_up_EGH.float()).contiguous(),
        down_EHF=change(experts.down_EHF.float()).contiguous(),
    )


def nested(weight: Tensor, bits: int, group_size: int, *, centred: bool) -> Tensor:
    """Return what the first ``bits`` of the 8-bit code stand for."""
    layout = PlaneLayout(weight.shape[-2], weight.shape[-1], group_size)
    codes, scales = quantize_codes(weight, group_size)
    planes = pack(codes, layout)[: num_planes(bits)]
    value = dequantize(planes, pack_scales(scales, layout), layout)
    if centred or bits == 8:
        return value
    half_step = scales.float().repeat_interleave(group_size, -1)[..., : weight.shape[-1]]
    return value - half_step * 2 ** (7 - bits)


def rounded(weight: Tensor, bits: int, group_size: int, *, asymmetric: bool) -> Tensor:
    """Round to nearest at ``bits`` alone."""
    columns = weight.shape[-1]
    groups = torch.nn.functional.pad(weight, (0, -columns % group_size))
    groups = groups.unflatten(-1, (-1, group_size))
    if asymmetric:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp_min(1e-30)
        value = ((groups - low) / step).round() * step + low
    else:
        step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / (2 ** (bits - 1) - 1)
        value = (groups / step).round() * step
    return value.flatten(-2)[..., :columns]


WAYS: dict[str, Callable[..., Tensor]] = {
    "nested, centred": partial(nested, centred=True),
    "nested, truncated": partial(nested, centred=False),
    "alone, symmetric": partial(rounded, asymmetric=False),
    "alone, asymmetric": partial(rounded, asymmetric=True),
}


def measure(scorer: Scorer, group_size: int) -> list[dict[str, Any]]:
    """Every width and way at one group size."""
    points = []

    def point(way: str, bits: int, layers: Sequence[Experts]) -> None:
        points.append({"way": way, "bits": bits, "group_size": group_size, **scorer.score(layers)})

    quantized = [quantize_experts(e, group_size) for e in scorer.original]
    for bits in reversed(PREFIX_BITS):
        point("engine", bits, [layer.at_most(bits) for layer in quantized])
        for way, change in WAYS.items():
            apply = partial(change, bits=bits, group_size=group_size)
            point(way, bits, [changed(e, apply) for e in scorer.original])
    return points


def keys_and_values(scorer: Scorer) -> list[dict[str, Any]]:
    """The original's experts, with keys and values at every precision below float32."""
    points, backbone = [], scorer.model.backbone
    before = backbone.blocks
    for bits in (16, 8, 4):
        backbone.blocks = pool_of(bits)
        own = {"way": "keys and values", "bits": bits, "group_size": 32 if bits < 16 else 1}
        points.append(own | scorer.score(scorer.original))
    backbone.blocks = before
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of the text, one group size")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    model = MoE.from_pretrained(options.model, memory={"kv_bits": 32})
    scorer = Scorer(model, 8_000 if options.quick else 20_000)
    points = [
        point for size in ((64,) if options.quick else (32, 64)) for point in measure(scorer, size)
    ]
    points += keys_and_values(scorer)
    print_table(
        f"Held-out bits per byte; {scorer.bits_per_byte:.5f} with the experts as they are",
        ("way", "bits", "group", "bits/byte", "worse by %", "+-", "divergence", "same experts"),
        [
            [
                p["way"], p["bits"], p["group_size"], f"{p['bits_per_byte']:.4f}",
                p["worse_percent"], p["error_percent"], f"{p['divergence']:.4f}",
                f"{p['routing_agreement']:.3f}",
            ]
            for p in points
        ],
    )  # fmt: skip
    print_json({**facts, "original": round(scorer.bits_per_byte, 5), "points": points})


if __name__ == "__main__":
    main()
