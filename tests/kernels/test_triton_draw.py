"""Tokens drawn by Triton kernels, in the interpreter, are those that torch draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from kernels.triton import draw as kernels
from kernels.triton.language import INTERPRETED
from moe.sampling import batch, host
from moe.sampling.batch import Row, draw_batch
from moe.sampling.params import SamplingParams
from tests.amounts import amount
from tests.launches import Launches
from tests.moe.sampling.test_batch import rows

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")


@settings(max_examples=amount(30, quick=10))
@given(st.lists(rows(), min_size=1, max_size=5), st.booleans())
def test_kernels_draw_what_torch_draws(
    batched: list[tuple[list[float], Row]], bfloat: bool
) -> None:
    dtype = torch.bfloat16 if bfloat else torch.float32
    logits = [torch.tensor([values], dtype=dtype) for values, _ in batched]
    given = [row for _, row in batched]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "on_host", lambda _: False)
        patch.setattr(batch, "_FIRST_GUESS", 2)
        expected = draw_batch(logits, given)
        patch.setattr(batch, "_kernels_for", lambda _: kernels)
        patch.setattr(kernels, "CHUNK", 4)
        assert [str(drawn) for drawn in draw_batch(logits, given)] == [str(e) for e in expected]


@pytest.mark.parametrize("company", [1, 3])
def test_kernels_draw_of_many_tokens(company: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With candidates that fill no power of two, and rows by which nothing may be drawn."""
    monkeypatch.setattr(host, "on_host", lambda _: False)
    logits = torch.randn(company, 5000) * 3
    logits[1:2, 7] = float("nan")
    ways = [{"top_p": 0.9}, {"top_k": 70, "min_p": 0.01}, {"top_p": 0.999, "temperature": 1.5}]
    for own in ways:
        params = SamplingParams(**own)  # type: ignore[arg-type]
        for uniform in (0.0, 0.31, 0.97, 1 - 2**-53):
            given = [Row(params, uniform)] * company
            found = []
            for way in (None, kernels):
                monkeypatch.setattr(batch, "_kernels_for", lambda _, way=way: way)
                found.append([str(drawn) for drawn in draw_batch([logits], given)])
            assert found[0] == found[1]


@pytest.mark.parametrize("own", [{"top_p": 0.9}, {"top_k": 70}])
def test_a_batch_is_drawn_in_few_launches(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks, numbers, keys, sums, candidates and tokens; and what is read back, in one piece."""
    monkeypatch.setattr(host, "on_host", lambda _: False)
    monkeypatch.setattr(batch, "_kernels_for", lambda _: kernels)
    given = [Row(SamplingParams(**own), uniform) for uniform in (0.1, 0.7, 0.2)]
    logits = 8 * torch.randn(3, 5000)  # few tokens have most of the mass
    launches = Launches()
    run = InterpretedFunction.run

    def counted(*args: Any, **how: Any) -> object:
        launches.names.append("kernel")
        with _disable_current_modes():  # what the interpreter does is no launch
            return run(*args, **how)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    with launches:
        draw_batch([logits], given)
    assert launches.names.count("kernel") == 2
    assert len(launches.names) <= 8, launches.names


NUMBERS = st.sampled_from(
    [float("-inf"), -7.5, -1.0, -0.0, 0.0, 0.5, 2.0, float("inf"), float("nan")]
)


@settings(max_examples=amount(60, quick=20))
@given(
    st.integers(1, 30).flatmap(
        lambda size: st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=1)
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_peaks_are_those_of_numpy(
    values: list[list[float]], dtype: torch.dtype, apart: bool
) -> None:
    """Of any number of programs a row, one call after the other: each leaves its counters at 0."""
    logits = torch.tensor(values, dtype=dtype)
    logits = logits.repeat(1, 2)[:, : logits.shape[1]] if apart else logits
    best = logits.float().numpy().argmax(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PEAK_CHUNK", 4)
        found = kernels.peaks_of(logits)
    assert found[0].tolist() == best.tolist()
    expected = logits.double().numpy()[range(len(best)), best]
    np.testing.assert_array_equal(found[1].view(torch.float64).numpy(), expected)
    assert not any(bool(counters.any()) for counters in kernels._counters.values())


def test_greedy_tokens_are_one_launch_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "on_host", lambda _: False)
    logits = torch.randn(3, 9000).bfloat16()
    given = [Row(SamplingParams(temperature=0.0), 0.0)] * 3
    expected = draw_batch([logits], given)
    monkeypatch.setattr(batch, "_kernels_for", lambda _: kernels)
    assert draw_batch([logits], given) == expected
    launches = Launches()
    with monkeypatch.context() as patch, launches:
        patch.setattr(InterpretedFunction, "run", lambda *_, **__: launches.names.append("kernel"))
        batch._Peaks(logits, kernels)
    assert launches.names == ["kernel"]


def test_kernels_are_tried_before_they_draw(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cpu")
    batch._draws_alike.cache_clear()
    assert batch._draws_alike(kernels, device)
    draw = kernels.draw

    def wrong(*given: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, enough = draw(*given, **how)
        return ids ^ 1, enough

    monkeypatch.setattr(kernels, "draw", wrong)
    batch._draws_alike.cache_clear()
    assert not batch._draws_alike(kernels, device)
    assert "tokens are drawn by torch: on cpu, our kernels draw others" in caplog.text
    monkeypatch.setattr(kernels, "draw", draw)
    peaks_of = kernels.peaks_of
    monkeypatch.setattr(kernels, "peaks_of", lambda logits: peaks_of(logits.flip(1)))
    batch._draws_alike.cache_clear()
    assert not batch._draws_alike(kernels, device)
    batch._draws_alike.cache_clear()
