"""What do fewer bits cost? Held-out bits per byte of the shipped model at every prefix.

    python -m benchmarks.quality [--quick]

The model's experts are replaced by what a prefix of 2, 4 or 8 bits stands for, and held-out text of
three kinds is scored: nested prefixes with half-step centring (ours), the same prefixes merely
truncated, and weights rounded to nearest at that width alone (symmetric, or asymmetric with a zero
point, which costs another 16 bits a group). Beside it: the engine's own kernel on the planes, which
also rounds activations to 8 bits, and how many of the original's choices of experts are kept.
Nothing here is timed. `--quick` scores a part of the text. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from experts.weights import quantize_experts
from kernels import ExpertWeights, QuantizedExperts
from kernels.planes import PREFIX_BITS, PlaneLayout, dequantize, num_planes, pack, pack_scales
from kernels.planes import quantize as quantize_codes
from moe import MoE
from moe.lanes import Visit

ROOT = Path(__file__).parents[1]
TEXTS = ("prose", "python", "cpp")
WINDOW = 512
Experts = ExpertWeights | QuantizedExperts
Change = Callable[[Tensor], Tensor]


class Scorer:
    """Scores the same windows of held-out text under any experts."""

    def __init__(self, model: MoE, bytes_a_text: int) -> None:
        self.model = model
        layers = model._experts.layers
        self.original = [layer for layer in layers if isinstance(layer, ExpertWeights)]
        assert len(self.original) == len(layers), "the model is quantised already"
        self.windows: list[list[int]] = []
        self.num_bytes = 0
        for name in TEXTS:
            text = (ROOT / f"tests/data/heldout_{name}.txt").read_text()[:bytes_a_text]
            self.num_bytes += len(text.encode())
            ids = model.codec.encode(text)
            # Windows overlap by one token, so that every token but the first is predicted once.
            self.windows += [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW - 1)]
        self.reference = self.choices(self.original)

    def bits_per_byte(self, layers: Sequence[Experts]) -> float:
        with self._using(layers):
            bits = sum(_bits(self.model, window) for window in self.windows)
        return bits / self.num_bytes

    def choices(self, layers: Sequence[Experts]) -> Tensor:
        """Sorted experts of each layer for the first windows: ``(layers, tokens, top_k)``."""
        with self._using(layers), _recorded(self.model) as ids:
            for window in self.windows[:24]:
                self.model.logits(window)
        return torch.stack([torch.cat(layer).sort(-1).values for layer in ids])

    def agreement(self, layers: Sequence[Experts]) -> float:
        """Share of the original's chosen experts that are chosen still."""
        chosen = self.choices(layers)
        return float((chosen[..., :, None] == self.reference[..., None, :]).any(-1).double().mean())

    @contextmanager
    def _using(self, layers: Sequence[Experts]) -> Iterator[None]:
        self.model._experts.layers[:] = layers
        try:
            yield
        finally:
            self.model._experts.layers[:] = self.original


def _bits(model: MoE, window: list[int]) -> float:
    logprobs = model.logits(window)[:-1].log_softmax(-1)
    taken = logprobs.gather(1, torch.tensor(window[1:])[:, None])
    return float(-taken.double().sum()) / math.log(2)


@contextmanager
def _recorded(model: MoE) -> Iterator[list[list[Tensor]]]:
    """Expert ids that pass by while it is open, by layer."""
    layers = model._experts
    ids: list[list[Tensor]] = [[] for _ in layers.layers]
    run = layers.run

    def spy(layer: int, visits: Sequence[Visit]) -> list[Tensor]:
        ids[layer] += [visit.routing.expert_ids for visit in visits]
        return run(layer, visits)

    layers.run = spy  # type: ignore[method-assign]
    try:
        yield ids
    finally:
        del layers.run


def changed(experts: ExpertWeights, change: Change) -> ExpertWeights:
    """The experts with `change` applied to both projections, in float32."""
    return replace(
        experts,
        gate_up_EGH=change(experts.gate_up_EGH.float()).contiguous(),
        down_EHF=change(experts.down_EHF.float()).contiguous(),
    )


def nested(weight: Tensor, bits: int, group_size: int, *, centred: bool) -> Tensor:
    """What the first ``bits`` of the 8-bit code stand for."""
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
        points.append(
            {
                "way": way,
                "bits": bits,
                "group_size": group_size,
                "bits_per_byte": round(scorer.bits_per_byte(layers), 5),
                "routing_agreement": round(scorer.agreement(layers), 4),
            }
        )

    quantized = [quantize_experts(e, group_size) for e in scorer.original]
    for bits in reversed(PREFIX_BITS):
        point("engine", bits, [layer.at_most(bits) for layer in quantized])
        for way, change in WAYS.items():
            apply = partial(change, bits=bits, group_size=group_size)
            point(way, bits, [changed(e, apply) for e in scorer.original])
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of the text, one group size")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    model = MoE.from_pretrained(options.model)
    scorer = Scorer(model, 8_000 if options.quick else 20_000)
    original = scorer.bits_per_byte(scorer.original)
    points = [
        point for size in ((64,) if options.quick else (32, 64)) for point in measure(scorer, size)
    ]
    for point in points:
        point["worse_percent"] = round(100 * (point["bits_per_byte"] / original - 1), 3)
    print_table(
        f"Held-out bits per byte; {original:.5f} with the experts as they are",
        ("way", "bits", "group", "bits/byte", "worse by %", "same experts"),
        [
            [
                p["way"], p["bits"], p["group_size"], f"{p['bits_per_byte']:.4f}",
                p["worse_percent"], f"{p['routing_agreement']:.3f}",
            ]
            for p in points
        ],
    )  # fmt: skip
    print_json({**facts, "original": round(original, 5), "points": points})


if __name__ == "__main__":
    main()
