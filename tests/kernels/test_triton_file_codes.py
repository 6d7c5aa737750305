"""Codes, scales and offsets that a file had quantised, on CUDA devices: kept as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import kernels
from experts.weights import dequantize_experts
from kernels.planes import PlaneFormat
from kernels.triton import experts as triton_experts
from kernels.triton.experts import experts_forward, linear_forward, supports_matrix
from kernels.triton.language import INTERPRETED
from tests.kernels.file_cases import first_planes, make_file_layer, make_file_matrix

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
CUDA = torch.device("cuda")
FORMATS = {
    "Q2_K": PlaneFormat(16, 2, "super-nibbles"),
    "Q3_K": PlaneFormat(16, 3, "super"),
    "Q4_K": PlaneFormat(32, 4, "super-offset"),
    "Q5_1": PlaneFormat(32, 5, "offset"),
    "Q6_K": PlaneFormat(16, 6, "super"),
    "Q8_0": PlaneFormat(32, 8, "centred"),
    "AWQ": PlaneFormat(128, 4, "offset"),
    "GPTQ, groups of 64": PlaneFormat(64, 8, "offset"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("panels", [False, True])
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


@pytest.mark.parametrize("panels", [False, True])
def test_experts_of_two_formats(panels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both projections have a format of their own, and one expert has fewer planes."""
    monkeypatch.setattr(triton_experts, "_PANEL_ROWS", 1 if panels else 64)
    layer = make_file_layer(FORMATS["Q4_K"], FORMATS["Q6_K"], hidden=80, width=48).experts
    coarse = layer.planes[0][:1], *layer.planes[1:]
    hidden, ids = torch.randn(5, 80), torch.tensor([[0, 1], [2, 0], [1, -1], [2, 1], [0, 2]])
    weights = torch.rand(5, 2)
    for own in (layer, replace(layer, planes=coarse)):
        expected = kernels.reference.experts_forward(hidden, ids, weights, dequantize_experts(own))
        found = experts_forward(hidden, ids, weights, own.for_device(CUDA))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_slots_are_arranged_where_they_lie() -> None:
    """Plane 1 of the blob joins planes of other widths."""
    layer = make_file_layer(FORMATS["Q5_1"], FORMATS["Q6_K"], hidden=64, width=32).experts
    here = [plane.clone() for plane in layer.planes[1]]
    kernels.arrange_for_cuda(here, layer.layouts)
    made = layer.for_device(CUDA)
    assert all(map(torch.equal, here, made.planes[1]))
    back = made.for_device(torch.device("cpu"))
    assert all(map(torch.equal, back.planes[1], layer.planes[1]))
