"""Attention over blocks of keys and values, in Triton's interpreter, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton.language import INTERPRETED
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
