"""The Triton kernels against the float64 oracle, in Triton's interpreter on the CPU.

It takes about a tenth of a millisecond an operation, so that the layers are tiny here;
test_triton_gpu.py has real sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.planes import PREFIX_BITS, dequantize
from kernels.triton.experts import experts_forward, linear_forward, supports, supports_matrix
from kernels.triton.grouped import describable
from kernels.triton.language import INTERPRETED
from kernels.triton.tiles import Tile
from tests.amounts import amount, deep_except
from tests.kernels.dequantized_cases import quantize_case
from tests.kernels.kernel_cases import (
    ACTIVATIONS,
    DTYPES,
    Case,
    assert_close,
    cases,
    make_case,
)
from tests.kernels.plane_cases import first_bits, quantize_matrix

CUDA = torch.device("cuda")  # whose arrangement the kernels read, here in main memory

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")


def _softplus_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.softplus(gate) * up


def run(case: Case) -> Tensor:
    return experts_forward(*case.arguments)


@settings(max_examples=15)
@given(case=cases())
def test_equals_the_float64_oracle(case: Case) -> None:
    assert_close(run(case), case)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_rows_have_the_same_bits_in_any_company(activation: str) -> None:
    case = make_case(5, 4, 2, hidden=70, width=24, activation=activation, biased=True, unused=0.2)
    together = run(case)
    for begin, end in ((0, 1), (2, 3), (1, 4), (4, 5)):
        assert torch.equal(run(case.rows(slice(begin, end))), together[begin:end])


def test_many_rows_an_expert() -> None:
    case = make_case(90, 2, 1, hidden=40, width=24)  # more than one block each
    together = run(case)
    assert_close(together, case)
    assert torch.equal(run(case.rows(slice(7, 8))), together[7:8])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("activation", "halves"),
    deep_except(
        [("clamped interleaved gate", False)],
        [("silu gate", True), ("clamped interleaved gate", False), ("squared relu, no gate", True)],
    ),
)
def test_prompts_read_weights_by_descriptors(
    activation: str, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of any number of slots, and sizes that tiles do not divide; panels of some experts."""
    case = make_case(
        60, 3, 2, hidden=72, width=40, dtype=torch.float16, activation=activation, biased=True,
        unused=0.2,
    )  # fmt: skip
    tile, seen = Tile(64, 32, halves=halves), list[bool]()

    def noted(*of: Tensor) -> bool:
        seen.append(describable(*of))
        return seen[-1]

    monkeypatch.setattr("kernels.triton.experts.PREFILL", (tile,))
    monkeypatch.setattr("kernels.triton.grouped.describable", noted)
    together = run(case)
    assert_close(together, case)
    assert seen == [True, True]
    monkeypatch.setattr("kernels.triton.experts._MANY_ROWS", 0)
    assert_close(run(case.rows(slice(7, 9))), case.rows(slice(7, 9)))
    planes, whole = quantize_case(case, 32, [8, 3, 2])
    monkeypatch.setattr("kernels.triton.experts._PANEL_ROWS", 0)
    monkeypatch.setattr("kernels.triton.experts.PANEL_BYTES", 1)
    assert_close(
        experts_forward(case.hidden, case.ids, case.weights, planes.for_device(CUDA)), whole
    )
    assert seen == [True] * 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_of_torchs(dtype: torch.dtype) -> None:
    case = make_case(3, 3, 2, hidden=20, width=16, dtype=dtype, biased=True)
    case = replace(case, experts=replace(case.experts, activation=_softplus_gate))
    assert_close(run(case), case)
    planes, whole = quantize_case(case, 32, [8, 3, 2])
    planes = planes.for_device(CUDA)
    assert_close(experts_forward(case.hidden, case.ids, case.weights, planes), whole)


@pytest.mark.deep
@settings(max_examples=amount(6, quick=3))
@given(
    tokens=st.sampled_from((1, 3, 6)),
    hidden=st.integers(1, 80),
    width=st.integers(1, 70),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    dtype=st.sampled_from(DTYPES),
    group_size=st.sampled_from((32, 64)),
    bits=st.tuples(*[st.sampled_from(PREFIX_BITS)] * 3),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_planes_of_mixed_widths_equal_the_weights_they_stand_for(
    tokens: int,
    hidden: int,
    width: int,
    activation: str,
    dtype: torch.dtype,
    group_size: int,
    bits: tuple[int, ...],
    biased: bool,
    seed: int,
) -> None:
    case = make_case(
        tokens, 3, 2, hidden, width, dtype, activation=activation, biased=biased, seed=seed
    )
    layer, whole = quantize_case(case, group_size, bits, "interleaved" in activation)
    layer = layer.for_device(CUDA)
    assert supports(case.hidden, layer)
    assert_close(experts_forward(case.hidden, case.ids, case.weights, layer), whole)


@pytest.mark.deep
@pytest.mark.parametrize("interleaved", deep_except([False], [False, True]))
def test_rows_of_planes_have_the_same_bits_in_any_company(interleaved: bool) -> None:
    activation = "clamped interleaved gate" if interleaved else "silu gate"
    case = make_case(4, 3, 2, hidden=70, width=20, activation=activation, biased=True)
    layer = quantize_case(case, 32, [4, 3, 8], interleaved)[0].for_device(CUDA)
    together = experts_forward(case.hidden, case.ids, case.weights, layer)
    for row in (0, 3):
        own = case.rows(slice(row, row + 1))
        alone = experts_forward(own.hidden, own.ids, own.weights, layer)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("bits", deep_except([4], PREFIX_BITS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers(dtype: torch.dtype, bits: int) -> None:
    random = torch.Generator().manual_seed(bits)
    weight, bias = torch.randn(50, 70, generator=random), torch.randn(50, generator=random)
    matrix = first_bits(quantize_matrix(weight, 32, bias), bits).for_device(CUDA)
    x = torch.randn(20, 70, generator=random).to(dtype)
    assert supports_matrix(x, matrix)
    expected = x.double() @ dequantize(matrix.planes, matrix.scales, matrix.layout).double().T
    expected += bias.double()
    actual = linear_forward(x, matrix)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() < tolerance * expected.abs().max()
    assert torch.equal(linear_forward(x[3:4], matrix), actual[3:4])
    assert linear_forward(x[:0], matrix).shape == (0, 50)
    # The format's own arithmetic quantises activations too: the same to 8 bits.
    apart = (actual.float() - reference.linear_forward(x.float(), matrix)).abs().max()
    assert apart < 3e-2 * expected.abs().max()


def test_unused_slots_do_not_matter() -> None:
    case = make_case(4, 4, 3, hidden=8, width=8, unused=0.5, seed=3)
    poisoned = replace(case, weights=case.weights.masked_fill(case.ids < 0, float("nan")))
    assert torch.equal(run(poisoned), run(case))


@pytest.mark.parametrize("expert", [-2, 4])
def test_an_expert_that_does_not_exist_makes_its_token_nan(expert: int) -> None:
    case = make_case(3, 4, 2, hidden=8, width=8)
    expected = run(case)
    case.ids[1, 0] = expert
    actual = run(case)
    assert bool(actual[1].isnan().all())
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_nan_in_one_token_stays_there() -> None:
    case = make_case(3, 4, 2, hidden=8, width=8)
    expected = run(case)
    case.hidden[1, 0] = float("nan")
    actual = run(case)
    assert bool(actual[1].isnan().all())
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_no_tokens() -> None:
    case = make_case(0, 2, 1, hidden=8, width=8)
    assert torch.equal(run(case), reference.experts_forward(*case.arguments))
