"""Rows of keys and values in blocks: what is read is what was written, up to its precision; and
attention over blocks equals attention over the rows that they stand for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.build import load_library
from kernels.cpu.dense import BlockRows, NativeAttention
from kernels.cpu.kv import BLOCK, NativeKV, RowFormat
from tests.kernels.kernel_cases import TARGET_PARAMS

FORMATS = [RowFormat(32), RowFormat(16), RowFormat(8), RowFormat(8, True), RowFormat(4, True)]
_CANARY = 0x5A


class Blocks:
    """Rows of some heads in blocks that lie apart, with canaries between them."""

    def __init__(self, rows_NTD: Tensor, form: RowFormat) -> None:
        heads, count, size = rows_NTD.shape
        self.bytes = heads * BLOCK * form.row_bytes(size)
        number = -(-count // BLOCK)
        self.memory = torch.full((number, self.bytes + 64), _CANARY, dtype=torch.uint8)
        self.list = np.array([self.memory[i].data_ptr() for i in reversed(range(number))], np.int64)
        self.table = self.list.ctypes.data

    def whole(self) -> bool:
        return bool((self.memory[:, self.bytes :] == _CANARY).all())


@pytest.fixture(scope="module", params=TARGET_PARAMS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rounded(rows: Tensor, bits: int) -> float:
    """The largest error that a number may have beside the largest of its group."""
    return {32: 0.0, 16: 2.0**-8, 8: 0.75 / 127, 4: 0.75 / 7}[bits]


@given(data=st.data())
def test_rows_come_back_however_they_are_written(target: str, data: st.DataObject) -> None:
    kv, draw = NativeKV(load_library((target,))), data.draw
    form, heads = draw(st.sampled_from(FORMATS)), draw(st.integers(1, 3))
    size, count = draw(st.sampled_from([1, 7, 16, 32, 48, 64, 96, 128])), draw(st.integers(1, 150))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(heads, count, size, generator=random)
    whole, parts = Blocks(rows, form), Blocks(rows, form)
    kv.write(rows, whole.table, 0, form)
    cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=3))})
    for begin, end in pairwise(cuts):
        kv.write(
            rows.transpose(1, 2).contiguous().transpose(1, 2)[:, begin:end],
            parts.table,
            begin,
            form,
        )
    assert whole.whole()
    assert parts.whole()
    found = kv.read(whole.table, heads, size, count, form)
    assert torch.equal(found, kv.read(parts.table, heads, size, count, form))
    if form.bits >= 16:
        assert torch.equal(found, rows if form.bits == 32 else rows.bfloat16().float())
        return
    # Codes of turned rows spread the error over the row.
    error = (found - rows).square().mean().sqrt()
    assert error <= rounded(rows, form.bits) * rows.abs().max()


@pytest.mark.parametrize("form", FORMATS[2:])
def test_a_row_that_is_not_finite_stays_so_and_zeros_stay_zeros(form: RowFormat) -> None:
    kv, rows = NativeKV(load_library()), torch.randn(1, 3, 64)
    rows[0, 1, 5], rows[0, 2] = float("inf"), 0.0
    blocks = Blocks(rows, form)
    kv.write(rows, blocks.table, 0, form)
    found = kv.read(blocks.table, 1, 64, 3, form)[0]
    assert found[0].isfinite().all()
    assert not found[1].isfinite().all()
    assert torch.equal(found[2], rows[0, 2])


def test_turned_codes_of_four_bits_bear_an_outlier() -> None:
    kv, rows = NativeKV(load_library()), torch.randn(1, 50, 128)
    rows[..., 3] *= 30
    errors = []
    for turned in (False, True):
        form = RowFormat(4, turned)
        blocks = Blocks(rows, form)
        kv.write(rows, blocks.table, 0, form)
        found = kv.read(blocks.table, 1, 128, 50, form)
        errors.append(float((found - rows)[..., :32].square().mean()))
    assert errors[1] < 0.5 * errors[0]


@given(data=st.data())
def test_attention_reads_blocks(target: str, data: st.DataObject) -> None:
    library, draw = load_library((target,)), data.draw
    kv, native = NativeKV(library), NativeAttention(library)
    forms = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(FORMATS))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 8]))
    sizes = draw(st.sampled_from([(16, 16), (64, 64), (96, 40), (7, 33)]))
    queries = draw(st.sampled_from([1, 2, 33]))
    tokens = queries + draw(st.sampled_from([0, 1, 63, 256, 500]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q = torch.randn(kv_heads * group, queries, sizes[0], generator=random)
    rows = [torch.randn(kv_heads, tokens, size, generator=random) for size in sizes]
    position = torch.arange(tokens - queries, tokens)
    first = draw(st.sampled_from([torch.zeros_like(position), (position - 99).clamp_min(0)]))
    blocks = [Blocks(own, form) for own, form in zip(rows, forms, strict=True)]
    for own, form, to in zip(rows, forms, blocks, strict=True):
        kv.write(own, to.table, 0, form)
    k, v = (
        kv.read(to.table, kv_heads, size, tokens, form)
        for to, size, form in zip(blocks, sizes, forms, strict=True)
    )
    seen = BlockRows((blocks[0].table, blocks[1].table), kv_heads, sizes, tokens, forms)
    how = first, 0.3, 4.0, torch.randn(len(q), generator=random)
    actual = native.attend_blocks(q, seen, *how)
    expected = native.attend(q, k, v, *how)
    if max(form.bits for form in forms) <= 16:  # all operands may be rounded to bf16
        assert (actual - expected).norm() < 0.01 * expected.norm()
    elif forms[0].turned or forms[1].turned:  # turned back after the sum, not before it
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(actual, expected)
    cut = queries // 2
    assert torch.equal(native.attend_blocks(q[:, cut:], seen, first[cut:], *how[1:]), actual[cut:])
