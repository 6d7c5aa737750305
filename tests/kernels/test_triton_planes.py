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
from kernels.triton.planes import arrange, parts_of
from kernels.triton.tiles import PLANES, PREFILL_PLANES, PlaneTile
from tests.kernels.dequantized_cases import quantize_case
from tests.kernels.kernel_cases import assert_close, make_case
from tests.kernels.plane_cases import quantize_matrix

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
CUDA = torch.device("cuda")
VARIANTS = (
    *PLANES,
    *PREFILL_PLANES,
    PlaneTile(8, two=True, unroll=3),
    PlaneTile(16, two=True, fetch=True),
)


@pytest.mark.parametrize("columns", [100, 300])
def test_each_bit_lies_where_the_format_says(columns: int) -> None:
    layout = PlaneLayout(20, columns, 32, arrangement="cuda")
    codes = torch.randint(0, 256, (20, columns), dtype=torch.uint8)
    chunks, low = layout.padded_columns // 32, 8
    for plane, bits in zip(pack(codes, layout), PLANE_BITS, strict=True):
        low -= bits
        words = plane.view(torch.int32).tolist()
        for row in (0, 7, 15, 19):
            for column in range(columns):
                t, u, p, h = column // 32 % 2, column % 32 // 8, column % 8 // 2, column % 2
                q, c = row % 8, row % 16 // 8
                begin = (row // 16 * chunks + column // 64 * 2) * 16 * bits
                thread, each = 4 * q + u, bits
                own, more = {1: (0, 2 * c + t), 2: (t, 2 * c), 4: (2 * t + c, 0)}[bits]
                if column // 64 * 2 + 1 == chunks:  # a unit of 32 columns
                    each = bits // 2
                    if bits == 1:
                        thread, each, more = thread // 2, 1, 2 * c + u % 2
                found = words[begin + thread * each + own] >> (4 * p + 16 * h + more)
                assert found & (2**bits - 1) == int(codes[row, column]) >> low & (2**bits - 1)


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


@pytest.mark.parametrize("columns", [32, 64, 160])
def test_the_kernel_arranges_as_torch_does(columns: int) -> None:
    layout = PlaneLayout(48, columns, 32)
    planes = pack(torch.randint(0, 256, (48, columns), dtype=torch.uint8), layout)
    made = arranged(planes, [layout], "cuda")
    for plane, bits, expected in zip(planes, PLANE_BITS, made, strict=True):
        target = torch.empty_like(plane)
        arrange(plane, target, bits, columns // 32)
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


@pytest.mark.parametrize("tile", VARIANTS, ids=str)
@pytest.mark.parametrize("columns", [64, 352, 960])
def test_every_tile_adds_the_same_numbers(
    columns: int, tile: PlaneTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several units a warp, of some that only a few warps have, and of half a unit."""
    matrix = quantize_matrix(torch.randn(40, columns), 32).for_device(CUDA)
    x = torch.randn(11, columns)
    monkeypatch.setattr(triton_experts, "PLANES", (PLANES[0],))
    expected = linear_forward(x, matrix)
    monkeypatch.setattr(triton_experts, "PLANES", (tile,))
    # The interpreter's products round as numpy's do, by the number of rows.
    torch.testing.assert_close(linear_forward(x, matrix), expected, rtol=1e-5, atol=1e-4)
    whole = x.double() @ dequantize(matrix.planes, matrix.scales, matrix.layout).double().T
    torch.testing.assert_close(expected.double(), whole, rtol=1e-4, atol=1e-3)


def test_the_matrix_alone_decides_the_parts() -> None:
    layouts = [PlaneLayout(64, columns) for columns in (64, 768, 2048)]
    assert [parts_of(layout, gated=False) for layout in layouts] == [4, 4, 8]
    assert [parts_of(layout, gated=True) for layout in layouts] == [4, 4, 4]
