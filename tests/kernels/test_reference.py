"""The reference kernel: right to float64, differentiable, and clear about bad input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from kernels.reference import ExpertWeights, experts_forward
from tests.kernels.kernel_cases import Case, assert_close, cases, make_case


@given(cases())
def test_equals_the_float64_oracle(case: Case) -> None:
    assert_close(experts_forward(*case.arguments), case)


def test_gradients_are_right() -> None:
    case = make_case(tokens=5, experts=3, top_k=2, hidden=4, width=3, biased=True, unused=0.3)
    layer = case.experts
    assert layer.gate_up_bias_EG is not None
    assert layer.down_bias_EH is not None
    inputs = [
        tensor.double().requires_grad_()
        for tensor in (
            case.hidden,
            case.weights,
            layer.gate_up_EGH,
            layer.down_EHF,
            layer.gate_up_bias_EG,
            layer.down_bias_EH,
        )
    ]

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        hidden, weights, gate_up, down, gate_up_bias, down_bias = tensors
        experts = ExpertWeights(gate_up, down, layer.activation, gate_up_bias, down_bias)
        return experts_forward(hidden, case.ids, weights, experts)

    assert torch.autograd.gradcheck(forward, inputs)


def test_unused_slots_do_not_matter() -> None:
    case = make_case(tokens=6, experts=4, top_k=3, hidden=8, width=8, unused=0.5, seed=3)
    poisoned = case.weights.masked_fill(case.ids < 0, float("nan"))
    expected = experts_forward(*case.arguments)
    actual = experts_forward(case.hidden, case.ids, poisoned, case.experts)
    assert torch.equal(actual, expected)


def test_sizes_of_a_layer() -> None:
    experts = make_case(1, experts=3, top_k=1, hidden=8, width=5, dtype=torch.bfloat16).experts
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (3, 8, 5)
    assert experts.expert_bytes == 2 * 3 * 8 * 5
    biased = make_case(1, experts=3, top_k=1, hidden=8, width=5, biased=True).experts
    assert biased.expert_bytes == 4 * (3 * 8 * 5 + 10 + 8)


def test_layers_are_compared_by_identity() -> None:
    experts = make_case(1, experts=3, top_k=1, hidden=8, width=5).experts
    assert experts != dataclasses.replace(experts)
    assert len({experts, dataclasses.replace(experts)}) == 2


@pytest.mark.parametrize("expert", [-2, 4])
def test_refuses_an_expert_that_does_not_exist(expert: int) -> None:
    case = make_case(tokens=2, experts=4, top_k=2, hidden=8, width=8)
    case.ids[1, 0] = expert
    with pytest.raises(ValueError, match=r"expert ids must be in \[0, 4\), or -1"):
        experts_forward(*case.arguments)


def test_refuses_shapes_that_do_not_fit() -> None:
    case = make_case(tokens=2, experts=4, top_k=2, hidden=8, width=8)
    hidden, ids, weights, experts = case.arguments
    with pytest.raises(ValueError, match=r"hidden must be \(T, 8\).*got \(2, 7\)"):
        experts_forward(hidden[:, 1:], ids, weights, experts)
    with pytest.raises(ValueError, match=r"ids and weights must both be \(T, K\) with T=2"):
        experts_forward(hidden, ids, weights[:1], experts)
    with pytest.raises(ValueError, match=r"down_EHF must be \(E, H, F\) with E=4 and H=8"):
        ExpertWeights(experts.gate_up_EGH, experts.down_EHF[:3], experts.activation)
    with pytest.raises(ValueError, match=r"must have one dtype"):
        ExpertWeights(experts.gate_up_EGH, experts.down_EHF.half(), experts.activation)
