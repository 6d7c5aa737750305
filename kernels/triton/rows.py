"""The small operations of a decoder layer on the GPU, each in one launch.

`add_norm` adds what a part of a layer gives to the residual stream and norms the sum; `place_heads`
turns what projections give into queries, and into keys and values in their blocks; `gated` is an
activation with a gate; `add_shared` joins routed experts and a shared one; `store` only writes keys
and values, for prompts. All arithmetic is float32 and is rounded once, when it is written.

Shape legend: T rows, H hidden, N key/value heads, D and V sizes of keys and values, P blocks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention import BLOCK
from kernels.triton.language import (
    INTERPRETED,
    activate,
    overlap_options,
    wait_for_others,
)

_STORED = 256 if INTERPRETED else 16  # rows of a program of `store`
_COLUMNS = 1024
"""Columns of a program of `gated` and `add_shared`."""
PLACED = 8
"""Rows of a program of `place_heads` where there are many: starting one takes longer than a row."""
_MANY_HEADS = 1 << 15  # of all rows, from which on a GPU's multiprocessors have enough of those
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True}
"""Options of every launch for Triton's compiler."""
RMS, CENTERED = 1, 2
STYLES = {"half": 1, "pairs": 2, "pairs_to_halves": 3}


class RowNorm(NamedTuple):
    """``x / sqrt(mean(x^2) + eps) * weight + bias``; the mean is taken off first if centered.

    Attributes:
        weight, bias: (H,) float32; None adds nothing.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool

    @property
    def kind(self) -> int:
        return CENTERED if self.centered else RMS


class Turn(NamedTuple):
    """A rotary embedding of ``size`` numbers of a head from ``begin`` on.

    Attributes:
        cos, sin: (T, size / 2) float32, of each row's position; rows may lie apart.
    """

    style: Literal["half", "pairs", "pairs_to_halves"]
    begin: int
    size: int
    cos: Tensor
    sin: Tensor


class Heads(NamedTuple):
    """Rows of heads as a projection gives them, and what becomes of them.

    Attributes:
        rows: (T, heads, size), numbers of a head side by side, heads at any distance.
        bias: (heads * size,) float32 that the projection has not added; None: nothing.
        norm: of each head; its kind and weights.
        norm_late: the norm comes behind the rotation.
    """

    rows: Tensor
    bias: Tensor | None = None
    norm: RowNorm | None = None
    turn: Turn | None = None
    norm_late: bool = False


def add_norm(
    x: Tensor,
    rows: Tensor | None,
    scale: float,
    post: RowNorm | None,
    norm: RowNorm | None,
    exact: Tensor,
    rounded: Tensor,
) -> None:
    """``x += scale * post(rows)`` in place, and the norm of the sum.

    Args:
        x: (T, H) float32, contiguous.
        rows: (T, H), contiguous, of any float dtype; None: nothing is added.
        post, norm: None is no norm.
        exact: (T, H) float32, takes the norm.
        rounded: (T, H), takes it in its own dtype.
    """
    tokens, hidden = x.shape
    add_norm_kernel[tokens,](
        x, rows, _weight(post), _bias(post), _weight(norm), _bias(norm), exact, rounded,
        scale, 0.0 if post is None else post.eps, 0.0 if norm is None else norm.eps,
        H=hidden, ADD=rows is not None, POST=_kind(post), NORM=_kind(norm),
        HAS_POST_BIAS=_bias(post) is not None, HAS_BIAS=_bias(norm) is not None,
        WIDTH=triton.next_power_of_2(hidden), num_warps=_warps(hidden), **OPTIONS,
        **overlap_options(),
    )  # fmt: skip


def place_heads(
    query: Heads, key: Heads, value: Heads, output: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    """Turn queries, and write turned keys and values where their tokens' blocks are.

    Args:
        output: (T, Q, size), contiguous: takes the queries.
        keys, values: (P, N, 64, D) and (P, N, 64, V): the pool's memory of a layer.
        slots: (T,) int64: the block of each row times 64, plus its place there; -1: nowhere.
    """
    turn = query.turn or key.turn or value.turn
    parts = (query, key, value)
    heads = [part.rows.shape[1] for part in parts]
    sizes = [part.rows.shape[2] for part in parts]
    biases = [part.bias for part in parts]
    norms = [part.norm for part in parts]
    tokens = output.shape[0]
    rows = PLACED if tokens * sum(heads) >= _MANY_HEADS else 1  # the bits of a row are the same
    place_kernel[triton.cdiv(tokens, rows), sum(heads)](
        *(part.rows for part in parts), *biases,
        *map(_weight, norms), *map(_bias, norms), *(0.0 if n is None else n.eps for n in norms),
        None if turn is None else turn.cos, None if turn is None else turn.sin,
        0 if turn is None else turn.cos.stride(0),
        output, keys, values, slots, tokens, keys.stride(0), values.stride(0),
        *(stride for part in parts for stride in part.rows.stride()[:2]),
        Q=heads[0], N=heads[1], QD=sizes[0], D=sizes[1], V=sizes[2],
        BIASES=tuple(bias is not None for bias in biases),
        NORMS=tuple(map(_kind, norms)),
        NORM_BIASES=tuple(_bias(norm) is not None for norm in norms),
        LATE=tuple(part.norm_late for part in parts),
        STYLES=tuple(0 if part.turn is None else STYLES[part.turn.style] for part in parts),
        BEGINS=tuple(0 if part.turn is None else part.turn.begin for part in parts),
        SIZE=2 if turn is None else turn.size,
        WIDTH_Q=_width(sizes[0]), WIDTH_D=_width(sizes[1]), WIDTH_V=_width(sizes[2]),
        BLOCK=BLOCK, ROWS=rows, num_warps=1, **OPTIONS, **overlap_options(),
    )  # fmt: skip


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write rows (T, N, D) and (T, N, V), heads at any distance; see `place_heads`."""
    count = key.shape[0] * key.shape[1]
    store_kernel[triton.cdiv(count, _STORED),](
        key, value, keys, values, slots, count, keys.stride(0), values.stride(0),
        *key.stride()[:2], *value.stride()[:2],
        N=key.shape[1], D=key.shape[2], V=value.shape[2], ROWS=_STORED,
        WIDTH_D=_width(key.shape[2]), WIDTH_V=_width(value.shape[2]), BLOCK=BLOCK,
        num_warps=4, **OPTIONS,
    )  # fmt: skip


