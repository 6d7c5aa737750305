"""Compensated codes: never worse than plain rounding, close to the best there is, and nested."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.compress.gptq import (
    Moments,
    cell,
    compensate,
    damped,
    nearest,
    spread,
)
from kernels.planes import ZERO_CODE, quantize

GROUP = 32


def case(seed: int, rows: int, columns: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, moments of inputs that move together, and scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, rows, columns, generator=generator)
    mixing = torch.randn(2, columns, columns, generator=generator)
    inputs = torch.randn(2, tokens, columns, generator=generator) @ mixing
    return weight, inputs.transpose(1, 2) @ inputs, quantize(weight, GROUP)[1]


def value(codes: Tensor, bits: int, scales: Tensor) -> Tensor:
    """Weights that a prefix of codes stands for."""
    step = 2 ** (8 - bits)
    centre = codes.float() if step == 1 else (codes.float() // step) * step + step / 2
    return (centre - ZERO_CODE) * spread(scales, GROUP, codes.shape[-1])


def weighted_error(error_XNK: Tensor, moment_XKK: Tensor) -> Tensor:
    """Squared output error of each row, summed over the inputs."""
    return (error_XNK @ moment_XKK * error_XNK).sum(-1)


def rounded(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes of plain rounding at that width alone."""
    return nearest(weight / spread(scales, GROUP, weight.shape[-1]) + ZERO_CODE, bits)


@given(
    seed=st.integers(0, 2**31),
    columns=st.sampled_from([5, 32, 70, 130]),
    tokens=st.sampled_from([1, 8, 200]),
    bits=st.sampled_from([2, 3, 4, 8]),
)
def test_never_worse_than_rounding(seed: int, columns: int, tokens: int, bits: int) -> None:
    weight, moment, scales = case(seed, 4, columns, tokens)
    codes = compensate(weight, Moments.of(moment), scales, GROUP, [bits])
    plain = rounded(weight, scales, bits)
    lost, lost_plain = (
        weighted_error(value(own, bits, scales) - weight, moment) for own in (codes, plain)
    )
    assert bool((lost <= lost_plain * (1 + 1e-4) + 1e-4).all())


def test_it_loses_much_less_where_inputs_move_together() -> None:
    weight, moment, scales = case(0, 64, 96, 4000)
    codes = compensate(weight, Moments.of(moment), scales, GROUP, [2])
    plain = rounded(weight, scales, 2)
    lost, lost_plain = (
        weighted_error(value(own, 2, scales) - weight, moment).sum() for own in (codes, plain)
    )
    assert lost < 0.7 * lost_plain


@pytest.mark.parametrize("seed", range(8))
def test_it_is_close_to_the_best_of_all_codes(seed: int) -> None:
    """Brute force over the four values of each of five weights."""
    weight, moment, scales = case(seed, 1, 5, 20)
    codes = compensate(weight, Moments.of(moment), scales, GROUP, [2])
    centres = torch.tensor(list(product([32.0, 96.0, 160.0, 224.0], repeat=5)))
    every = (centres - ZERO_CODE)[None] * spread(scales, GROUP, 5)
    lost = weighted_error(every - weight, moment)
    best, worst = lost.amin(1), lost.amax(1)
    got = weighted_error(value(codes, 2, scales) - weight, moment)[:, 0]
    assert bool((got <= best + 0.05 * (worst - best)).all())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [8, 400])
def test_every_prefix_of_nested_codes_is_good(seed: int, tokens: int) -> None:
    """Each finer one loses less, and the coarsest less than plain rounding."""
    weight, moment, scales = case(seed, 4, 70, tokens)
    codes = compensate(weight, Moments.of(moment), scales, GROUP, [2, 3, 4, 8])
    lost = [
        weighted_error(value(codes, bits, scales) - weight, moment).sum() for bits in (2, 3, 4, 8)
    ]
    assert lost[0] > lost[1] > lost[2] > lost[3]
    plain = value(rounded(weight, scales, 2), 2, scales)
    assert lost[0] < weighted_error(plain - weight, moment).sum()


def test_without_inputs_it_is_plain_rounding() -> None:
    weight, moment, scales = case(1, 4, 70, 8)
    codes = compensate(weight, Moments.of(torch.zeros_like(moment)), scales, GROUP, [8])
    assert torch.equal(codes, quantize(weight, GROUP)[0])


@given(st.floats(0, 255.9), st.sampled_from([2, 3, 4, 8]))
def test_the_nearest_centre(position: float, bits: int) -> None:
    step = 2 ** (8 - bits)
    centres = torch.arange(2**bits) * step + (step / 2 if step > 1 else 0)
    centres = centres.float()
    got = nearest(torch.tensor(position), bits)
    assert (centres - position).abs().min() == (got - position).abs()
    low, high = cell(got, bits)
    assert low <= got <= high
    assert high - low == step - 1


def test_damping_makes_moments_of_few_inputs_invertible() -> None:
    one = torch.ones(1, 3, 3)
    assert torch.linalg.cholesky(damped(one)).isfinite().all()
    assert torch.equal(damped(torch.zeros(1, 3, 3)), torch.eye(3)[None])


def test_weights_on_a_grid_that_the_bits_have_stay_as_they_are() -> None:
    weight, moment, scales = case(3, 4, 96, 200)
    coarse = rounded(weight, scales, 4)
    own = value(coarse, 4, scales)
    codes = compensate(own, Moments.of(moment), scales, GROUP, [2, 4])
    assert not torch.equal(value(codes, 2, scales), value(coarse, 2, scales))
    assert torch.equal(compensate(own, Moments.of(moment), scales, GROUP, [4]), coarse.byte())
