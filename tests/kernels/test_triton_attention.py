"""Attention over blocks of keys and values, in Triton's interpreter, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton import attention
from kernels.triton.language import INTERPRETED
from tests.amounts import deep_except
from tests.kernels.attention_cases import AttentionCase, cases

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")


def row_by_row(a: Any, b: Any, dtype: Any = None) -> Any:
    """A product whose rows do not depend on where they stand, as of matrix instructions: the
    library behind numpy adds in another order in another row."""
    return np.einsum("ij,jk->ik", a, b, dtype=dtype)


@settings(max_examples=20)
@given(cases(), st.data())
def test_attention_is_that_of_float64_alone_and_in_company(
    case: AttentionCase, data: st.DataObject
) -> None:
    """A query's bits depend on neither other sequences nor on the queries that come with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton.runtime.interpreter.np.matmul", row_by_row)
        actual = case.run()
        torch.testing.assert_close(actual.double(), case.expected(), rtol=2e-5, atol=2e-5)
        at = 0
        for index, count in enumerate(case.counts):
            rows = max(count, 1) if case.decoding else count
            begin = data.draw(st.integers(0, rows - 1))
            own = case.part(index, begin, rows).run()
            assert torch.equal(own, actual[at + begin : at + rows])
            if begin:
                assert torch.equal(case.part(index, 0, begin).run(), actual[at : at + begin])
            at += rows


@pytest.mark.deep
@pytest.mark.parametrize("reach", deep_except([200], [None, 200]))
def test_prompts_have_the_same_bits_however_their_keys_are_split(
    reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as many programs as there are segments, or by one that goes on; whole, and in chunks that
    begin in another segment."""
    torch.manual_seed(0)
    rows = [(torch.randn(1, n, 16), torch.randn(1, n, 20)) for n in (300, 140)]
    case = AttentionCase(
        torch.randn(52, 3, 16), None, rows, [50, 2], reach, 0.3, None, torch.randn(3), False
    )
    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", row_by_row)
    splits = list[int]()
    launch = attention.attend_kernel.__class__.__getitem__

    def noted(kernel: Any, grid: Any) -> Any:
        if kernel is attention.attend_kernel:
            splits.append(grid[2])
        return launch(kernel, grid)

    monkeypatch.setattr(attention.attend_kernel.__class__, "__getitem__", noted)
    found = []
    for programs in (0, 1 << 20):
        monkeypatch.setattr(attention, "_PROGRAMS", programs)
        found.append(case.run())
        chunks = case.part(0, 0, 30).run(), case.part(0, 30, 50).run(), case.part(1, 0, 2).run()
        assert torch.equal(torch.cat(chunks), found[-1])
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), case.expected(), rtol=2e-5, atol=2e-5)
    monkeypatch.setattr(attention, "_SPLIT_BYTES", 1000)
    assert torch.equal(case.run(), found[0])
    assert splits == [1, 1, 1, 1, 3, 3, 3, 2, 1]