def gated(first: Tensor, up: Tensor, curve: int, output: Tensor) -> None:
    """``curve(first) * up``: all (T, I), the output contiguous and in its own dtype.

    Args:
        first, up: rows may lie apart.
        curve: its number in kernels/cpu/activation.py.
    """
    tokens, width = output.shape
    gated_kernel[tokens, triton.cdiv(width, _COLUMNS)](
        first, up, output, first.stride(0), up.stride(0), width, CURVE=curve, COLUMNS=_COLUMNS,
        num_warps=4, **OPTIONS, **overlap_options(),
    )  # fmt: skip


def add_shared(
    routed: Tensor, scale: float, shared: Tensor, gate: Tensor | None, output: Tensor
) -> None:
    """``scale * routed + sigmoid(gate) * shared``: all (T, H) and contiguous, of any float dtype.

    Args:
        gate: (T, 1), contiguous; None: the shared expert has none.
        output: may be `routed`.
    """
    tokens, hidden = output.shape
    add_shared_kernel[tokens, triton.cdiv(hidden, _COLUMNS)](
        routed, shared, gate, output, scale, H=hidden, GATED=gate is not None, COLUMNS=_COLUMNS,
        num_warps=4, **OPTIONS, **overlap_options(),
    )  # fmt: skip


def _weight(norm: RowNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _bias(norm: RowNorm | None) -> Tensor | None:
    return None if norm is None else norm.bias


def _kind(norm: RowNorm | None) -> int:
    return 0 if norm is None else norm.kind


def _width(size: int) -> int:
    return max(2, triton.next_power_of_2(size))


def _warps(size: int) -> int:
    return min(16, max(1, triton.next_power_of_2(size) // 512))


@triton.jit
def normed(x, used, weight, bias, at, eps, SIZE: tl.constexpr, KIND: tl.constexpr,
           HAS_BIAS: tl.constexpr):  # fmt: skip
    """The norm of a row of SIZE numbers, zeros behind them."""
    if KIND == 2:
        x = tl.where(used, x - tl.sum(x, 0) / SIZE, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    x = x * tl.load(weight + at, mask=used, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=used, other=0.0)
    return x


@triton.jit
def add_norm_kernel(
    x, rows, post_weight, post_bias, weight, bias, exact, rounded, scale, post_eps, eps,
    H: tl.constexpr, ADD: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
    HAS_POST_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    column = tl.arange(0, WIDTH)
    used = column < H
    at = tl.program_id(0).to(tl.int64) * H + column
    whole = tl.load(x + at, mask=used, other=0.0)
    if ADD:
        more = tl.load(rows + at, mask=used, other=0.0).to(tl.float32)
        if POST > 0:
            more = normed(more, used, post_weight, post_bias, column, post_eps, H, POST,
                          HAS_POST_BIAS)  # fmt: skip
        whole += scale * more
        tl.store(x + at, whole, mask=used)
    if NORM > 0:
        whole = normed(whole, used, weight, bias, column, eps, H, NORM, HAS_BIAS)
    tl.store(exact + at, whole, mask=used)
    tl.store(rounded + at, whole.to(rounded.dtype.element_ty), mask=used)


@triton.jit
def turned_head(
    rows, bias, weight, norm_bias, eps, cos, sin, angles,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, LATE: tl.constexpr, STYLE: tl.constexpr, BEGIN: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """One head of one row, as `Heads` says: float32, of WIDTH numbers."""
    i = tl.arange(0, WIDTH)
    used = i < SIZE
    x = tl.load(rows + i, mask=used, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + i, mask=used, other=0.0)
    if STYLE > 0:
        # Each number of the turned part is made of two: `low` at the cosine, `high` beside it.
        HALF: tl.constexpr = TURNED // 2
        j = i - BEGIN
        inside = (j >= 0) & (j < TURNED)
        if STYLE == 2:
            is_first, angle = j % 2 == 0, j // 2
            low, high = 2 * angle, 2 * angle + 1
        else:
            is_first = j < HALF
            angle = tl.where(is_first, j, j - HALF)
            if STYLE == 3:
                low, high = 2 * angle, 2 * angle + 1
            else:
                low, high = angle, angle + HALF
        low, high = tl.where(inside, BEGIN + low, 0), tl.where(inside, BEGIN + high, 0)
        first = tl.load(rows + low, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(rows + high, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            first += tl.load(bias + low, mask=inside, other=0.0)
            second += tl.load(bias + high, mask=inside, other=0.0)
        if NORM > 0 and not LATE:
            if NORM == 2:
                mean = tl.sum(x, 0) / SIZE
                x = tl.where(used, x - mean, 0.0)
                first, second = first - mean, second - mean
            factor = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
            x = x * factor * tl.load(weight + i, mask=used, other=0.0)
            first = first * factor * tl.load(weight + low, mask=inside, other=0.0)
            second = second * factor * tl.load(weight + high, mask=inside, other=0.0)
            if NORM_BIAS:
                x += tl.load(norm_bias + i, mask=used, other=0.0)
                first += tl.load(norm_bias + low, mask=inside, other=0.0)
                second += tl.load(norm_bias + high, mask=inside, other=0.0)
        angle = tl.where(inside, angle, 0)
        c = tl.load(cos + angles + angle, mask=inside, other=0.0)
        s = tl.load(sin + angles + angle, mask=inside, other=0.0)
        made = tl.where(is_first, first * c - second * s, second * c + first * s)
        x = tl.where(inside, made, x)
    if NORM > 0 and (LATE or STYLE == 0):
        x = normed(x, used, weight, norm_bias, i, eps, SIZE, NORM, NORM_BIAS)
    return x


@triton.jit
def place_row(
    row, part, query, key, value, query_bias, key_bias, value_bias,
    query_weight, key_weight, value_weight,
    query_norm_bias, key_norm_bias, value_norm_bias, query_eps, key_eps, value_eps,
    cos, sin, angle_row, output, keys, values, slots, k_block, v_block,
    q_token, q_head, k_token, k_head, v_token, v_head,
    Q: tl.constexpr, N: tl.constexpr, QD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BIASES: tl.constexpr, NORMS: tl.constexpr, NORM_BIASES: tl.constexpr, LATE: tl.constexpr,
    STYLES: tl.constexpr, BEGINS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH_Q: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query, a key or a value."""
    angles = row * angle_row
    # Names differ by branch: Triton wants one shape of a name.
    if part < Q:
        q = turned_head(
            query + row * q_token + part * q_head, query_bias + part * QD if BIASES[0] else None,
            query_weight, query_norm_bias, query_eps, cos, sin, angles,
            QD, WIDTH_Q, BIASES[0], NORMS[0], NORM_BIASES[0], LATE[0], STYLES[0], BEGINS[0], SIZE,
        )  # fmt: skip
        q_at = tl.arange(0, WIDTH_Q)
        q_to = output + (row * Q + part) * QD + q_at
        tl.store(q_to, q.to(output.dtype.element_ty), mask=q_at < QD)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            block, within = slot // BLOCK, slot % BLOCK
            if part < Q + N:
                head = part - Q
                k = turned_head(
                    key + row * k_token + head * k_head, key_bias + head * D if BIASES[1] else None,
                    key_weight, key_norm_bias, key_eps, cos, sin, angles,
                    D, WIDTH_D, BIASES[1], NORMS[1], NORM_BIASES[1], LATE[1], STYLES[1], BEGINS[1],
                    SIZE,
                )  # fmt: skip
                k_at = tl.arange(0, WIDTH_D)
                k_to = keys + block * k_block + (head * BLOCK + within) * D + k_at
                tl.store(k_to, k.to(keys.dtype.element_ty), mask=k_at < D)
            else:
                head = part - Q - N
                v = turned_head(
                    value + row * v_token + head * v_head,
                    value_bias + head * V if BIASES[2] else None,
                    value_weight, value_norm_bias, value_eps, cos, sin, angles,
                    V, WIDTH_V, BIASES[2], NORMS[2], NORM_BIASES[2], LATE[2], STYLES[2], BEGINS[2],
                    SIZE,
                )  # fmt: skip
                v_at = tl.arange(0, WIDTH_V)
                v_to = values + block * v_block + (head * BLOCK + within) * V + v_at
                tl.store(v_to, v.to(values.dtype.element_ty), mask=v_at < V)


@triton.jit(do_not_specialize=["tokens"])
def place_kernel(
    query, key, value, query_bias, key_bias, value_bias,
    query_weight, key_weight, value_weight,
    query_norm_bias, key_norm_bias, value_norm_bias, query_eps, key_eps, value_eps,
    cos, sin, angle_row, output, keys, values, slots, tokens, k_block, v_block,
    q_token, q_head, k_token, k_head, v_token, v_head,
    Q: tl.constexpr, N: tl.constexpr, QD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BIASES: tl.constexpr, NORMS: tl.constexpr, NORM_BIASES: tl.constexpr, LATE: tl.constexpr,
    STYLES: tl.constexpr, BEGINS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH_Q: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one head of `ROWS` rows, one after the other."""
    wait_for_others(PDL)
    begin, part = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    for more in range(0, ROWS):
        row = begin + more
        if ROWS == 1 or row < tokens:
            place_row(
                row, part, query, key, value, query_bias, key_bias, value_bias,
                query_weight, key_weight, value_weight,
                query_norm_bias, key_norm_bias, value_norm_bias, query_eps, key_eps, value_eps,
                cos, sin, angle_row, output, keys, values, slots, k_block, v_block,
                q_token, q_head, k_token, k_head, v_token, v_head,
                Q, N, QD, D, V, BIASES, NORMS, NORM_BIASES, LATE, STYLES, BEGINS, SIZE,
                WIDTH_Q, WIDTH_D, WIDTH_V, BLOCK,
            )  # fmt: skip


@triton.jit
def store_kernel(
    key, value, keys, values, slots, count, k_block, v_block, k_token, k_head, v_token, v_head,
    N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    WIDTH_D: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < count
    token, head = (row // N).to(tl.int64), row % N
    slot = tl.load(slots + token, mask=used, other=0)
    block, at = slot // BLOCK, head * BLOCK + slot % BLOCK
    d, v = tl.arange(0, WIDTH_D)[None, :], tl.arange(0, WIDTH_V)[None, :]
    k_mask, v_mask = used[:, None] & (d < D), used[:, None] & (v < V)
    k = tl.load(key + (token * k_token + head * k_head)[:, None] + d, mask=k_mask)
    k_to = keys + (block * k_block + at * D)[:, None] + d
    tl.store(k_to, k.to(keys.dtype.element_ty), mask=k_mask)
    own = tl.load(value + (token * v_token + head * v_head)[:, None] + v, mask=v_mask)
    v_to = values + (block * v_block + at * V)[:, None] + v
    tl.store(v_to, own.to(values.dtype.element_ty), mask=v_mask)


@triton.jit
def gated_kernel(
    first, up, output, first_row, up_row, width,
    CURVE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = column < width
    a = tl.load(first + row * first_row + column, mask=used, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + column, mask=used, other=0.0).to(tl.float32)
    made = activate(a, b, 1.0, float("inf"), 0.0, CURVE, True)
    tl.store(output + row * width + column, made.to(output.dtype.element_ty), mask=used)


@triton.jit
def add_shared_kernel(
    routed, shared, gate, output, scale,
    H: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used, at = column < H, row * H + column
    more = tl.load(shared + at, mask=used, other=0.0).to(tl.float32)
    if GATED:
        more = more / (1.0 + tl.exp(-tl.load(gate + row).to(tl.float32)))
    sums = scale * tl.load(routed + at, mask=used, other=0.0).to(tl.float32) + more
    tl.store(output + at, sums.to(output.dtype.element_ty), mask=used)
