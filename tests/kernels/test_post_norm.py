"""Norms of experts' rows are recognised by trying them, and run as part of a compiled layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from kernels.cpu import choose_kernel
from kernels.cpu.post_norm import PostNorm, recognise_norm
from tests.kernels.kernel_cases import make_case
from tests.kernels.plane_cases import make_layer

SIZES, EPSILONS = st.sampled_from([1, 3, 16, 50]), st.sampled_from([0.0, 1e-12, 1e-6, 1e-5, 1e-2])


def norm(size: int, eps: float, before: bool, seed: int) -> PostNorm:
    generator = torch.Generator().manual_seed(seed)
    weight, ones = torch.randn(size, generator=generator), torch.ones(size)
    return PostNorm(weight, ones, eps) if before else PostNorm(None, weight, eps)


@given(SIZES, EPSILONS, st.booleans(), st.integers(0, 2**31), st.integers(-6, 4))
def test_norms_are_found_with_their_numbers(
    size: int, eps: float, before: bool, seed: int, level: int
) -> None:
    own = norm(size, eps, before, seed)
    found = recognise_norm(own, size)
    assert found is not None
    rows = torch.randn(9, size, generator=torch.Generator().manual_seed(seed + 1)) * 10.0**level
    expected = own(rows)
    largest = expected.abs().amax(1, True)
    assert ((found(rows) - expected).abs() <= 2e-5 * largest).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows,
        torch.tanh,
        torch.zeros_like,
        lambda rows: layer_norm(rows, (8,)),
        lambda rows: rms_norm(rows, (8,), eps=1e-6).bfloat16(),
        lambda rows: rms_norm(rows, (8,), eps=1e-6)[:, :7],
        lambda rows: rms_norm(rows, (8,), eps=1e-6) + 0.1,
        lambda rows: rows / (rows.abs().mean(1, keepdim=True) + 1e-6),
    ],
)
def test_anything_else_is_left_to_torch(function: Callable[[Tensor], Tensor]) -> None:
    assert recognise_norm(function, 8) is None


@pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("planes", [False, True])
def test_a_layer_with_a_norm_is_one_call(before: bool, planes: bool) -> None:
    """Beside the same layer, whose norm is not known as its first two calls give something else."""
    kernel, _ = choose_kernel()
    assert kernel is not None
    own, calls = norm(48, 1e-3, before, 7), list[int]()

    def unknown(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return own(rows) * (1.0 if len(calls) > 2 else float("nan"))

    make: Callable[..., Any] = make_layer if planes else make_case
    hidden, ids, weights, experts = make(20, 4, 2, hidden=48, width=40).arguments
    inside, outside = (replace(experts, post_norm=each) for each in (own, unknown))
    assert kernel.layer_call(hidden, inside) is not None
    assert kernel.layer_call(hidden, outside) is None
    actual = kernel.experts_forward(hidden, ids, weights, inside)
    expected = kernel.experts_forward(hidden, ids, weights, outside)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    alone = kernel.experts_forward(hidden[:1], ids[:1], weights[:1], inside)
    assert torch.equal(alone, actual[:1])
