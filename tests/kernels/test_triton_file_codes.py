"""Codes, scales and offsets that a file had quantised, on CUDA devices: kept as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import kernels
from experts.weights import dequantize_experts
from kernels import PlaneMatrix
from kernels.planes import PlaneLayout, float_values
from kernels.scales import GroupScales
from kernels.triton import experts as triton_experts
from kernels.triton.codes import float_numbers, in_order, load_words
from kernels.triton.experts import experts_forward, linear_forward, supports_matrix
from kernels.triton.language import INTERPRETED
from tests.amounts import deep_except
from tests.kernels.file_cases import FILE_FORMATS as FORMATS
from tests.kernels.file_cases import (
    first_planes,
    make_file_layer,
    make_file_matrix,
    small_floats,
)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("panels", deep_except([True], [False, True]))
def test_linear_layers(name: str, panels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every prefix, multiplied as they are and, for prompts, dequantised first."""
    monkeypatch.setattr(triton_experts, "_PANEL_ROWS", 1 if panels else 64)
    matrix, own = make_file_matrix(40, 300, FORMATS[name], np.random.default_rng(3))
    x = torch.randn(3, 300)
    for planes in range(1, len(matrix.planes) + 1):
        here = first_planes(matrix, planes).for_device(CUDA)
        assert supports_matrix(x, here)
        expected = x.double() @ torch.from_numpy(own.at(FORMATS[name], planes)).T
        found = linear_forward(x, here).double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@triton.jit
def numbers_kernel(  # type: ignore[no-untyped-def]
    plane, output, BITS: tl.constexpr, COMPUTE: tl.constexpr
):
    unit = tl.program_id(0) + tl.zeros((1,), tl.int32)
    words = load_words(plane, unit * 2, unit >= 0, BITS, False, False)
    for T in tl.static_range(2):
        numbers = in_order(float_numbers(words, T, BITS, COMPUTE))
        columns = (unit * 64 + T * 32)[:, None, None] + tl.arange(0, 32)[None, None, :]
        tl.store(output + tl.arange(0, 16)[None, :, None] * 256 + columns, numbers)


@pytest.mark.parametrize("name", ["FP8", "MXFP4"])
def test_every_code_is_the_number_it_stands_for(name: str) -> None:
    """Those below the least exponent, too; in float32, whose bits go by those of bf16, and in
    float16."""
    size, bits, kind = own = FORMATS[name]
    codes = torch.arange(2**bits, dtype=torch.uint8).repeat(16, 256 // 2**bits)
    codes[(codes & 127) == 127] = 0  # NaN in 8 bits
    one = torch.full((16, 256 // size), 127 if kind == "mxfp4" else 1.0)
    matrix = PlaneMatrix.of_file(codes, GroupScales(one), PlaneLayout(16, 256, *own))
    matrix = matrix.for_device(CUDA)
    fields = (4, 3) if kind == "fp8" else (2, 1)
    expected = torch.from_numpy(small_floats(codes.numpy(), *fields))
    assert torch.equal(float_values(codes, kind).double(), expected)
    assert torch.equal(linear_forward(torch.eye(256), matrix).T.double(), expected)
    halves = torch.empty(16, 256, dtype=torch.float16)
    numbers_kernel[(4,)](matrix.planes[0].view(torch.uint32), halves, bits, tl.float16)
    assert torch.equal(halves.double(), expected)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("first", "second"), deep_except([("FP8", "MXFP4")], [("Q4_K", "Q6_K"), ("FP8", "MXFP4")])
)
@pytest.mark.parametrize("panels", deep_except([False], [False, True]))
def test_experts_of_two_formats(
    panels: bool, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both projections have a format of their own, and one expert has fewer planes."""
    monkeypatch.setattr(triton_experts, "_PANEL_ROWS", 1 if panels else 64)
    layer = make_file_layer(FORMATS[first], FORMATS[second], hidden=80, width=48).experts
    coarse = layer.planes[0][:1], *layer.planes[1:]
    hidden, ids = torch.randn(5, 80), torch.tensor([[0, 1], [2, 0], [1, -1], [2, 1], [0, 2]])
    weights = torch.rand(5, 2)
    for own in (layer, replace(layer, planes=coarse)):
        expected = kernels.reference.experts_forward(hidden, ids, weights, dequantize_experts(own))
        found = experts_forward(hidden, ids, weights, own.for_device(CUDA))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("first", "second"), [("Q5_1", "Q6_K"), ("FP8", "MXFP4")])
def test_planes_are_arranged_where_they_lie(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planes of the blob join planes of other widths. By the kernel and by torch."""
    layer = make_file_layer(FORMATS[first], FORMATS[second], hidden=64, width=32).experts
    made = layer.for_device(CUDA)
    for arrange in (triton_experts.arrange_in_place, kernels.arrange_for_cuda):
        here = replace(layer, planes=tuple(tuple(x.clone() for x in own) for own in layer.planes))
        assert arrange(here, [1]) is not False
        half = layer.planes[0], made.planes[1], layer.planes[2]
        for found, after in zip(here.planes, half, strict=True):
            assert all(map(torch.equal, found, after))
    back = made.for_device(torch.device("cpu"))
    assert all(map(torch.equal, back.planes[1], layer.planes[1]))
    assert kernels.arrange_experts(layer) is layer
    monkeypatch.setattr(kernels, "arrangement_for", lambda _: "cuda")
    whole = kernels.arrange_experts(layer)
    assert (whole.first, whole.second) == (made.first, made.second)
    for own, before, expected in zip(whole.planes, layer.planes, made.planes, strict=True):
        assert [x.data_ptr() for x in own] == [x.data_ptr() for x in before]
        assert all(map(torch.equal, own, expected))
    assert kernels.arrange_experts(whole) is whole
