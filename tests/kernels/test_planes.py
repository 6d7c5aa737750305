"""The plane format: exact reassembly, the stated layout, and the quality of every prefix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from kernels.planes import (
    PLANE_BITS,
    PREFIX_BITS,
    PlaneLayout,
    dequantize,
    num_planes,
    pack,
    pack_scales,
    quantize,
    unpack,
    unpack_scales,
)

layouts = st.builds(PlaneLayout, st.integers(1, 40), st.integers(1, 150), st.sampled_from([32, 64]))


def random_codes(layout: PlaneLayout, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, layout.rows, layout.columns)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@given(layouts, st.integers(0, 99))
def test_all_planes_give_the_codes_back_and_a_prefix_their_first_bits(
    layout: PlaneLayout, seed: int
) -> None:
    codes = random_codes(layout, seed)
    planes = pack(codes, layout)
    assert [plane.shape for plane in planes] == [(2, layout.plane_bytes(p)) for p in range(4)]
    assert torch.equal(unpack(planes, layout), codes)
    for bits in (2, 3, 4):
        centred = (codes >> (8 - bits) << (8 - bits)) | 1 << (7 - bits)
        assert torch.equal(unpack(planes[: num_planes(bits)], layout), centred)


def test_all_256_codes_at_every_prefix() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    layout = PlaneLayout(4, 64)
    packed = pack(codes, layout)
    for bits in PREFIX_BITS:
        step = 2 ** (8 - bits)
        middle = codes.int() // step * step + step // 2
        assert torch.equal(unpack(packed[: num_planes(bits)], layout).int(), middle)


@given(layouts, st.integers(0, 99))
def test_planes_lie_as_the_prologue_says(layout: PlaneLayout, seed: int) -> None:
    """An independent walk over the bytes, one code at a time."""
    codes = random_codes(layout, seed)[0]
    planes = [plane.numpy() for plane in pack(codes, layout)]
    steps = layout.padded_columns // 4
    rng = np.random.default_rng(seed)
    for _ in range(20):
        row, column = int(rng.integers(layout.rows)), int(rng.integers(layout.columns))
        block, lane = divmod(row, 16)
        step, part = divmod(column, 4)
        byte, code = lane * 4 + part, int(codes[row, column])
        two = (block * steps + step) // 4 * 64 + byte
        assert planes[0][two] >> (6 - 2 * (step % 4)) & 3 == code >> 6
        eight = (block * steps + step) // 8 * 64 + byte
        bit = (7, 5, 3, 1, 6, 4, 2, 0)[step % 8]
        assert planes[1][eight] >> bit & 1 == code >> 5 & 1
        assert planes[2][eight] >> bit & 1 == code >> 4 & 1
        four = (block * steps + step) // 2 * 64 + byte
        assert planes[3][four] >> 4 * (step % 2) & 15 == code & 15


@given(layouts, st.integers(0, 99))
def test_scales_come_back(layout: PlaneLayout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(3, layout.rows, layout.num_groups, generator=generator).half()
    packed = pack_scales(scales, layout)
    assert packed.shape == (3, layout.num_scales)
    assert torch.equal(unpack_scales(packed, layout), scales)


@given(layouts, st.integers(0, 99), st.floats(-8, 3))
def test_eight_bits_are_within_half_a_step(layout: PlaneLayout, seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(layout.rows, layout.columns, generator=generator) * 10**exponent
    codes, scales = quantize(weight, layout.group_size)
    restored = dequantize(pack(codes, layout), pack_scales(scales, layout), layout)
    step = scales.float().abs().repeat_interleave(layout.group_size, -1)[:, : layout.columns]
    assert bool(((restored - weight).abs() <= 0.5001 * step).all())


@given(layouts, st.integers(0, 99))
def test_four_bits_are_a_signed_integer_rounded_to_nearest(layout: PlaneLayout, seed: int) -> None:
    weight = torch.randn(layout.rows, layout.columns, generator=torch.Generator().manual_seed(seed))
    weight[weight.abs() < 0.3] = 0
    largest = pad(weight, (0, -layout.columns % layout.group_size))
    largest = largest.unflatten(-1, (-1, layout.group_size)).abs().amax(-1)
    codes, scales = quantize(weight, layout.group_size)
    restored = dequantize(pack(codes, layout)[: num_planes(4)], pack_scales(scales, layout), layout)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.float().repeat_interleave(layout.group_size, -1)[:, : layout.columns]

    step = 16 * spread(scales)
    assert bool((restored[weight == 0] == 0).all())
    # twice rounded: to 8 bits, then to 4
    assert bool(((restored - weight).abs() <= (0.5 + 0.5 / 16 + 1e-4) * step.abs()).all())
    number = (restored / step).nan_to_num()
    assert bool((number % 1 == 0).all())
    extreme = weight.abs() == spread(largest)
    assert set(number[extreme & (weight != 0)].tolist()) <= {-8, -7, 7}


# Gaussian weights, group 32: SQNR in dB of the centred prefix (9.0, 21.0 and
# 45.4 for codes around 128) and of weights rounded to nearest at that width on their own.
@pytest.mark.parametrize(
    ("bits", "centred", "alone"),
    [(2, 9.04, 3.64), (3, 15.14, 12.9), (4, 21.19, 20.26), (8, 45.32, 0)],
)
def test_a_centred_prefix_is_as_good_as_published(bits: int, centred: float, alone: float) -> None:
    layout = PlaneLayout(256, 4096, 32)
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(weight, 32)
    planes = pack(codes, layout)[: num_planes(bits)]
    error = dequantize(planes, pack_scales(scales, layout), layout) - weight
    sqnr = 10 * torch.log10(weight.square().mean() / error.square().mean())
    assert float(sqnr) == pytest.approx(centred, abs=0.05)
    assert float(sqnr) > alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e7])
def test_weights_without_a_scale_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and below"):
        quantize(torch.tensor([[1.0, bad]]), 32)


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="group size must be 32 or 64, got 48"):
        PlaneLayout(16, 64, 48)
    with pytest.raises(ValueError, match="at least one row and column, got 0x4"):
        PlaneLayout(0, 4)
    with pytest.raises(ValueError, match="2, 3, 4 or 8 bits, got 5"):
        num_planes(5)


def test_widths_add_up() -> None:
    assert tuple(sum(PLANE_BITS[: n + 1]) for n in range(4)) == PREFIX_BITS
