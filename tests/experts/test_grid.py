"""Weights on a grid come back to the last bit; others as `kernels.planes.quantize` has them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experts.grid import quantize_exactly
from kernels import planes
from kernels.planes import ZERO_CODE

SEEDS = st.integers(0, 2**32)


def value(codes: Tensor, scales: Tensor, group_size: int) -> Tensor:
    spread = scales.float().repeat_interleave(group_size, -1)[..., : codes.shape[-1]]
    return (codes.float() - ZERO_CODE) * spread


@given(
    seed=SEEDS,
    low=st.integers(-16, 0),
    high=st.integers(0, 16),
    rows=st.integers(1, 5),
    columns=st.integers(1, 200),
    group_size=st.sampled_from(planes.GROUP_SIZES),
)
def test_multiples_of_a_float16_are_exact(
    seed: int, low: int, high: int, rows: int, columns: int, group_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group_size)
    multiples = torch.randint(low, high + 1, (rows, columns), generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.1 + 0.01).half()
    weight = value(multiples + ZERO_CODE, scales, group_size)
    codes, found = quantize_exactly(weight, group_size)
    assert torch.equal(value(codes, found, group_size), weight)
    largest = (codes.int() - ZERO_CODE).abs().amax(-1)
    assert ((largest >= 60) | (weight.abs().amax(-1) == 0)).all()  # the high bits are in use


@given(seed=SEEDS, group_size=st.sampled_from(planes.GROUP_SIZES), flip=st.booleans())
def test_integers_of_four_bits_are_exact_in_four_bits(
    seed: int, group_size: int, flip: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    low = int(torch.randint(-8, 8, (), generator=generator))
    codes = torch.randint(low, 8, (5, 130), generator=generator) * (-1 if flip else 1)
    scales = (torch.rand(5, -(-130 // group_size), generator=generator) * 0.1 + 0.01).half()
    weight = value(codes + ZERO_CODE, scales, group_size)
    layout = planes.PlaneLayout(5, 130, group_size)
    found, fine = quantize_exactly(weight, group_size)
    prefix = planes.pack(found, layout)[: planes.num_planes(4)]
    assert torch.equal(planes.dequantize(prefix, planes.pack_scales(fine, layout), layout), weight)


@given(seed=SEEDS, exponents=st.tuples(st.integers(-14, 5), st.integers(-14, 5)))
def test_mxfp4_is_exact(seed: int, exponents: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    fp4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signs = torch.randint(2, (2, 64), generator=generator) * 2 - 1
    numbers = fp4[torch.randint(8, (2, 64), generator=generator)] * signs
    weight = numbers * torch.exp2(torch.tensor(exponents).float()).repeat_interleave(32)
    codes, scales = quantize_exactly(weight.bfloat16(), 32)
    assert torch.equal(value(codes, scales, 32), weight)


@given(seed=SEEDS, group_size=st.sampled_from(planes.GROUP_SIZES))
def test_other_weights_are_quantized_as_ever(seed: int, group_size: int) -> None:
    weight = torch.randn(3, 4, 100, generator=torch.Generator().manual_seed(seed))
    ours, theirs = quantize_exactly(weight, group_size), planes.quantize(weight, group_size)
    assert all(map(torch.equal, ours, theirs))


def test_groups_on_the_grid_and_others_in_one_matrix() -> None:
    weight = torch.randn(40, 128)
    weight[:, :64] = torch.randint(-8, 8, (40, 64)) * 0.125
    codes, scales = quantize_exactly(weight, 64)
    back, other = value(codes, scales, 64), value(*planes.quantize(weight, 64), 64)
    assert torch.equal(back[:, :64], weight[:, :64])
    assert torch.equal(back[:, 64:], other[:, 64:])
