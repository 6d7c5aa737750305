"""Attention to sequences in buffers of their own, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernels.triton import attention
from kernels.triton.language import INTERPRETED
from tests.kernels.attention_cases import AttentionCase, cases

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")


@settings(max_examples=12)
@given(cases())
def test_attention_is_that_of_float64_alone_and_in_company(case: AttentionCase) -> None:
    actual = case.run()
    torch.testing.assert_close(actual.double(), case.expected(), rtol=2e-5, atol=2e-5)
    for row, position in enumerate(case.positions):
        assert torch.equal(case.row(row).run()[0], actual[row])
        if position < 0:
            assert not actual[row].any()


@settings(max_examples=10)
@given(cases())
def test_rows_are_stored_at_their_positions_and_nowhere_else(case: AttentionCase) -> None:
    first, other = case.buffers[0]
    count, heads = len(case.positions), first.shape[0]
    keys = torch.randn(count, heads, first.shape[2]).to(first.dtype)
    values = torch.randn(count, heads, other.shape[2]).to(first.dtype)
    expected = [(a.clone(), b.clone()) for a, b in case.buffers]
    for row, position in enumerate(case.positions):
        if position >= 0:
            expected[row][0][:, position] = keys[row]
            expected[row][1][:, position] = values[row]
    attention.store(keys, values, case.places(), case.caches - 1)
    for pair, wanted in zip(case.buffers, expected, strict=True):
        assert all(map(torch.equal, pair, wanted))
