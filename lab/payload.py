"""What do rows in 8 bits on the way between ranks save, and what do they cost?

    python -m lab.payload [--quick] [--model DIR]

With ``parallel.payload: int8`` a row of hidden states travels to its experts as 8-bit codes with a
scale; what the experts make of it comes back as it is. No ranks are started: the
bytes are those of the rows as they are packed, and the model reads held-out text with every row
rounded as its receiver would see it, beside the same model without. "error" is of a row's entries,
over the row's largest: at most half a step of 1/127. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from experts.dispatch.rows import dequantize, pack, quantize
from lab.policies.setup import ROOT, Texts
from moe import MoE
from moe.commands.evaluate.scoring import Score, read

BOUND = 0.5 / 127


def bytes_of(hidden: int) -> list[dict[str, Any]]:
    """A row's bytes there, and there and back, as it is and in 8 bits."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        row = torch.zeros(1, hidden, dtype=dtype)
        plain, int8 = (pack(row, None, payload).shape[1] for payload in ("plain", "int8"))
        found.append(
            {
                "dtype": str(dtype).removeprefix("torch."), "hidden": hidden, "plain": plain,
                "int8": int8, "there": int8 / plain, "there_and_back": (int8 + plain) / (2 * plain),
            }
        )  # fmt: skip
    return found


def cost(model: MoE, windows: Sequence[list[int]], num_bytes: int) -> dict[str, float]:
    """Bits per byte with and without rounded rows, their divergence, and the largest error."""
    layers, plain, score = model.experts, Score(), Score()
    forward, worst = layers.forward, 0.0

    def with_rounded(hidden_TH: Tensor, *others: Any, **more: Any) -> Tensor:
        nonlocal worst
        seen_TH = dequantize(*quantize(hidden_TH), hidden_TH.dtype)
        size_T1 = hidden_TH.abs().amax(1, keepdim=True).clamp_min(1e-30)
        worst = max(worst, float(((seen_TH - hidden_TH).abs() / size_T1).max()))
        return forward(seen_TH, *others, **more)

    for window in windows:
        before = read(model, window)
        layers.forward = with_rounded
        score.add(read(model, window), before)
        layers.forward = forward
        plain.add(before)
    difference = score.difference()
    return {
        "bits_per_byte": score.bits / num_bytes,
        "without": plain.bits / num_bytes,
        "worse": score.bits / plain.bits - 1,
        "kl_bits": difference.kl,
        "same_token": difference.agreement,
        "error": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/demo-model")
    options = parser.parse_args()
    facts = environment()
    print_header(facts)
    model = MoE.from_pretrained(options.model)
    texts = Texts(model, 2_000 if options.quick else 15_000, 2_000)
    sizes = [size for hidden in (model.experts.layers[0].hidden_size, 2048, 7168)
             for size in bytes_of(hidden)]  # fmt: skip
    found = cost(model, texts.test, texts.num_bytes)
    print_table(
        "Bytes of a row",
        ("hidden", "as it is", "there", "in 8 bits", "there %", "there and back %"),
        [
            [s["hidden"], s["dtype"], s["plain"], s["int8"], 100 * s["there"],
             100 * s["there_and_back"]]
            for s in sizes
        ],
    )  # fmt: skip
    print_table(
        "Every row rounded",
        ("bits/byte", "without", "worse by %", "KL bits", "same token", "error", "bound"),
        [
            [
                f"{found['bits_per_byte']:.4f}", f"{found['without']:.4f}",
                f"{100 * found['worse']:.3f}", f"{found['kl_bits']:.6f}",
                f"{found['same_token']:.4f}", f"{found['error']:.5f}", f"{BOUND:.5f}",
            ]
        ],
    )  # fmt: skip
    print_json({**facts, "bytes": sizes, "cost": found, "bound": BOUND})


if __name__ == "__main__":
    main()
