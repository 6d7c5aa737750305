"""Bit planes arranged for CUDA devices: the arrangement, their numbers, prompts, and split sums."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

import kernels
from experts.weights import ExpertShape, from_expert_blobs
from kernels import PlaneMatrix, QuantizedExperts
from kernels.planes import (
    PLANE_BITS,
    PREFIX_BITS,
    PlaneFormat,
    PlaneLayout,
    arranged,
    dequantize,
    pack,
    unpack,
)
from kernels.triton import experts as triton_experts
from kernels.triton.arrange import arrange
from kernels.triton.codes import WIDTH, in_order, load_words, symmetric_numbers, whole_numbers
from kernels.triton.dequantize import dequantized as true_dequantized
from kernels.triton.experts import experts_forward, linear_forward
from kernels.triton.language import INTERPRETED
from kernels.triton.planes import address_table, parts_of
from kernels.triton.tall import turned
from kernels.triton.tiles import PLANES, PREFILL_PLANES, PlaneTile, TallTile
from tests.amounts import deep_except
from tests.kernels.dequantized_cases import quantize_case
from tests.kernels.kernel_cases import assert_close, make_case
from tests.kernels.plane_cases import first_bits, quantize_matrix
from tests.launches import Launches

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
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


@pytest.mark.parametrize("columns", deep_except([32], [32, 64, 160]))
def test_the_kernel_arranges_as_torch_does(columns: int) -> None:
    layout = PlaneLayout(48, columns, 32)
    planes = pack(torch.randint(0, 256, (48, columns), dtype=torch.uint8), layout)
    made = arranged(planes, [layout], "cuda")
    for count in (2, 4):
        here = tuple(plane.clone() for plane in planes)
        table = address_table([here[:count]], [torch.empty(0)], [layout], range(1), CPU)
        arrange(table, layout)
        assert all(map(torch.equal, here, made[:count] + planes[count:]))


@pytest.mark.parametrize(
    "activation",
    deep_except(
        ["clamped interleaved gate"], ["clamped interleaved gate", "squared relu, no gate"]
    ),
)
def test_a_layer_is_arranged_by_one_launch_a_projection(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lies, in bytes of which no others change, whatever bits an expert has. Of slots
    those that have come, and then the host sends nothing but the launches."""
    case = make_case(1, 3, 2, 72, 20, activation=activation)
    bits, interleaved = (2, 8, 2), "interleaved" in activation
    layer = quantize_case(case, 32, bits, interleaved)[0]
    shape = ExpertShape(72, 20, layer.parts, 32)
    before, after = stored(layer), stored(layer.for_device(CUDA))
    memory = torch.cat(before)
    blobs = [
        (tuple(plane[0] for plane in planes), scales[0])
        for planes, scales in map(
            shape.split, (one[None] for one in memory.split([len(one) for one in before])), bits
        )
    ]
    here = from_expert_blobs(shape, blobs, interleaved, activation=layer.activation)
    launches, run = Launches(), InterpretedFunction.run

    def counted(*args: Any, **options: Any) -> object:
        launches.names.append("kernel")
        with _disable_current_modes():  # what the interpreter does is no launch
            return run(*args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    with launches:
        assert triton_experts.arrange_in_place(here, None)
    assert launches.names.count("kernel") == 2
    assert torch.equal(memory, torch.cat(after))
    memory.copy_(torch.cat(before))
    launches.names.clear()
    with launches:
        assert triton_experts.arrange_in_place(here, [2, 0])
    assert launches.names == ["kernel"] * 4
    assert torch.equal(memory, torch.cat([after[0], before[1], after[2]]))


def stored(layer: QuantizedExperts) -> list[Tensor]:
    """The bytes of each expert, in the order of a store's file."""
    each = zip(layer.planes, layer.scales, strict=True)
    return [torch.cat([scales.view(torch.uint8), *planes]) for planes, scales in each]


def test_what_the_kernel_cannot_read_is_arranged_by_torch() -> None:
    """Words of planes that do not begin at multiples of 16 bytes."""
    layer = quantize_case(make_case(1, 2, 2, 64, 32), 32, (4, 4))[0]
    planes = tuple(
        tuple(torch.cat([torch.zeros(1, dtype=torch.uint8), plane])[1:] for plane in own)
        for own in layer.planes
    )
    here = replace(layer, planes=planes)
    assert not triton_experts.arrange_in_place(here, None)
    kernels.arrange_for_cuda(here)
    assert all(map(torch.equal, stored(here), stored(layer.for_device(CUDA))))


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


@pytest.mark.deep
@pytest.mark.parametrize("bits", [(8, 2, 3), pytest.param((4, 4, 4), marks=pytest.mark.deep)])
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

    def dequantized(*arguments: object, **named: object) -> torch.Tensor:
        called.append(1)
        return true_dequantized(*arguments, **named)  # type: ignore[arg-type]

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


@pytest.mark.deep
@pytest.mark.parametrize(
    ("activation", "group"),
    deep_except(
        [("clamped interleaved gate", 32)],
        [("clamped interleaved gate", 32), ("squared relu, no gate", 64), ("silu gate", 64)],
    ),
)
def test_prompts_decode_each_weight_once(
    activation: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, unused slots, and outputs that are no whole number of blocks."""
    monkeypatch.setattr(triton_experts, "TALL", (TallTile(16, blocks=4),))
    monkeypatch.setattr(triton_experts, "_MANY_ROWS", 4)
    called: list[int] = []
    true = triton_experts.project_tall

    def project_tall(*arguments: object, **named: object) -> torch.Tensor:
        called.append(1)
        return true(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_experts, "project_tall", project_tall)
    for bits, width in ((2, 64), (8, 64), (4, 40)):
        case = make_case(
            11, 3, 2, 128, width, torch.bfloat16, activation=activation, biased=True, unused=0.3
        )
        layer, whole = quantize_case(case, group, (bits,) * 3, "interleaved" in activation)
        assert_close(experts_forward(case.hidden, case.ids, case.weights, layer.for_device(CUDA)),
                     whole)  # fmt: skip
    assert len(called) == 2 * 2 + 1  # 40 columns are no whole unit


# Scales end where a page begins that may not be read; 12 blocks of outputs are no multiple of 8.
_GUARDED = """
import ctypes, mmap
from dataclasses import replace
import torch
from kernels.triton import experts
from kernels.triton.tiles import TallTile
from tests.kernels.dequantized_cases import quantize_case
from tests.kernels.kernel_cases import assert_close, make_case

library, kept = ctypes.CDLL(None), []

def guarded(tensor):
    raw = tensor.contiguous().view(torch.uint8).flatten()
    whole = -(-len(raw) // mmap.PAGESIZE) * mmap.PAGESIZE
    kept.append(mmap.mmap(-1, whole + 64 * mmap.PAGESIZE))
    behind = ctypes.addressof(ctypes.c_char.from_buffer(kept[-1])) + whole
    assert library.mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(64 * mmap.PAGESIZE), 0) == 0
    own = torch.frombuffer(kept[-1], dtype=torch.uint8)[whole - len(raw) : whole]
    return own.copy_(raw).view(tensor.dtype)

experts.TALL, experts._MANY_ROWS = (TallTile(16, blocks=8),), 4
case = make_case(11, 3, 2, 192, 64, torch.bfloat16, biased=True, unused=0.3)
layer, whole = quantize_case(case, 64, (8,) * 3, False)
layer = layer.for_device(torch.device("cuda"))
layer = replace(layer, scales=tuple(map(guarded, layer.scales)))
assert_close(experts.experts_forward(case.hidden, case.ids, case.weights, layer), whole)
"""


@pytest.mark.deep
def test_prompts_read_nothing_behind_a_matrix() -> None:
    command = [sys.executable, "-c", _GUARDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.deep
@pytest.mark.parametrize(
    "activation",
    deep_except(
        ["clamped interleaved gate"], ["clamped interleaved gate", "squared relu, no gate"]
    ),
)
def test_experts_of_many_rows_are_read_in_strips(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more and fewer rows than a program has, of mixed bits, with biases and unused slots."""
    monkeypatch.setattr(triton_experts, "PLANES", (PlaneTile(64, two=True),))
    monkeypatch.setattr(triton_experts, "_MANY_ROWS", 1000)
    case = make_case(
        90, 2, 2, 100, 24, torch.bfloat16, activation=activation, biased=True, unused=0.3
    )
    layer, whole = quantize_case(case, 32, (4, 2), "interleaved" in activation)
    actual = experts_forward(case.hidden, case.ids, case.weights, layer.for_device(CUDA))
    assert_close(actual, whole)


@pytest.mark.parametrize(
    ("codes", "planes", "fits"),
    [
        (PlaneFormat(), 3, True),
        (PlaneFormat(), 4, False),
        (PlaneFormat(), 0, False),
        (PlaneFormat(32), 3, False),
        (PlaneFormat(128, 4, "offset"), 1, True),
        (PlaneFormat(32, 4, "super-offset"), 1, False),
        (PlaneFormat(128, 6, "offset"), 1, True),
        (PlaneFormat(128, 6, "offset"), 2, False),
        (PlaneFormat(32, 4, "mxfp4"), 1, True),
    ],
)
def test_64_rows_are_for_codes_of_one_piece_and_sum(
    codes: PlaneFormat, planes: int, fits: bool
) -> None:
    assert PlaneTile(64, two=True).fits(codes, planes, torch.bfloat16) == fits
    assert PlaneTile(32, two=True).fits(codes, planes, torch.bfloat16)
    assert not PlaneTile(32, two=True).fits(codes, planes, torch.float32)
    assert PlaneTile(8).fits(codes, planes, torch.float32)


def test_turned_columns_are_those_of_a_thread() -> None:
    """The order of kernels/triton/codes.py, for both sizes of numbers."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.arange(2 * 64).view(2, 64).to(dtype)
        expected = x.view(2, 2, 4, 4, 2).transpose(2, 3).reshape(2, 64)  # u p h
        assert torch.equal(turned(x), expected)


@triton.jit
def bits_kernel(  # type: ignore[no-untyped-def]
    plane0, plane1, plane2, plane3, output, PLANES: tl.constexpr, PIECE: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0) + tl.zeros((1,), tl.int32)
    words = (
        load_words(plane0, unit * 2, unit >= 0, 2, False, False),
        load_words(plane1, unit * 2, unit >= 0, 1, False, False),
        load_words(plane2, unit * 2, unit >= 0, 1, False, False),
        load_words(plane3, unit * 2, unit >= 0, 4, False, False),
    )
    for T in tl.static_range(2):
        if PIECE == 2:
            numbers = in_order(whole_numbers(words, T, PLANES, COMPUTE, WIDTH))
        else:
            numbers = in_order(symmetric_numbers(words, T, PIECE, PLANES, COMPUTE, WIDTH))
        columns = (unit * 64 + T * 32)[:, None, None] + tl.arange(0, 32)[None, None, :]
        at = output + tl.arange(0, 16)[None, :, None] * 256 + columns
        tl.store(at, numbers.to(tl.int16, bitcast=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("planes", [1, 2, 3, 4])
def test_every_code_has_the_bits_of_its_number(planes: int, dtype: torch.dtype) -> None:
    """In types that the interpreter does not compute in: 16 more, times the last place, than the
    code, whose middle is taken off later; and of 8 bits the number itself."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    layout = PlaneLayout(16, 256, 64, arrangement="cuda")
    own = [plane.view(torch.uint32) for plane in pack(codes, layout)]
    compute = tl.float16 if dtype == torch.float16 else tl.bfloat16
    found = []
    for piece in range(3 if planes == 4 else 1):
        bits = torch.empty(16, 256, dtype=torch.int16)
        bits_kernel[(4,)](*own, bits, planes, piece, compute)
        found.append(bits.view(dtype).double())
    high = codes.double() // 16
    rest = {1: high % 4 - 1.5, 2: high % 2 - 0.5, 3: 0.0 * high, 4: 0.0 * high}[planes]
    assert torch.equal(found[0], 16 * (16 + high - rest))
    if planes == 4:
        assert torch.equal(found[1], 16 + codes.double() % 16)
        assert torch.equal(found[2], codes.double() - 136)


@cache
def by_the_first_tile(columns: int) -> tuple[PlaneMatrix, Tensor, Tensor]:
    """A matrix, rows, and their product as the first tile computes it."""
    matrix = quantize_matrix(torch.randn(20, columns), 32).for_device(CUDA)
    x = torch.randn(11, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_experts, "PLANES", PLANES[:1])
        return matrix, x, linear_forward(x, matrix)


@pytest.mark.parametrize("tile", deep_except([PLANES[-1], PREFILL_PLANES[0]], VARIANTS), ids=str)
@pytest.mark.parametrize("columns", deep_except([352], [64, 352, 960]))
def test_every_tile_adds_the_same_numbers(
    columns: int, tile: PlaneTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several units a warp, of some that only a few warps have, and of half a unit."""
    matrix, x, expected = by_the_first_tile(columns)
    monkeypatch.setattr(triton_experts, "PLANES", (tile,))
    # The interpreter's products round as numpy's do, by the number of rows.
    torch.testing.assert_close(linear_forward(x, matrix), expected, rtol=1e-5, atol=1e-4)
    whole = x.double() @ dequantize(matrix.planes, matrix.scales, matrix.layout).double().T
    torch.testing.assert_close(expected.double(), whole, rtol=1e-4, atol=1e-3)


def test_a_matrix_of_eight_parts_is_read_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 rows, not of 16."""
    matrix = first_bits(quantize_matrix(torch.randn(20, 2048), 64), 4).for_device(CUDA)
    assert parts_of(matrix.layout, expert=False) == 8
    x = torch.randn(40, 2048, dtype=torch.bfloat16)
    found = {}
    for tile in (PlaneTile(32, two=True), PlaneTile(64, two=True)):
        monkeypatch.setattr(triton_experts, "PREFILL_PLANES", (tile,))
        found[tile.rows] = linear_forward(x, matrix).float()
    torch.testing.assert_close(found[64], found[32])


def test_the_matrix_alone_decides_the_parts() -> None:
    layouts = [PlaneLayout(64, columns) for columns in (64, 768, 2048)]
    assert [parts_of(layout, expert=False) for layout in layouts] == [4, 4, 8]
    assert [parts_of(layout, expert=True) for layout in layouts] == [4, 4, 4]
