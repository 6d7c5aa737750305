"""When CUDA tensors go to Triton, and what is said where they do not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels.triton import triton_status
from kernels.triton.experts import supports, supports_matrix
from tests.kernels.kernel_cases import make_case
from tests.kernels.plane_cases import quantize_matrix


def test_what_is_left_to_the_reference() -> None:
    case = make_case(1, 2, 1, hidden=8, width=8, dtype=torch.float64)
    assert not supports(case.hidden, case.experts)
    assert not supports(case.hidden.float(), case.experts)
    strided = replace(
        make_case(1, 2, 1, hidden=8, width=8).experts, down_EHF=torch.ones(2, 8, 16)[..., ::2]
    )
    assert not supports(case.hidden.float(), strided)
    matrix = quantize_matrix(torch.randn(16, 64), 64)
    assert not supports_matrix(torch.ones(1, 64), matrix)  # arranged for CPUs
    matrix = matrix.for_device(torch.device("cuda"))
    assert supports_matrix(torch.ones(1, 64), matrix)
    shifted = torch.cat([matrix.scales[:1], matrix.scales])[1:]
    assert not supports_matrix(torch.ones(1, 64), replace(matrix, scales=shifted))
    assert not supports_matrix(torch.ones(1, 64, dtype=torch.float64), matrix)


def test_cuda_tensors_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    stand_in = SimpleNamespace(
        supports=lambda *_: True,
        supports_matrix=lambda *_: True,
        experts_forward=lambda *arguments: calls.append(arguments),
        linear_forward=lambda *arguments: calls.append(arguments),
    )
    monkeypatch.setattr(kernels, "triton_kernels", lambda: stand_in)
    case = make_case(1, 2, 1, hidden=8, width=8)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    with torch.no_grad():
        kernels.experts_forward(on_gpu, case.ids, case.weights, case.experts)  # type: ignore[arg-type]
        kernels.linear_forward(on_gpu, "matrix")  # type: ignore[arg-type]
    assert calls == [(on_gpu, case.ids, case.weights, case.experts, None), (on_gpu, "matrix")]


def test_status_says_why_triton_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_status()["name"] == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_status() == {"name": "reference", "reason": "torch finds no CUDA device"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert triton_status()["reason"] == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert "torch is built for ROCm" in triton_status()["reason"]
    monkeypatch.setattr("kernels.triton.find_spec", lambda _: None)
    assert triton_status()["reason"] == "the package triton is not installed"
