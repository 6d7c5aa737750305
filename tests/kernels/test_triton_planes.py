"""Bit planes arranged for CUDA devices: the arrangement, panels for prompts, and split sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels
from kernels.planes import PLANE_BITS, PREFIX_BITS, PlaneLayout, arranged, dequantize, pack, unpack
from kernels.triton import experts as triton_experts
from kernels.triton import planes as triton_planes
from kernels.triton.experts import experts_forward, linear_forward
from kernels.triton.language import INTERPRETED
from kernels.triton.planes import arrange, splits
from kernels.triton.tiles import PLANES
from tests.kernels.dequantized_cases import quantize_case
from tests.kernels.kernel_cases import assert_close, make_case
from tests.kernels.plane_cases import quantize_matrix

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("group_size", [32, 64])
def test_each_bit_lies_where_the_format_says(group_size: int) -> None:
    layout = PlaneLayout(20, 100, group_size, arrangement="cuda")
    codes = torch.randint(0, 256, (20, 100), dtype=torch.uint8)
    chunks, low = layout.padded_columns // 32, 8
    for plane, bits in zip(pack(codes, layout), PLANE_BITS, strict=True):
        low -= bits
        words = plane.view(torch.int32).tolist()
        for row in (0, 7, 15, 19):
            for column in range(100):
                p, u, h = column % 32 // 8, column % 8 // 2, column % 2
                q, c = row % 8, row % 16 // 8
                pair = (row // 16 * chunks + column // 32) * 8 + q
                own, more = {1: (u // 2, u % 2 + 2 * c), 2: (u, 2 * c), 4: (2 * u + c, 0)}[bits]
                found = words[pair * 2 * bits + own] >> (4 * p + 16 * h + more) & (2**bits - 1)
                assert found == int(codes[row, column]) >> low & (2**bits - 1)


@pytest.mark.parametrize("bits", PREFIX_BITS)
def test_both_arrangements_hold_the_same_prefixes(bits: int) -> None:
    layout = PlaneLayout(33, 70, 32)
    codes = torch.randint(0, 256, (2, 33, 70), dtype=torch.uint8)
    count = PREFIX_BITS.index(bits) + 1
    cpu, cuda = (
        pack(codes, layout)[:count],
        pack(codes, replace(layout, arrangement="cuda"))[:count],
    )
    assert all(map(torch.equal, arranged(cpu, [layout], "cuda"), cuda))
    assert all(map(torch.equal, arranged(cuda, [layout], "cpu"), cpu))
    assert torch.equal(unpack(cuda, replace(layout, arrangement="cuda")), unpack(cpu, layout))


def test_the_kernel_arranges_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PlaneLayout(48, 96, 32)
    planes = pack(torch.randint(0, 256, (48, 96), dtype=torch.uint8), layout)
    made = arranged(planes, [layout], "cuda")
    for plane, bits, expected in zip(planes, PLANE_BITS, made, strict=True):
        target = torch.empty_like(plane)
        arrange(plane, target, bits)
        assert torch.equal(target, expected)
    here = [plane.clone() for plane in planes]
    kernels.arrange_for_cuda(here[:3], [layout])
    assert all(map(torch.equal, here, (*made[:3], planes[3])))


def test_a_reference_reads_what_is_arranged_for_cuda() -> None:
    """Where Triton cannot run: the same bits."""
    matrix = quantize_matrix(torch.randn(20, 70), 32)
    x = torch.randn(3, 70)
    expected = kernels.reference.linear_forward(x, matrix)
    assert torch.equal(kernels.linear_forward(x, matrix.for_device(CUDA)), expected)
    assert matrix.for_device(CUDA).for_device(torch.device("cpu")).layout == matrix.layout
    ids = torch.tensor([19, 0, 7])
    rows = kernels.matrix_rows(ids, matrix.for_device(CUDA))
    assert torch.equal(rows, kernels.matrix_rows(ids, matrix))


@pytest.mark.parametrize("bits", [(4, 4, 4), (8, 2, 3)])
@pytest.mark.parametrize("activation", ["clamped interleaved gate", "squared relu, no gate"])
def test_prompts_read_panels(
    bits: tuple[int, ...], activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantised first, one or two experts at a time: right with biases, unused slots, and ids."""
    monkeypatch.setattr(triton_experts, "_PANEL_ROWS", 4)
    monkeypatch.setattr(triton_experts, "PANEL_BYTES", 2 * 24 * 40 * 2)
    case = make_case(
        16, 3, 2, 40, 24, torch.bfloat16, activation=activation, biased=True, unused=0.3
    )
    layer, whole = quantize_case(case, 32, bits, "interleaved" in activation)
    called: list[int] = []
    true = triton_planes.dequantized

    def dequantized(*arguments: object, **named: object) -> torch.Tensor:
        called.append(1)
        return true(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_experts, "dequantized", dequantized)
    actual = experts_forward(case.hidden, case.ids, case.weights, layer.for_device(CUDA))
    assert_close(actual, whole)
    assert len(called) > 2


def test_linear_layers_of_prompts_read_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "_PANEL_ROWS", 4)
    monkeypatch.setattr(triton_experts, "PANEL_BYTES", 4 * 70 * 20)
    bias = torch.randn(50)
    matrix = quantize_matrix(torch.randn(50, 70), 32, bias).for_device(CUDA)
    x = torch.randn(5, 70)
    expected = x @ dequantize(matrix.planes, matrix.scales, matrix.layout).T + bias
    torch.testing.assert_close(linear_forward(x, matrix), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tile", PLANES)
def test_split_sums_have_the_same_bits_in_one_program(
    tile: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PlaneLayout(20, 32 * 33 - 5, 32)
    assert splits(layout) == (4, 9)
    matrix = quantize_matrix(torch.randn(20, layout.columns), 32).for_device(CUDA)
    x = torch.randn(3, layout.columns)
    monkeypatch.setattr(triton_experts, "PLANES", (tile,))
    apart = linear_forward(x, matrix)
    monkeypatch.setattr(triton_planes, "_SPLIT_BYTES", 0)
    assert torch.equal(linear_forward(x, matrix), apart)
    expected = x.double() @ dequantize(matrix.planes, matrix.scales, matrix.layout).double().T
    torch.testing.assert_close(apart.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(768, 2048, (4, 8)), (2048, 768, (1, 12)), (151936, 2048, (1, 32)), (4096, 4096, (4, 16))],
)
def test_the_matrix_alone_decides_the_splits(
    rows: int, columns: int, expected: tuple[int, int]
) -> None:
    assert splits(PlaneLayout(rows, columns)) == expected
