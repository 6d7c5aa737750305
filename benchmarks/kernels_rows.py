"""Few rows on bit planes: how fast they read a matrix, and what it costs not to round them.

    python -m benchmarks.kernels_rows [--quick]

The first table is part of benchmarks/kernels.py, too. The second one has experts of the 30B shape,
each with so many rows: `row_bits` 24 keeps activations, as ``offload.late: host`` does; 8 rounds
them, as ``host_int8`` and models on a CPU do. Its errors are the largest of an expert's output,
of the largest output, against float64; bf16 is what rounding activations to bf16 alone does. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table, take_turns
from benchmarks.kernel_layers import SIZES, random_experts, random_matrix
from kernels import PlaneMatrix, QuantizedExperts, backend_status, experts_forward, linear_forward
from kernels.planes import PREFIX_BITS, dequantize, num_planes

ROWS = (1, 2, 3, 4, 6, 8)
SIZE, COPIES = 4096, 12  # 16 MB at 8 bits; together beyond every cache
ROWS_OF_EXPERTS = (1, 2, 4, 8, 16, 64)


def few_rows(seconds: float) -> dict[str, dict[str, float]]:
    """GB/s of weights, by rows of activations and bits; matrices take turns, and so do bits."""
    whole = [random_matrix(SIZE) for _ in range(COPIES)]
    kinds = {
        bits: [replace(matrix, planes=matrix.planes[: num_planes(bits)]) for matrix in whole]
        for bits in PREFIX_BITS[::-1]
    }
    found = {}
    for rows in ROWS:
        x = torch.randn(rows, SIZE)
        calls = {str(bits): partial(_multiply, x, own) for bits, own in kinds.items()}
        medians = take_turns(calls, seconds)
        found[str(rows)] = {
            str(bits): round(_bytes(own[0]) / medians[str(bits)] / 1e9, 2)
            for bits, own in kinds.items()
        }
    return found


def kept_rows(seconds: float) -> list[dict[str, Any]]:
    """Microseconds an expert, by its bits, its rows and the bits of an activation."""
    size = replace(SIZES[1], experts=64)
    whole, found = random_experts(size), []
    for bits in (8, 4):
        rounded = whole.at_most(bits)
        kinds = {"8": rounded, "24": replace(rounded, row_bits=24)}
        for rows in ROWS_OF_EXPERTS:
            ids = torch.arange(size.experts).repeat_interleave(rows)[:, None]
            given = torch.randn(len(ids), size.hidden), ids, torch.ones(ids.shape)

            calls = {name: partial(_experts, given, kind) for name, kind in kinds.items()}
            medians = take_turns(calls, seconds)
            each = {name: 1e6 * median / size.experts for name, median in medians.items()}
            found.append({"bits": bits, "rows": rows, "us": each})
    return found


def errors() -> dict[str, float]:
    """Of activations of so many bits."""
    experts = random_experts(replace(SIZES[1], experts=1))
    matrices = [dequantize(m.planes, m.scales, m.layout).double().T for m in experts.matrices(0)]
    gate, up, down = matrices
    hidden = torch.randn(64, experts.hidden_size).bfloat16().float()

    def output(rounded: Callable[[Tensor], Tensor]) -> Tensor:
        rows = hidden.double()
        return rounded(torch.nn.functional.silu(rows @ gate) * (rows @ up)) @ down

    exact, ids = output(lambda inner: inner), torch.zeros(64, 1, dtype=torch.int64)
    made = {
        str(bits): experts_forward(hidden, ids, torch.ones(64, 1), replace(experts, row_bits=bits))
        for bits in (8, 24)
    }
    made["bf16"] = output(lambda inner: inner.bfloat16().double())
    return {
        name: float((own - exact).abs().max() / exact.abs().max()) for name, own in made.items()
    }


def _multiply(x: Tensor, matrices: list[PlaneMatrix], call: int) -> Tensor:
    return linear_forward(x, matrices[call % len(matrices)])


def _experts(given: tuple[Tensor, Tensor, Tensor], experts: QuantizedExperts, _: int) -> Tensor:
    return experts_forward(*given, experts)


def _bytes(matrix: PlaneMatrix) -> int:
    return sum(blob.numel() * blob.element_size() for blob in (*matrix.planes, matrix.scales))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    seconds = 0.3 if parser.parse_args().quick else 3.0
    torch.manual_seed(0)
    header = environment() | {"kernel": backend_status()["name"]}
    print_header(header)
    rows, kept, off = few_rows(seconds), kept_rows(seconds), errors()
    print_table(
        "One matrix, GB/s of weights (median)",
        ("rows", *(f"{bits} bits" for bits in rows["1"])),
        [(count, *by_bits.values()) for count, by_bits in rows.items()],
    )
    print_table(
        "Microseconds an expert (median)",
        ("bits", "rows", "row_bits 8", "row_bits 24", "ratio"),
        [
            (p["bits"], p["rows"], *(f"{p['us'][kind]:.1f}" for kind in ("8", "24")),
             f"{p['us']['24'] / p['us']['8']:.2f}")
            for p in kept
        ],
    )  # fmt: skip
    print_table("Error", ("activations", "error"), [(name, f"{e:.1e}") for name, e in off.items()])
    print_json({"few_rows": rows, "kept_rows": kept, "errors": off, "environment": header})


if __name__ == "__main__":
    main()
