"""The choice of a model's kernels, by name and device."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import BackendError, choose_backend, reference

CUDA = torch.device("cuda")


def test_other_backends() -> None:
    cpu = torch.device("cpu")
    auto = choose_backend("auto", cpu, kernels.experts_forward)
    assert auto.forward is kernels.experts_forward
    assert {"name": auto.name, "reason": auto.reason} == kernels.backend_status()
    plain = choose_backend("reference", cpu, kernels.experts_forward)
    assert plain.forward is reference.experts_forward
    with pytest.raises(BackendError, match=r"triton needs a CUDA device.*runs on 'cpu'"):
        choose_backend("triton", cpu, kernels.experts_forward)


def test_triton_wanted_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.triton.find_spec", lambda _: None)
    with pytest.raises(BackendError, match="triton cannot run here: the package triton is not"):
        choose_backend("triton", CUDA, kernels.experts_forward)
    auto = choose_backend("auto", CUDA, kernels.experts_forward)
    assert (auto.name, auto.forward) == ("reference", kernels.experts_forward)
