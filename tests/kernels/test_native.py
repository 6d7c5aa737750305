"""The compiled CPU kernel: right, and a row's bits the same alone, in company, on any threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import reference
from kernels.cpu.build import load_library
from kernels.cpu.experts import LayerArguments, NativeExperts
from kernels.reference import ExpertWeights
from tests.kernels.kernel_cases import (
    ACTIVATIONS,
    DTYPES,
    TARGET_PARAMS,
    Case,
    assert_close,
    cases,
    make_case,
)


@pytest.fixture(scope="module", params=TARGET_PARAMS)
def native(request: pytest.FixtureRequest) -> NativeExperts:
    return NativeExperts(load_library((request.param,)))


@given(case=cases())
def test_equals_the_float64_oracle(native: NativeExperts, case: Case) -> None:
    assert_close(native.experts(*case.arguments), case)


@given(case=cases(), data=st.data())
def test_rows_have_the_same_bits_in_any_company(
    native: NativeExperts, case: Case, data: st.DataObject
) -> None:
    together = native.experts(*case.arguments)
    begin = data.draw(st.integers(0, case.hidden.shape[0]))
    end = data.draw(st.integers(begin, case.hidden.shape[0]))
    keep = slice(begin, end)
    assert torch.equal(native.experts(*case.rows(keep).arguments), together[keep])


# Large enough for several panels, row tiles, blocks of the summed direction, and threads.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_large_layers_agree_with_the_reference_row_by_row(
    native: NativeExperts, dtype: torch.dtype, activation: str
) -> None:
    case = make_case(45, 3, 2, hidden=2100, width=192, dtype=dtype, activation=activation)
    together = native.experts(*case.arguments)
    expected = reference.experts_forward(*case.arguments)
    assert (together.float() - expected.float()).abs().max() < 2e-2 * expected.abs().max()
    alone = [native.experts(*case.rows(slice(t, t + 1)).arguments) for t in range(45)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_long_prompts_are_computed_in_parts(
    native: NativeExperts, monkeypatch: pytest.MonkeyPatch, known: bool, adds: bool
) -> None:
    case = make_case(tokens=45, experts=4, top_k=2, hidden=30, width=20)
    if not known:  # then torch computes it between two calls
        experts = replace(case.experts, activation=lambda row: row[:, :20].tanh() * row[:, 20:])
        case = replace(case, experts=experts)

    def results() -> torch.Tensor:
        return native.experts(*case.arguments, torch.ones(45, 30) if adds else None)

    expected, calls = results(), list[int]()
    name = "_run_whole" if known else "_run_in_steps"
    run = getattr(native, name)

    def watched(plan: object, call: LayerArguments[ExpertWeights]) -> None:
        calls.append(len(call.ids_TK))
        run(plan, call)

    monkeypatch.setattr(native, name, watched)
    monkeypatch.setattr("kernels.cpu.experts.tokens_a_call", lambda *sizes: 10)
    assert torch.equal(results(), expected)
    assert calls == [9] * 5


@pytest.mark.usefixtures("one_thread")
def test_threads_do_not_change_bits(native: NativeExperts) -> None:
    case = make_case(tokens=30, experts=4, top_k=2, hidden=300, width=200)
    alone = native.experts(*case.arguments)
    torch.set_num_threads(3)
    assert torch.equal(native.experts(*case.arguments), alone)


def test_infinite_and_tiny_half_weights_widen_exactly(native: NativeExperts) -> None:
    values = torch.tensor([6e-8, -6.1e-5, 65504.0, float("inf"), float("nan"), -0.0, 1.5])
    gate_up = torch.zeros(1, 7, 1, dtype=torch.float16)
    gate_up[0, :, 0] = values
    experts = reference.ExpertWeights(gate_up, torch.eye(7).half()[None, :1], lambda rows: rows)
    for index in range(7):
        picked = torch.zeros(1, 1, 7, dtype=torch.float16)
        picked[0, 0, index] = 1
        layer = replace(experts, gate_up_EGH=gate_up[:, index : index + 1].contiguous())
        layer = replace(layer, down_EHF=torch.ones(1, 1, 1, dtype=torch.float16))
        actual = native.experts(
            torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), layer
        )
        torch.testing.assert_close(actual[0, 0], values[index].half().float(), equal_nan=True)


def test_weights_moved_in_place_are_seen(native: NativeExperts) -> None:
    case = make_case(tokens=3, experts=4, top_k=2, hidden=16, width=8, biased=True)
    native.experts(*case.arguments)
    for tensor in (case.experts.gate_up_EGH, case.experts.down_EHF):
        tensor.data = tensor.double().neg().to(torch.bfloat16)
    assert case.experts.down_bias_EH is not None
    case.experts.down_bias_EH.add_(1)
    torch.testing.assert_close(
        native.experts(*case.arguments),
        reference.experts_forward(*case.arguments),
        rtol=1e-4,
        atol=1e-5,
    )


def test_torch_defaults_do_not_matter(native: NativeExperts) -> None:
    case = make_case(3, 4, 2, hidden=16, width=8, activation="gelu gate", normed=True)
    expected = native.experts(*case.arguments)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            actual = native.experts(*replace(case, experts=replace(case.experts)).arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("expert", [-2, 4])
@pytest.mark.parametrize("activation", ["silu gate", "clamped interleaved gate"])
def test_refuses_an_expert_that_does_not_exist(
    native: NativeExperts, activation: str, expert: int
) -> None:
    case = make_case(2, 4, 2, hidden=8, width=8, activation=activation)
    case.ids[1, 0] = expert
    with pytest.raises(ValueError, match=r"expert ids must be in \[0, 4\), or -1"):
        native.experts(*case.arguments)


def test_gradients_come_from_the_reference() -> None:
    case = make_case(tokens=4, experts=3, top_k=2, hidden=8, width=6)
    gradients = []
    for forward in (kernels.experts_forward, reference.experts_forward):
        hidden = case.hidden.clone().requires_grad_()
        forward(hidden, case.ids, case.weights, case.experts).sum().backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)
    with torch.no_grad():
        output = kernels.experts_forward(hidden, case.ids, case.weights, case.experts)
    assert not output.requires_grad


def test_float64_layers_use_the_reference() -> None:
    case = make_case(tokens=4, experts=3, top_k=2, hidden=8, width=6, dtype=torch.float64)
    expected = reference.experts_forward(*case.arguments)
    assert torch.equal(kernels.experts_forward(*case.arguments), expected)
