"""The Triton kernels on a real GPU: TRITON_INTERPRET=0 python -m pytest -m gpu tests/kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels.backends
from kernels import ExpertWeights
from kernels.planes import PlaneFormat, PlaneLayout, arranged
from kernels.reference import AnyExperts
from kernels.triton import draw, language
from kernels.triton.arrange import arrange
from kernels.triton.experts import experts_forward
from kernels.triton.language import INTERPRETED
from kernels.triton.planes import address_table
from kernels.triton.router import decide, logits
from kernels.triton.routing import route
from kernels.triton.rows import RowNorm, add_norm
from moe.sampling import batch
from moe.sampling.batch import Row, draw_batch
from moe.sampling.params import SamplingParams
from tests.kernels import recurrence_cases
from tests.kernels.attention_cases import AttentionCase
from tests.kernels.dequantized_cases import quantize_case
from tests.kernels.file_cases import FILE_FORMATS, make_file_matrix
from tests.kernels.kernel_cases import ACTIVATIONS, DTYPES, Case, assert_close, make_case
from tests.kernels.plane_cases import quantize_matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU and TRITON_INTERPRET=0"
    ),
]
DEVICE = torch.device("cuda")


def on_gpu(experts: AnyExperts) -> AnyExperts:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(DEVICE)

    first_bias, second_bias = move(experts.gate_up_bias_EG), move(experts.down_bias_EH)
    experts = replace(experts, gate_up_bias_EG=first_bias, down_bias_EH=second_bias)
    if isinstance(experts, ExpertWeights):
        first, second = experts.gate_up_EGH.to(DEVICE), experts.down_EHF.to(DEVICE)
        return replace(experts, gate_up_EGH=first, down_EHF=second)
    planes = tuple(tuple(blob.to(DEVICE) for blob in own) for own in experts.planes)
    moved = replace(experts, planes=planes, scales=tuple(s.to(DEVICE) for s in experts.scales))
    return moved.for_device(DEVICE)


def to_gpu(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.hidden.to(DEVICE), case.ids.to(DEVICE), case.weights.to(DEVICE)


def run(case: Case, experts: AnyExperts) -> Tensor:
    """Through the entry point; also asks for the same bits of smaller batches, where planes are not
    dequantised first."""
    hidden, ids, weights = to_gpu(case)
    output = kernels.experts_forward(hidden, ids, weights, experts)
    most = len(hidden) if isinstance(experts, ExpertWeights) else 100
    some = kernels.experts_forward(hidden[:most], ids[:most], weights[:most], experts)
    for count in (1, 3, 17):
        part = kernels.experts_forward(hidden[:count], ids[:count], weights[:count], experts)
        assert torch.equal(part, some[: min(count, len(some))])
    return output.cpu()


# Compiling takes most of the time there is on a GPU, so not all pairs: the interpreter has them.
PAIRS = [(torch.bfloat16, own) for own in sorted(ACTIVATIONS)]
PAIRS += [(own, "silu gate") for own in DTYPES if own != torch.bfloat16]


@pytest.mark.parametrize(("dtype", "activation"), PAIRS)
@pytest.mark.parametrize("tokens", [5, 300])
def test_whole_weights(dtype: torch.dtype, activation: str, tokens: int) -> None:
    case = make_case(
        tokens, 6, 2, hidden=200, width=136, dtype=dtype, activation=activation, biased=True
    )
    assert_close(run(case, on_gpu(case.experts)), case)


@pytest.mark.parametrize(
    ("group_size", "activation"),
    [(32, "clamped interleaved gate"), *((64, own) for own in sorted(ACTIVATIONS))],
)
@pytest.mark.parametrize("tokens", [5, 300])
def test_planes_of_mixed_widths(group_size: int, activation: str, tokens: int) -> None:
    case = make_case(
        tokens, 6, 2, 200, 136, torch.bfloat16, activation=activation, biased=True, unused=0.2
    )
    layer, whole = quantize_case(case, group_size, [2, 3, 4, 8, 2, 3], "interleaved" in activation)
    assert_close(run(case, on_gpu(layer)), whole)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_planes_of_many_rows(bits: int) -> None:
    """Decoded inside the product, where all experts have the same planes."""
    case = make_case(300, 6, 2, 256, 128, torch.bfloat16, biased=True, unused=0.2)
    layer, whole = quantize_case(case, 64, [bits] * 6)
    output = kernels.experts_forward(*to_gpu(case), on_gpu(layer))
    assert_close(output.cpu(), whole)


@pytest.mark.parametrize("quantized", [False, True])
def test_launches_that_overlap_give_the_same_bits(
    quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small ones, each of which needs what the one before has made."""
    case = make_case(3, 8, 2, hidden=256, width=128, dtype=torch.bfloat16)
    layer = on_gpu(quantize_case(case, 64, [4] * 8)[0] if quantized else case.experts)
    start, router = case.hidden.to(DEVICE).float(), torch.randn(8, 256).to(DEVICE)
    norm = RowNorm(torch.linspace(0.5, 1.5, 256, device=DEVICE), None, 1e-6, centered=False)
    x, exact = torch.empty_like(start), torch.empty_like(start)
    rounded = torch.empty_like(start, dtype=torch.bfloat16)

    def layers() -> None:
        x.copy_(start)
        added = None
        for _ in range(30):
            add_norm(x, added, 1.0, None, norm, exact, rounded)
            ids, weights = decide(logits(exact, router, None), 2, score="softmax")
            added = experts_forward(rounded, ids, weights, layer)

    found = []
    for overlaps in (False, language._overlaps()):
        monkeypatch.setattr(language, "_overlaps", lambda own=overlaps: own)
        layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        for _ in range(20):
            graph.replay()
        found.append(x.clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_captured_graph_follows_the_routing(quantized: bool) -> None:
    case = make_case(4, 8, 2, hidden=256, width=128, dtype=torch.bfloat16)
    layer: AnyExperts = quantize_case(case, 64, [4] * 8)[0] if quantized else case.experts
    layer = on_gpu(layer)
    hidden, ids, weights = to_gpu(case)
    experts_forward(hidden, ids, weights, layer)  # compiles and measures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts_forward(hidden, ids, weights, layer)
    for shift in range(3):
        ids.copy_((ids + shift) % 8)
        graph.replay()
        assert torch.equal(output, experts_forward(hidden, ids, weights, layer))


def test_no_call_waits_for_the_host() -> None:
    case = make_case(4, 8, 2, hidden=256, width=128, dtype=torch.bfloat16)
    layer = on_gpu(case.experts)
    hidden, ids, weights = to_gpu(case)
    experts_forward(hidden, ids, weights, layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts_forward(hidden, ids, weights, layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("slots", [512, 16_384])
def test_slots_are_sorted_as_by_torch(slots: int) -> None:
    ids = torch.randint(-1, 128, (slots, 1), generator=torch.Generator().manual_seed(0))
    found, expected = route(ids.to(DEVICE), 128, 64), route(ids, 128, 64)
    assert torch.equal(found.order_S.cpu(), expected.order_S)
    assert torch.equal(found.offsets_E1.cpu(), expected.offsets_E1)
    assert torch.equal(found.expert_B.cpu(), expected.expert_B)
    used = expected.expert_B >= 0
    assert torch.equal(found.first_B.cpu()[used], expected.first_B[used])


def test_linear_layers() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = quantize_matrix(torch.randn(3000, 520, generator=random), 64)
    planes = tuple(plane.to(DEVICE) for plane in matrix.planes)
    matrix_on_gpu = replace(matrix, planes=planes, scales=matrix.scales.to(DEVICE))
    matrix_on_gpu = matrix_on_gpu.for_device(DEVICE)
    x = torch.randn(700, 520, generator=random)
    actual = kernels.linear_forward(x.to(DEVICE), matrix_on_gpu)
    expected = kernels.linear_forward(x, matrix)
    assert (actual.cpu() - expected).abs().max() < 3e-2 * expected.abs().max()
    few = kernels.linear_forward(x[:60].to(DEVICE), matrix_on_gpu)  # more read panels
    for count in (1, 16, 33):
        part = kernels.linear_forward(x[:count].to(DEVICE), matrix_on_gpu)
        assert torch.equal(part, few[:count])


@pytest.mark.parametrize("name", FILE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_files(name: str, dtype: torch.dtype) -> None:
    """As they are for few rows, dequantised first for many."""
    format = FILE_FORMATS[name]
    matrix, own = make_file_matrix(600, 520, format, np.random.default_rng(0))
    planes = tuple(plane.to(DEVICE) for plane in matrix.planes)
    on_device = replace(matrix, planes=planes, scales=matrix.scales.to(DEVICE)).for_device(DEVICE)
    x = torch.randn(200, 520, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.double() @ torch.from_numpy(own.at(format, len(planes))).T
    few = kernels.linear_forward(x[:60].to(DEVICE), on_device)
    for found in (few, kernels.linear_forward(x.to(DEVICE), on_device)):
        away = (found.cpu().double() - expected[: len(found)]).abs().max()
        assert away < 3e-2 * expected.abs().max()
    for count in (1, 16, 33):
        part = kernels.linear_forward(x[:count].to(DEVICE), on_device)
        assert torch.equal(part, few[:count])


@pytest.mark.parametrize("format", [PlaneFormat(32), PlaneFormat(32, 8, "fp8")])
@pytest.mark.parametrize("chunks", [20, 25])
def test_planes_are_arranged(format: PlaneFormat, chunks: int) -> None:
    """Where they lie: no thread writes what another has yet to read, however often."""
    layout = PlaneLayout(16 * 200, 32 * chunks, *format)
    sizes = [layout.plane_bytes(plane) for plane in range(len(format.plane_bits))]
    for _ in range(20):
        planes = [torch.randint(0, 256, (4, n), dtype=torch.uint8, device=DEVICE) for n in sizes]
        expected = arranged(planes, [layout], "cuda")
        each = [tuple(plane[index] for plane in planes) for index in range(4)]
        table = address_table(each, [planes[0]] * 4, [layout], range(1), DEVICE)
        arrange(table, layout)
        assert all(map(torch.equal, planes, expected))


@pytest.mark.parametrize("own", [{"top_p": 0.95, "temperature": 0.8}, {"top_k": 50, "min_p": 0.01}])
def test_tokens_are_drawn_as_torch_draws(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(64, 151_936, device=DEVICE) * 3
    given = [Row(SamplingParams(**own), at * 0.37 % 1) for at in range(64)]
    found = [[str(drawn) for drawn in draw_batch([logits], given)]]
    monkeypatch.setattr(batch, "_kernels_for", lambda _: None)
    found.append([str(drawn) for drawn in draw_batch([logits], given)])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_peaks_are_those_of_numpy(dtype: torch.dtype) -> None:
    """Of many programs a row, one launch behind the other."""
    for company in [1, 64, 5] * 20:
        given = (torch.randn(company, 151_936, device=DEVICE) * 3).round().to(dtype)
        ids, values = draw.peaks_of(given).cpu().numpy()
        expected = given.float().cpu().numpy()
        best = expected.argmax(-1)
        assert ids.tolist() == best.tolist()
        assert values.view(np.float64).tolist() == expected[range(company), best].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 4, 128), (8, 8, 80), (128, 1, 512)])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
    """Grouped queries, and 512 latents beside 64 rotated keys; contexts that are split."""
    torch.manual_seed(0)
    lengths, latent = [1, 1, 4001, 64, 9001], kv_heads == 1
    beside = 64 if latent else size
    for decoding in (True,) if latent else (True, False):  # latents of prompts are expanded first
        counts = [0, 1, 1, 1, 1] if decoding else [1, 1, 300, 64, 33]
        tokens = 5 if decoding else sum(counts)
        case = AttentionCase(
            query=torch.randn(tokens, heads, size).to(dtype),
            second=torch.randn(tokens, heads, beside).to(dtype) if latent else None,
            rows=[
                (torch.randn(kv_heads, length, size).to(dtype),
                 torch.randn(kv_heads, length, beside).to(dtype))
                for length in lengths
            ],
            counts=counts, reach=None if latent else 5000, scale=size**-0.5, softcap=None,
            sinks=None if latent else torch.randn(heads), decoding=decoding,
        )  # fmt: skip
        on_device = case.to(DEVICE)
        actual = on_device.run()
        # A GPU's exponential is a few last bits off.
        tolerance = (32 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
        torch.testing.assert_close(actual.cpu().double(), case.expected(), rtol=0, atol=tolerance)
        at = 0
        for index, count in enumerate(counts):
            rows = max(count, 1)
            own = on_device.part(index, rows // 2, rows).run()
            assert torch.equal(own, actual[at + rows // 2 : at + rows])
            at += rows


RECURRENT: list[recurrence_cases.Case] = [
    recurrence_cases.make_gated(3, 40, 4, 2, 128, 128),
    recurrence_cases.make_gated(1, 40, 3, 1, 256, 200, by_key=True),
    recurrence_cases.make_gated(1, 1 << 15, 1, 1, 32, 16, by_key=True, strength=1e-4),
    recurrence_cases.make_scan(2, 40, 2, 4, 64, 128),
    recurrence_cases.make_scan(2, 40, 1, 1, 1000, 16, by_channel=True),
    recurrence_cases.make_scan(1, 1 << 15, 1, 1, 16, 16, by_channel=True, strength=1e-4),
    recurrence_cases.make_convolution(2, 40, 3000, 4, 4, bias=True, silu=True),
]


@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers(case: recurrence_cases.Case) -> None:
    """Against float64, and the same bits alone and cut."""
    assert kernels.backends.enable_recurrence(DEVICE) == ""
    there = recurrence_cases.moved(case, DEVICE)
    out, state = recurrence_cases.run(there)
    expected = recurrence_cases.Expected.of(case)
    recurrence_cases.assert_close((out.cpu(), state.cpu()), expected)
    alone = there.sequence(0)
    first, now = recurrence_cases.run(alone.part(0, 1, alone.tensors[-1]))
    last, now = recurrence_cases.run(alone.part(1, case.tokens, now))
    assert torch.equal(torch.cat([first, last], 1), out[:1])
    assert torch.equal(now, state[:1])
