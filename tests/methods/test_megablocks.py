"""MegaBlocks behind a stand-in for its package: our use of it, the choice, and the refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import BackendError
from moe.errors import ProfileError
from moe.loader import expert_backend
from moe.methods.megablocks import INSTALL, check
from moe.methods.megablocks.backend import MegaBlocksExperts, make
from moe.settings.profile import load_profile
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
        monkeypatch.setattr("moe.methods.megablocks.backend.version", lambda _: version)

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
    backend = make(CUDA)
    assert backend.name == "megablocks"
    case = make_case(3, 4, 2, hidden=8, width=8, dtype=torch.bfloat16)
    backend.check([case.experts])
    assert_close(backend.forward(*case.arguments), case)


def test_refuses_weights_that_it_cannot_multiply(install: Callable[..., None]) -> None:
    install()
    backend = make(CUDA)
    whole = make_case(1, 2, 1, hidden=8, width=8).experts
    with pytest.raises(BackendError, match=r"bfloat16 weights only.*layer 0 are torch.float32"):
        backend.check([whole])
    planes = quantize_case(make_case(1, 2, 1, hidden=8, width=8), 32, [8, 8])[0]
    with pytest.raises(BackendError, match="layer 0 are bit planes"):
        backend.check([planes])


def test_says_what_is_missing(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted() -> None:
        make(CUDA)

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

    monkeypatch.setattr("moe.methods.megablocks.backend.version", absent)
    with pytest.raises(BackendError, match=r"MegaBlocks is not installed; .*--no-deps"):
        wanted()


def test_the_recipe_of_the_doctor_is_that_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "version_of", lambda _: None)
    assert check.check_megablocks().remedy == f"optional, {INSTALL}"
    assert "pip install --no-deps --no-build-isolation megablocks==" in INSTALL


def test_megablocks_is_never_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "megablocks").mkdir()
    (tmp_path / "megablocks/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "megablocks-0.10.0.dist-info").mkdir()
    (tmp_path / "megablocks-0.10.0.dist-info/METADATA").write_text("Version: 0.10.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = check.check_megablocks()
    assert found.status == "warning"
    assert found.detail == "0.10.0 without its CUDA extension megablocks_ops: not usable"


def test_it_needs_a_gpu() -> None:
    with pytest.raises(BackendError, match=r"megablocks needs a CUDA device.*runs on 'cpu'"):
        make(torch.device("cpu"))
    profile = load_profile(None, {"kernels.backend": "megablocks", "device": "cpu"}).profile
    with pytest.raises(ProfileError, match=r"kernels\.backend: megablocks needs .* set it to auto"):
        expert_backend(profile, torch.device("cpu"))
