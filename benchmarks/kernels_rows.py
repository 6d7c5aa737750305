"""How fast few rows read a matrix on bit planes, for benchmarks/kernels.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import take_turns
from benchmarks.kernel_layers import random_matrix
from kernels import PlaneMatrix, linear_forward
from kernels.planes import PREFIX_BITS, num_planes

ROWS = (1, 2, 3, 4, 6, 8)
SIZE, COPIES = 4096, 12  # 16 MB at 8 bits; together beyond every cache


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


def _multiply(x: Tensor, matrices: list[PlaneMatrix], call: int) -> Tensor:
    return linear_forward(x, matrices[call % len(matrices)])


def _bytes(matrix: PlaneMatrix) -> int:
    return sum(blob.numel() * blob.element_size() for blob in (*matrix.planes, matrix.scales))
