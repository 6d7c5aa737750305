"""Recurrent kernels: equal to float64, the same bits alone and in company, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import recurrence
from kernels.cpu.build import load_library
from kernels.cpu.recurrence import use_library
from tests.amounts import amount
from tests.kernels.kernel_cases import TARGET_PARAMS
from tests.kernels.recurrence_cases import (
    Case,
    ConvolutionCase,
    Expected,
    GatedCase,
    assert_close,
    cases,
    make_convolution,
    make_gated,
    make_scan,
    run,
)

CASES = cases(3, 40, [1, 3, 8, 16, 17, 33, 64, 100])


@pytest.fixture(scope="module", params=TARGET_PARAMS, autouse=True)
def library(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "_kernels", dict(recurrence._kernels))
        use_library(load_library((request.param,)))
        yield


@given(case=CASES)
def test_equals_the_float64_reference(case: Case) -> None:
    assert_close(run(case), Expected.of(case))


@given(case=CASES, data=st.data())
def test_cuts_and_company_change_no_bits(case: Case, data: st.DataObject) -> None:
    out, state = run(case)
    cuts = data.draw(st.lists(st.integers(0, case.tokens), max_size=3).map(sorted))
    for index in range(len(out)):
        alone = case.sequence(index)
        now, parts = alone.tensors[-1], [out[:1, :0]]
        for begin, end in zip([0, *cuts], [*cuts, case.tokens], strict=True):
            part, now = run(alone.part(begin, end, now))
            parts.append(part)
        assert torch.equal(torch.cat(parts, 1), out[index : index + 1])
        assert torch.equal(now, state[index : index + 1])


LARGE: list[Case] = [
    make_gated(2, 20, 2, 2, 128, 128),
    make_gated(1, 20, 3, 1, 128, 200, by_key=True),
    make_scan(1, 20, 1, 8, 64, 128),
    make_scan(2, 20, 1, 1, 1000, 16, by_channel=True),
    make_convolution(2, 20, 3000, 4, 4, bias=True, silu=True),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", LARGE)
def test_threads_do_not_change_bits(case: Case) -> None:
    alone = run(case)
    torch.set_num_threads(3)
    for mine, theirs in zip(run(case), alone, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", LARGE)
def test_no_state_is_a_state_of_zeros(case: Case) -> None:
    zeros = torch.zeros_like(case.tensors[-1])
    for end in (0, 1, case.tokens):
        begun = run(case.part(0, end, zeros))
        part = case.part(0, end, zeros)
        if isinstance(part, ConvolutionCase):
            x, weight, _ = part.tensors
            fresh = recurrence.convolve(x, weight, part.bias, kept=zeros.shape[-1], **part.options)
        else:
            call = recurrence.gated if isinstance(part, GatedCase) else recurrence.scan
            fresh = call(*part.tensors[:-1], **part.options)
        assert all(map(torch.equal, fresh, begun))


LONG = amount(1 << 15, quick=1 << 13)


@cache
def long(kind: str) -> Expected:
    """Many tokens whose states forget little."""
    if kind in ("head", "key"):
        case: Case = make_gated(1, LONG, 1, 1, 32, 16, by_key=kind == "key", strength=1e-4)
    else:
        case = make_scan(1, LONG, 1, 1, 16, 16, by_channel=kind == "Mamba", strength=1e-4)
    return Expected.of(case)


@pytest.mark.parametrize("kind", ["head", "key", "Mamba 2", "Mamba"])
def test_long_sequences_drift_no_further_than_float32(kind: str) -> None:
    expected = long(kind)
    assert_close(run(expected.case), expected)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_decay_that_underflows_forgets_all(by_key: bool) -> None:
    case = make_gated(1, 5, 1, 2, 16, 32, by_key=by_key)
    q, k, v, decay, beta, state = case.tensors
    strong = GatedCase((q, k, v, torch.full_like(decay, -1e30), beta, state * 1e30))
    out, after = run(strong)
    assert out.isfinite().all()
    k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt())[:, -1].repeat_interleave(2, 1)
    expected = k[..., None] * (beta[..., None] * v)[:, -1, :, None]
    assert (after - expected).abs().max() < 1e-6


def test_strided_inputs_are_read_where_they_lie() -> None:
    case = make_gated(2, 9, 2, 2, 16, 24)
    spread = [torch.stack([t, t], -1)[..., 0] for t in case.tensors]
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in case.tensors[:5]]
    for tensors in (spread, [*moved, case.tensors[5]]):
        again = run(GatedCase(tuple(tensors), scale=case.scale))
        assert all(map(torch.equal, again, run(case)))


def test_half_precision_inputs_are_widened() -> None:
    case = make_scan(1, 6, 1, 2, 8, 16, whole=False)
    half = [t.bfloat16() for t in case.tensors]
    wide = [t.float() for t in half]
    assert all(
        map(
            torch.equal,
            recurrence.scan(*half, softplus=True),
            recurrence.scan(*wide, softplus=True),
        )
    )
