"""The compiled kernels on bit planes: right, and a row's bits the same alone and in company."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import kernels
from kernels import PlaneMatrix, planes, reference
from kernels.cpu.experts import NativePlanes
from kernels.planes import PREFIX_BITS, PlaneLayout
from tests.kernels.kernel_cases import ACTIVATIONS, AMX_TARGET_PARAMS, load_target
from tests.kernels.plane_cases import (
    Expected,
    LayerCase,
    first_bits,
    layers,
    linear_oracle,
    make_layer,
    make_matrix,
)


@pytest.fixture(scope="module", params=AMX_TARGET_PARAMS)
def native(request: pytest.FixtureRequest) -> NativePlanes:
    return NativePlanes(load_target(request.param))


@given(
    tokens=st.sampled_from((0, 1, 2, 5, 8, 9, 17, 33)),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    group_size=st.sampled_from((32, 64)),
    bits=st.sampled_from(PREFIX_BITS),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
# More groups than AMX takes at once, and a row too many for its registers.
@example(tokens=17, rows=40, columns=2200, group_size=32, bits=8, biased=True, seed=0)
def test_linear_equals_the_float64_oracle_and_does_not_mix_rows(
    native: NativePlanes,
    tokens: int,
    rows: int,
    columns: int,
    group_size: int,
    bits: int,
    biased: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    whole, weights = make_matrix(rows, columns, group_size, random, biased)
    matrix, x = first_bits(whole, bits), torch.randn(tokens, columns, generator=random)
    actual = native.linear(x, matrix)
    expected = linear_oracle(x.numpy(), weights, bits, whole.bias)
    Expected(expected, np.zeros(tokens)).check(actual)
    for t in range(tokens):
        assert torch.equal(native.linear(x[t : t + 1], matrix)[0], actual[t])


@given(case=layers())
def test_experts_equal_the_float64_oracle(native: NativePlanes, case: LayerCase) -> None:
    case.expected().check(native.experts(*case.arguments))


@given(case=layers(), data=st.data())
def test_rows_have_the_same_bits_in_any_company(
    native: NativePlanes, case: LayerCase, data: st.DataObject
) -> None:
    together = native.experts(*case.arguments)
    begin = data.draw(st.integers(0, case.hidden.shape[0]))
    end = data.draw(st.integers(begin, case.hidden.shape[0]))
    keep = slice(begin, end)
    assert torch.equal(native.experts(*case.rows(keep).arguments), together[keep])


# Enough rows for unpacking to memory, uneven tiles, several panels, and more than one thread.
@pytest.mark.parametrize("bits", [(2,), (4,), (8,), (4, 8, 2)])
def test_large_layers_agree_with_the_reference_row_by_row(
    native: NativePlanes, bits: tuple[int, ...]
) -> None:
    case = make_layer(45, 3, 2, hidden=1100, width=330, bits=bits)
    together = native.experts(*case.arguments)
    expected = reference.experts_forward(*case.arguments)
    error = (together - expected).abs().amax(1) / expected.abs().max()
    assert error.max() < 1e-2
    assert error.median() < 1e-6  # an inner code that rounds the other way is rare
    alone = [native.experts(*case.rows(slice(t, t + 1)).arguments) for t in range(45)]
    assert torch.equal(torch.cat(alone), together)


def test_rows_too_many_for_the_caches_have_the_bits_of_few(native: NativePlanes) -> None:
    case = make_layer(1100, 3, 2, hidden=1024, width=40, bits=(4, 8))  # 8.6 MiB of outputs
    together = native.experts(*case.arguments)
    parts = [native.experts(*case.rows(slice(t, t + 275)).arguments) for t in range(0, 1100, 275)]
    assert torch.equal(torch.cat(parts), together)


def test_all_256_codes_give_what_whole_bytes_give(native: NativePlanes) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    layout = PlaneLayout(4, 64)
    scales = torch.tensor([[1.0], [0.5], [2.0], [0.25]]).half()
    packed = planes.pack(codes, layout)
    unit = torch.zeros(64, 64)
    unit.fill_diagonal_(127)  # each row's scale is 1: the product is the weight itself, times 127
    for count, bits in enumerate(PREFIX_BITS, 1):
        step = 2 ** (8 - bits)
        middle = codes.int() // step * step + step // 2 - 136
        matrix = PlaneMatrix(layout, packed[:count], planes.pack_scales(scales, layout))
        for rows in (unit, *unit[:, None]):
            expected = 127 * (middle * scales.float()).T
            first = int(rows[0].argmax())
            actual = native.linear(rows, matrix)
            assert torch.equal(actual, expected[first : first + len(rows)])


@pytest.mark.usefixtures("one_thread")
def test_threads_do_not_change_bits(native: NativePlanes) -> None:
    case = make_layer(tokens=30, experts=4, top_k=2, hidden=300, width=200, bits=PREFIX_BITS)
    matrix, _ = make_matrix(900, 300, 64, torch.Generator().manual_seed(1))
    alone = native.experts(*case.arguments), native.linear(case.hidden, matrix)
    torch.set_num_threads(3)
    assert torch.equal(native.experts(*case.arguments), alone[0])
    assert torch.equal(native.linear(case.hidden, matrix), alone[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_activations_are_widened_first(
    native: NativePlanes, dtype: torch.dtype
) -> None:
    case = make_layer(tokens=3, experts=4, top_k=2, hidden=100, width=40, dtype=dtype)
    wide = native.experts(case.hidden.float(), *case.arguments[1:])
    assert torch.equal(native.experts(*case.arguments), wide.to(dtype))
    matrix, _ = make_matrix(20, 100, 32, torch.Generator().manual_seed(1), biased=True)
    wide = native.linear(case.hidden.float(), matrix)
    assert torch.equal(native.linear(case.hidden, matrix), wide.to(dtype))


# Every curve of kernels/cpu/curves.h against the callable that it stands for, which runs in torch
# where a norm follows.
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("biased", [False, True])
def test_known_activations_agree_with_their_callables(
    native: NativePlanes, activation: str, biased: bool
) -> None:
    case = make_layer(20, 2, 1, hidden=70, width=50, activation=activation, biased=biased)
    assert native._plan(case.experts).activation is not None
    in_torch = replace(case, experts=replace(case.experts, post_norm=lambda rows: rows))
    error = native.experts(*case.arguments) - native.experts(*in_torch.arguments)
    assert error.abs().amax(1).median() < 1e-5
    case.expected().check(native.experts(*case.arguments))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_what_is_not_finite_makes_all_of_its_row_not_a_number(
    native: NativePlanes, activation: str, bad: float
) -> None:
    case = make_layer(3, experts=4, top_k=2, hidden=100, width=40, activation=activation)
    clean = native.experts(*case.arguments)
    case.hidden[1, 64:68] = bad
    output = native.experts(*case.arguments)
    assert output[1].isnan().all()
    assert torch.equal(output[::2], clean[::2])


@pytest.mark.parametrize("expert", [-2, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_refuses_an_expert_that_does_not_exist(
    native: NativePlanes, expert: int, normed: bool
) -> None:
    case = make_layer(2, 4, 2, hidden=8, width=8, normed=normed)
    case.ids[1, 0] = expert
    with pytest.raises(ValueError, match=r"expert ids must be in \[0, 4\), or -1"):
        native.experts(*case.arguments)


def test_the_entry_points_use_the_compiled_kernels() -> None:
    case = make_layer(3, 4, 2, hidden=80, width=40)
    choice, _ = kernels.cpu.choose_kernel()
    assert choice is not None
    matrix, _ = make_matrix(20, 80, 32, torch.Generator().manual_seed(1))
    expected = choice.planes.linear(case.hidden, matrix)
    assert torch.equal(kernels.linear_forward(case.hidden, matrix), expected)
    expected = choice.planes.experts(*case.arguments)
    assert torch.equal(kernels.experts_forward(*case.arguments), expected)
    double = case.hidden.double()
    assert torch.equal(
        kernels.linear_forward(double, matrix), reference.linear_forward(double, matrix)
    )
