"""The architecture's own activation beside the compiled kernel: recognised, or run in torch.

silu(gate) * up is computed in C++; it is recognised by trying the callable, not by its name.
Anything else (and a post norm) runs in torch, cut into blocks that keep a row's bits the same
whatever other rows are in the call.

Shape legend as in kernels/reference.py; A is the number of slots in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.reference import ExpertWeights

# torch runs an elementwise operation of fewer elements than this on one thread, and whole vectors
# of up to 64 elements at a time: blocks cut so give a row the same bits in any company.
_TORCH_GRAIN = 32768
_TORCH_VECTOR = 64


@torch.no_grad()
def is_silu_gated(experts: ExpertWeights) -> bool:
    """Whether the activation equals silu(gate) * up on concatenated halves, to 1e-6 relative.

    Tried on random rows from small to huge, so that a clamp or another curve shows.
    """
    rows, width = experts.gate_up_EGH.shape[1], experts.intermediate_size
    if rows != 2 * width:
        return False
    # Said in full: the defaults may be another dtype or device just now.
    place: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    scale = torch.logspace(-2, 4, 32, **place)[:, None]
    probe = torch.randn(32, rows, generator=torch.Generator("cpu").manual_seed(0), **place) * scale
    expected = silu(probe[:, :width]) * probe[:, width:]
    actual = experts.activation(probe)
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and torch.allclose(actual, expected, rtol=1e-6, atol=1e-30)
    )


def empty_rows(count: int, width: int) -> Tensor:
    """Uninitialised float32 rows for C++ to fill, whatever torch's defaults are."""
    return torch.empty(count, width, dtype=torch.float32, device="cpu")


def by_blocks(function: Callable[[Tensor], Tensor], rows: Tensor, width: int) -> Tensor:
    """`function(rows)` in float32, in blocks that keep a row's bits free of its company."""
    block = max(1, (_TORCH_GRAIN - 1) // rows.shape[1]) if width % _TORCH_VECTOR == 0 else 1
    output = empty_rows(rows.shape[0], width)
    for begin in range(0, rows.shape[0], block):
        part = rows[begin : begin + block]
        if part.shape[0] == 1 < block:  # views of one row count as contiguous, of several not
            part = part.repeat(2, 1)
        output[begin : begin + block] = function(part)[: rows.shape[0] - begin]
    return output
