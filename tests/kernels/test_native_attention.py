"""Attention of prompts by the compiled library: right, and a row's bits the same in any company."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import choose_kernel
from kernels.cpu.dense import NativeAttention
from tests.kernels.kernel_cases import AMX_TARGET_PARAMS, load_target


@pytest.fixture(scope="module", params=AMX_TARGET_PARAMS)
def native(request: pytest.FixtureRequest) -> NativeAttention:
    return NativeAttention(load_target(request.param))


def expected(
    q_QTD: Tensor, k_NLD: Tensor, v_NLV: Tensor, first_T: Tensor, scale: float,
    softcap: float | None, sinks_Q: Tensor | None,
) -> Tensor:  # fmt: skip
    """(T, Q, V) float64."""
    (heads, queries, _), (kv_heads, keys, _) = q_QTD.shape, k_NLD.shape
    k, v = (x.double().repeat_interleave(heads // kv_heads, 0) for x in (k_NLD, v_NLV))
    scores = q_QTD.double() @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(keys)
    seen = (at >= first_T[:, None]) & (at <= torch.arange(keys - queries, keys)[:, None])
    scores = scores.masked_fill(~seen, -float("inf"))
    if sinks_Q is not None:
        scores = torch.cat([scores, sinks_Q.double()[:, None, None].expand(-1, queries, 1)], -1)
    return (scores.softmax(-1)[..., :keys] @ v).transpose(0, 1)


@given(data=st.data())
def test_attention_is_what_float64_says_and_rows_do_not_mix(
    native: NativeAttention, data: st.DataObject
) -> None:
    draw = data.draw
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 8, 71]))
    size, value_size = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    queries = draw(st.sampled_from([1, 2, 7, 33, 70]))
    keys = queries + draw(st.sampled_from([0, 0, 1, 200, 256, 500]))
    q = torch.randn(queries, kv_heads * group, size, generator=random).transpose(0, 1)
    room = draw(st.integers(0, 3))  # buffers are longer than what is in them
    k = torch.randn(kv_heads, keys + room, size, generator=random)[:, :keys]
    v = torch.randn(kv_heads, keys + room, value_size, generator=random)[:, :keys]
    position = torch.arange(keys - queries, keys)
    window = draw(st.sampled_from([None, 1, 3, 100, 300]))
    first = torch.zeros_like(position) if window is None else (position - window + 1).clamp_min(0)
    how = (
        draw(st.sampled_from([size**-0.5, 0.1, 2.0])),
        draw(st.sampled_from([None, 3.0])),
        torch.randn(len(q), generator=random) if draw(st.booleans()) else None,
    )
    actual = native.attend(q, k, v, first, *how)
    torch.testing.assert_close(
        actual.double(), expected(q, k, v, first, *how), rtol=1e-4, atol=2e-5
    )
    cut = draw(st.integers(0, queries - 1))
    assert torch.equal(native.attend(q[:, cut:], k, v, first[cut:], *how), actual[cut:])
    end = keys - queries + cut + 1
    alone = native.attend(q[:, cut : cut + 1], k[:, :end], v[:, :end], first[cut : cut + 1], *how)
    assert torch.equal(alone, actual[cut : cut + 1])


# Two bf16 parts of a number would make it 9e-7.
def test_it_is_as_exact_as_float32(native: NativeAttention) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, size, generator=random) for size in (64, 64, 48))
    how = torch.zeros(300, dtype=torch.long), 64**-0.5, None, None
    error = native.attend(q, k, v, *how).double() - expected(q, k, v, *how)
    assert error.square().mean().sqrt() < 1e-7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(native: NativeAttention, bad: float) -> None:
    q, k, v = torch.randn(2, 40, 24), torch.randn(1, 40, 24), torch.randn(1, 40, 40)
    how = torch.zeros(40, dtype=torch.long), 0.2
    clean = native.attend(q, k, v, *how)
    q[1, 7, 3] = bad
    actual = native.attend(q, k, v, *how)
    assert not actual[7, 1].isfinite().any()
    clean[7, 1] = actual[7, 1] = 0
    assert torch.equal(actual, clean)


def test_threads_change_nothing(native: NativeAttention) -> None:
    q, k, v = torch.randn(4, 300, 32), torch.randn(2, 400, 32), torch.randn(2, 400, 16)
    first, threads = torch.zeros(300, dtype=torch.long), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = native.attend(q, k, v, first, 0.2)
        torch.set_num_threads(3)
        assert torch.equal(native.attend(q, k, v, first, 0.2), alone)
    finally:
        torch.set_num_threads(threads)


def test_what_the_library_does_not_read_is_not_supported() -> None:
    rows = torch.randn(2, 3, 4)
    assert NativeAttention.supports(rows, rows.transpose(0, 1))
    for other in (rows.bfloat16(), rows.to("meta"), rows.transpose(1, 2)):
        assert not NativeAttention.supports(rows, other)
    wanted = rows.clone().requires_grad_()
    assert not NativeAttention.supports(wanted)
    with torch.no_grad():
        assert NativeAttention.supports(wanted)


# Blocks that lie before the window of every query have no memory at all.
_WINDOW = """
import numpy as np, torch
from kernels.cpu import choose_kernel
from kernels.cpu.dense import BlockRows
from kernels.cpu.kv import RowFormat

native, (heads, size, keys) = choose_kernel()[0], (2, 64, 8192)
form = RowFormat(8, False)
block = np.random.default_rng(0).integers(0, 64, 64 * heads * form.row_bytes(size)).astype(np.uint8)
table = np.full(keys // 64, block.ctypes.data, np.int64)
table[: (keys - 512) // 64] = 0
query, first = torch.randn(4, 16, size), torch.arange(keys - 16, keys) - 127

def attend(table, end):
    rows = BlockRows((table.ctypes.data,) * 2, heads, (size, size), end, (form, form))
    return native.attention.attend_blocks(query, rows, first + end - keys, size**-0.5)

assert torch.equal(attend(table, keys), attend(table[-16:], 1024))
"""


@pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")
def test_keys_before_the_window_of_all_queries_are_not_read() -> None:
    command = [sys.executable, "-c", _WINDOW]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
