"""The largest numbers of rows, by the compiled library: a stable sort says what they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import row_top_k
from kernels.cpu.build import load_library
from kernels.cpu.dense import MOST_CHOICES, NativeNorms
from tests.kernels.kernel_cases import TARGET_PARAMS

_NUMBERS = [0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("target", TARGET_PARAMS)
@given(data=st.data())
def test_the_largest_come_first_and_of_equal_ones_the_first(
    target: str, data: st.DataObject
) -> None:
    native, draw = NativeNorms(load_library((target,))), data.draw
    columns = draw(st.sampled_from([1, 3, 16, 17, 64, 130, MOST_CHOICES]))
    k = draw(st.integers(1, min(columns, 40)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kinds = torch.tensor(draw(st.lists(st.sampled_from(_NUMBERS), min_size=1, max_size=4)))
    rows = kinds[torch.randint(len(kinds), (3, columns), generator=random)]
    rows[1] = torch.randn(columns, generator=random)
    values, ids = native.top_k(rows, k)
    order = rows.double()
    order[rows == torch.inf], order[rows.isnan()] = 1e300, torch.inf
    assert torch.equal(ids, order.sort(dim=1, descending=True, stable=True).indices[:, :k])
    torch.testing.assert_close(values, rows.gather(1, ids), rtol=0, atol=0, equal_nan=True)


def test_what_the_library_does_not_take_goes_to_torch() -> None:
    for x in (torch.rand(2, MOST_CHOICES + 1), torch.rand(2, 9).double(), torch.rand(4, 0, 9)):
        values, ids = row_top_k(x, 3)
        assert torch.equal(values, x.topk(3).values)
        assert torch.equal(ids, x.topk(3).indices)
    weights = torch.rand(2, 9, requires_grad=True)
    row_top_k(weights, 3)[0].sum().backward()
    assert weights.grad is not None
    with pytest.raises(RuntimeError, match="out of range"):
        row_top_k(torch.rand(2, 9), 10)
