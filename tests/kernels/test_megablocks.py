"""MegaBlocks behind a stand-in for its package: our use of it, the choice, and the refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels import BackendError, choose_backend, reference
from kernels.megablocks import MegaBlocksExperts
from tests.kernels.dequantized_cases import quantize_case
from tests.kernels.kernel_cases import ACTIVATIONS, assert_close, make_case

CUDA = torch.device("cuda")


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """grouped_gemm.ops.gmm in plain torch, as strict as the real one about its arguments."""
    assert a.dtype == b.dtype == torch.bfloat16
    assert a.ndim == 2 and b.ndim == 3 and a.is_contiguous() and b.is_contiguous()  # noqa: PT018
    assert batch_sizes.device.type == "cpu"
    assert batch_sizes.dtype == torch.int64
    assert batch_sizes.shape == b.shape[:1]
    assert int(batch_sizes.sum()) == a.shape[0] > 0
    assert a.shape[1] == b.shape[2 if trans_b else 1]
    parts = zip(a.split(batch_sizes.tolist()), b, strict=True)
    return torch.cat([rows @ (weight.T if trans_b else weight) for rows, weight in parts])


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a MegaBlocks of some version where imports look for it."""

    def put(version: str = "0.10.0", extension: bool = True, grouped_gemm: bool = True) -> None:
        util = SimpleNamespace(
            grouped_gemm_is_available=lambda: grouped_gemm, ops=SimpleNamespace(gmm=gmm)
        )
        package = ModuleType("megablocks")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, "megablocks", package)
        name = "megablocks.grouped_gemm_util"
        monkeypatch.setitem(sys.modules, name, util if extension else None)
        monkeypatch.setattr("kernels.megablocks.version", lambda _: version)

    return put


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 9),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    biased=st.booleans(),
    normed=st.booleans(),
    unused=st.sampled_from((0.0, 0.4, 1.0)),
    one_expert=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_float64_oracle(
    install: Callable[..., None],
    tokens: int,
    activation: str,
    biased: bool,
    normed: bool,
    unused: float,
    one_expert: bool,
    seed: int,
) -> None:
    install()
    case = make_case(
        tokens,
        5,
        3,
        hidden=24,
        width=16,
        dtype=torch.bfloat16,
        activation=activation,
        biased=biased,
        normed=normed,
        unused=unused,
        one_expert=one_expert,
        seed=seed,
    )
    assert_close(MegaBlocksExperts()(*case.arguments), case)


def test_refuses_an_expert_that_does_not_exist(install: Callable[..., None]) -> None:
    install()
    case = make_case(2, 4, 2, hidden=8, width=8, dtype=torch.bfloat16)
    for expert in (-2, 4):
        case.ids[1, 0] = expert
        with pytest.raises(ValueError, match=r"expert ids must be in \[0, 4\), or -1"):
            MegaBlocksExperts()(*case.arguments)


def test_runs_a_model_that_asks_for_it(install: Callable[..., None]) -> None:
    install()
    backend = choose_backend("megablocks", CUDA, kernels.experts_forward)
    assert backend.name == "megablocks"
    case = make_case(3, 4, 2, hidden=8, width=8, dtype=torch.bfloat16)
    backend.check([case.experts])
    assert_close(backend.forward(*case.arguments), case)


def test_refuses_weights_that_it_cannot_multiply(install: Callable[..., None]) -> None:
    install()
    backend = choose_backend("megablocks", CUDA, kernels.experts_forward)
    whole = make_case(1, 2, 1, hidden=8, width=8).experts
    with pytest.raises(BackendError, match=r"bfloat16 weights only.*layer 0 are torch.float32"):
        backend.check([whole])
    planes = quantize_case(make_case(1, 2, 1, hidden=8, width=8), 32, [8, 8])[0]
    with pytest.raises(BackendError, match="layer 0 are bit planes"):
        backend.check([planes])
    choose_backend("reference", CUDA, kernels.experts_forward).check([planes])


def test_says_what_is_missing(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted() -> None:
        choose_backend("megablocks", CUDA, kernels.experts_forward)

    install(extension=False)
    with pytest.raises(BackendError, match=r"0\.10\.0 is installed, but cannot be imported.*CUDA"):
        wanted()
    install(grouped_gemm=False)
    with pytest.raises(BackendError, match="needs the package grouped_gemm"):
        wanted()
    for version in ("0.6.1", "0.11.0", "1.0"):
        install(version)
        with pytest.raises(BackendError, match=rf">= 0\.7\.0 and < 0\.11, found {version}"):
            wanted()
    install("0.9.0")
    wanted()

    def absent(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("kernels.megablocks.version", absent)
    with pytest.raises(BackendError, match=r"MegaBlocks is not installed; .*--no-deps"):
        wanted()


def test_other_backends() -> None:
    cpu = torch.device("cpu")
    auto = choose_backend("auto", cpu, kernels.experts_forward)
    assert auto.forward is kernels.experts_forward
    assert {"name": auto.name, "reason": auto.reason} == kernels.backend_status()
    plain = choose_backend("reference", cpu, kernels.experts_forward)
    assert plain.forward is reference.experts_forward
    for name in ("triton", "megablocks"):
        with pytest.raises(BackendError, match=f"{name} needs a CUDA device.*runs on 'cpu'"):
            choose_backend(name, cpu, kernels.experts_forward)


def test_triton_wanted_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.triton.find_spec", lambda _: None)
    with pytest.raises(BackendError, match="triton cannot run here: the package triton is not"):
        choose_backend("triton", CUDA, kernels.experts_forward)
    auto = choose_backend("auto", CUDA, kernels.experts_forward)
    assert (auto.name, auto.forward) == ("reference", kernels.experts_forward)
