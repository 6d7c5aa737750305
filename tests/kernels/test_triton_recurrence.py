"""Recurrent layers in Triton's interpreter: equal to float64, the same bits however cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import recurrence
from kernels.backends import enable_recurrence
from kernels.triton import recurrence as on_triton
from kernels.triton.language import INTERPRETED
from tests.amounts import amount
from tests.kernels.recurrence_cases import (
    Case,
    ConvolutionCase,
    Expected,
    GatedCase,
    ScanCase,
    assert_close,
    cases,
    make_convolution,
    make_gated,
    make_scan,
    run,
)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
SMALL = cases(2, 6, [1, 3, 8, 17, 33])


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    """CPU tensors run on Triton's kernels, interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "_kernels", dict(recurrence._kernels))
        recurrence.register("cpu", on_triton.run)
        yield


@given(case=SMALL)
def test_equals_the_float64_reference(case: Case) -> None:
    assert_close(run(case), Expected.of(case))


@settings(max_examples=amount(20, quick=6))
@given(case=SMALL, data=st.data())
def test_cuts_and_company_change_no_bits(case: Case, data: st.DataObject) -> None:
    out, state = run(case)
    cut = data.draw(st.integers(0, case.tokens))
    index = data.draw(st.integers(0, len(out) - 1))
    alone = case.sequence(index)
    first, now = run(alone.part(0, cut, alone.tensors[-1]))
    last, now = run(alone.part(cut, case.tokens, now))
    assert torch.equal(torch.cat([first, last], 1), out[index : index + 1])
    assert torch.equal(now, state[index : index + 1])


WIDE: list[Case] = [  # several programs a head, and all of a large state
    make_gated(1, 2, 1, 1, 256, 20),
    make_gated(1, 2, 1, 2, 128, 40, by_key=True),
    make_scan(1, 2, 1, 1, 20, 256),
    make_scan(1, 2, 1, 1, 150, 16, by_channel=True),
    make_convolution(1, 35, 300, 4, 4, bias=True, silu=True),
]


@pytest.mark.parametrize("case", WIDE)
def test_several_programs_compute_a_head(case: Case) -> None:
    assert_close(run(case), Expected.of(case))


@pytest.mark.parametrize("case", WIDE)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_state_is_a_state_of_zeros(case: Case, tokens: int) -> None:
    part = case.part(0, tokens, torch.zeros_like(case.tensors[-1]))
    begun = run(part)
    if isinstance(part, ConvolutionCase):
        x, weight, state = part.tensors
        kept = state.shape[-1]
        fresh = recurrence.convolve(x, weight, part.bias, kept=kept, **part.options)
    else:
        call = recurrence.gated if isinstance(part, GatedCase) else recurrence.scan
        fresh = call(*part.tensors[:-1], **part.options)
    assert all(map(torch.equal, fresh, begun))


def test_a_gated_rule_without_beta_adds_whole_values() -> None:
    case = make_gated(1, 3, 1, 1, 8, 8, corrected=False)
    q, k, v, decay, beta, state = case.tensors
    ones = GatedCase((q, k, v, decay, torch.ones_like(beta), state), corrected=False)
    plain = recurrence.gated(q, k, v, decay, None, state, **ones.options)
    assert all(map(torch.equal, plain, run(ones)))


@pytest.mark.parametrize("by_key", [False, True])
def test_a_decay_that_underflows_forgets_all(by_key: bool) -> None:
    case = make_gated(1, 2, 1, 1, 8, 8, by_key=by_key)
    q, k, v, decay, beta, state = case.tensors
    strong = GatedCase((q, k, v, torch.full_like(decay, -1e30), beta, state * 1e30))
    fresh = GatedCase((q, k, v, torch.full_like(decay, -1e30), beta, state * 0))
    assert all(map(torch.equal, run(strong), run(fresh)))


def test_strided_inputs_of_half_precision() -> None:
    case = make_gated(2, 3, 2, 2, 8, 12)
    half = tuple(t.bfloat16() for t in case.tensors[:5])
    moved = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in half)
    wide = tuple(t.float() for t in half)
    state = case.tensors[5]
    assert all(map(torch.equal, run(GatedCase((*moved, state))), run(GatedCase((*wide, state)))))
    scanned = make_scan(1, 2, 1, 2, 8, 16, whole=False)
    half = tuple(t.bfloat16() for t in scanned.tensors)
    assert all(map(torch.equal, run(ScanCase(half)), run(ScanCase(tuple(t.float() for t in half)))))


@triton.jit
def curves_kernel(x, exps, softpluses, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WIDTH)
    tl.store(exps + at, on_triton.exp(tl.load(x + at)))
    tl.store(softpluses + at, on_triton.softplus(tl.load(x + at)))


def test_curves_are_exact_to_the_last_bits() -> None:
    """Errors of decays add up over many tokens."""
    ends = torch.tensor([0.0, -1e-7, -float("inf"), -1e30, 89.0, float("nan")])
    x = torch.cat([torch.linspace(-87, 88, 4096 - len(ends)), ends])
    exps, softpluses = torch.empty(2, len(x)).unbind()
    curves_kernel[(1,)](x, exps, softpluses, WIDTH=len(x))
    exact = x.double().exp()
    assert ((exps - exact).abs() <= 1.2e-7 * exact)[:-4].all()
    assert exps[-4:].nan_to_num(posinf=2.0, nan=3.0).tolist() == [0.0, 0.0, 2.0, 3.0]
    exact = torch.where(x > 40, x.double(), exact.log1p())
    assert ((softpluses - exact).abs() <= 4e-7 * exact)[: -len(ends)].all()


def test_devices_without_triton_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert enable_recurrence(torch.device("cuda")) == ""
    assert "no kernels for 'xpu'" in enable_recurrence(torch.device("xpu"))
    monkeypatch.setattr("kernels.triton.find_spec", lambda _: None)
    assert "triton is not installed" in enable_recurrence(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="no kernel of recurrent layers"):
        recurrence.compute(recurrence.Recurrence((), (), (), ()), None, torch.device("xpu"))
