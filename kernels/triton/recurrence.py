"""Recurrent layers on the GPU, token by token; the operations are those of kernels/recurrence.py.

A program computes some columns of values (a gated rule) or some channels (a scan) of one head of
one sequence. It holds their states in registers, in float32, and loops over the tokens. Short
convolutions have no such order: a program computes a block of tokens and channels.

Sums have one order for each shape of a layer: numbers of tokens and strides never choose a machine
code of their own, so that a sequence has the same bits in any company and cut anywhere.

Legend as in kernels/recurrence.py: K keys, V values, P channels, N states, C channels of a
convolution, S inputs that it keeps. Strides (``_s``, ``_t``, ``_h``) are from sequence to sequence,
token to token and head to head.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.recurrence import ConvolutionCall, GatedCall, Recurrence, ScanCall, register
from kernels.triton.language import masked_by

_WARP_STATES = 1024  # floats of a state that a warp holds: 32 registers a thread
_MOST_COLUMNS = 64
_LEAST_COLUMNS = 8  # of a gated rule: 32 bytes of each row, which GPUs read at once

# Of a thread: twelve warps fit a multiprocessor. Without a bound, some versions of ptxas choose 128
# and let a state spill.
_MOST_REGISTERS = 168
_REGISTERS = 1 << 16  # of a multiprocessor, which has to hold all warps of a program

_OPTIONS = {"num_stages": 2, "enable_fp_fusion": True}


def gated_tile(keys: int, values: int) -> dict[str, Any]:
    """Constants and options of `gated_kernel` for heads of this shape."""
    padded = triton.next_power_of_2(keys)
    columns = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, _WARP_STATES // padded))
    columns = min(columns, triton.next_power_of_2(values))
    warps = max(1, padded * columns // _WARP_STATES)
    shape = {"K": keys, "V": values, "WIDTH_K": padded, "COLUMNS": columns}
    registers = min(_MOST_REGISTERS, _REGISTERS // (32 * warps))
    return {**shape, "num_warps": warps, "maxnreg": registers, **_OPTIONS}


def scan_tile(channels: int, states: int) -> dict[str, Any]:
    """The same of `scan_kernel`."""
    padded = triton.next_power_of_2(states)
    rows = min(_MOST_COLUMNS, _WARP_STATES // padded, triton.next_power_of_2(channels))
    shape = {"P": channels, "N": states, "WIDTH_N": padded, "ROWS": rows}
    return {**shape, "num_warps": 1, **_OPTIONS}


def convolution_tile(tokens: int) -> dict[str, Any]:
    """The same of `convolution_kernel`; each output is computed alone, by the same operations."""
    return {"TOKENS": 1 if tokens == 1 else 4, "CHANNELS": 128, "num_warps": 4, **_OPTIONS}


def run(call: Recurrence, before: Tensor | None, after: Tensor, out: Tensor) -> None:
    """See `kernels.recurrence.Kernel`."""
    begun = before is not None
    states = (after if before is None else before), after, out, begun
    match call:
        case GatedCall():
            _launch_gated(call, *states)
        case ScanCall():
            _launch_scan(call, *states)
        case ConvolutionCall():
            _launch_convolution(call, *states)
        case _:
            raise TypeError(f"no kernel for a {type(call).__name__}")


def _launch_gated(call: GatedCall, before: Tensor, after: Tensor, out: Tensor, begun: bool) -> None:
    batch, heads, keys, values = call.state
    tile = gated_tile(keys, values)
    if after.numel() == 0:
        return
    gated_kernel[batch * heads, triton.cdiv(values, tile["COLUMNS"])](
        *call.rows, before, after, out, *(n for rows in call.rows for n in _strides(rows)),
        out.shape[1], heads, call.group, call.scale, int(begun),
        CORRECTED=call.corrected, BY_KEY=call.by_key, NORMALISED=call.normalised,
        HAS_BETA=call.rows[4] is not None, **tile,
    )  # fmt: skip


def _launch_scan(call: ScanCall, before: Tensor, after: Tensor, out: Tensor, begun: bool) -> None:
    batch, heads, channels, states = call.state
    tile = scan_tile(channels, states)
    if after.numel() == 0:
        return
    scan_kernel[batch * heads, triton.cdiv(channels, tile["ROWS"])](
        *call.rows, *call.kept, before, after, out,
        *(n for rows in call.rows for n in _strides(rows)),
        out.shape[1], heads, call.group, call.least, call.most, int(begun),
        BY_CHANNEL=call.by_channel, SOFTPLUS=call.softplus, HAS_Z=call.rows[4] is not None,
        HAS_D=call.kept[1] is not None, HAS_BIAS=call.kept[2] is not None, **tile,
    )  # fmt: skip


def _launch_convolution(
    call: ConvolutionCall, before: Tensor, after: Tensor, out: Tensor, begun: bool
) -> None:
    (x,), (weight, bias) = call.rows, call.kept
    assert x is not None
    assert weight is not None
    batch, channels, states = call.state
    tokens = out.shape[1]
    tile = convolution_tile(tokens)
    blocks = max(1, triton.cdiv(tokens, tile["TOKENS"]))  # the first one writes the state, too
    if batch * channels == 0:
        return
    convolution_kernel[batch, triton.cdiv(channels, tile["CHANNELS"]), blocks](
        x, weight, bias, before, after, out, *_strides(x)[:2], tokens, channels, int(begun),
        TAPS=weight.shape[1], S=states, SILU=call.silu, HAS_BIAS=bias is not None, **tile,
    )  # fmt: skip


def _strides(rows: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if rows is None else rows.stride()[:3]


def _one_code(kernel: Any) -> Any:
    """`triton.jit`, with one code whatever the numbers and addresses are divisible by."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    plain = [name for name in names if not name.isupper()]
    return triton.jit(kernel, do_not_specialize=plain, do_not_specialize_on_alignment=plain)


@triton.jit
def exp(x):
    """``e^x`` to about one last bit. The GPU's own is less exact, and errors of decays add up over
    many tokens. With n near x log2(e), it is 2^n e^(x - n log(2)); log(2) comes in two parts."""
    bounded = tl.minimum(x, 88.5, propagate_nan=tl.PropagateNan.ALL)
    bounded = tl.maximum(bounded, -87.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.minimum(tl.floor(bounded * 1.4426950408889634 + 0.5), 127.0)
    r = tl.fma(n, -0.693359375, bounded)
    r = tl.fma(n, 2.12194440e-4, r)
    y = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    y = tl.fma(y, r, 1.0 / 120)
    y = tl.fma(y, r, 1.0 / 24)
    y = tl.fma(y, r, 1.0 / 6)
    y = tl.fma(y, r, 0.5)
    y = tl.fma(y, r, 1.0)
    y = tl.fma(y, r, 1.0)
    y = y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    y = tl.where(x < -87.0, 0.0, y)
    return tl.where(x > 88.5, float("inf"), y)


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + t), t = e^-|x|, and log(1 + t) = 2 atanh(t / (2 + t)): a
    series in squares of at most 1/9."""
    t = exp(-tl.abs(x))
    s = t / (2.0 + t)
    z = s * s
    y = tl.fma(z, 1.0 / 15, 1.0 / 13)
    y = tl.fma(y, z, 1.0 / 11)
    y = tl.fma(y, z, 1.0 / 9)
    y = tl.fma(y, z, 1.0 / 7)
    y = tl.fma(y, z, 1.0 / 5)
    y = tl.fma(y, z, 1.0 / 3)
    y = tl.fma(y, z, 1.0)
    return tl.maximum(x, 0.0) + 2.0 * s * y


@triton.jit
def time_step(dt, bias, least, most, SOFTPLUS: tl.constexpr):
    dt = dt + bias
    if SOFTPLUS:
        dt = softplus(dt)
    return tl.minimum(tl.maximum(dt, least), most)


@triton.jit
def floats(at, mask):
    """float32, zeros where the mask is not."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@_one_code
def gated_kernel(
    q, k, v, decay, beta, before, after, out,
    q_s, q_t, q_h, k_s, k_t, k_h, v_s, v_t, v_h, decay_s, decay_t, decay_h, beta_s, beta_t, beta_h,
    tokens, heads, group, scale, begun,
    CORRECTED: tl.constexpr, BY_KEY: tl.constexpr, NORMALISED: tl.constexpr,
    HAS_BETA: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    WIDTH_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    sequence, head = item // heads, item % heads
    key, column = tl.arange(0, WIDTH_K), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = key < K, column < V
    inside = in_k[:, None] & in_v[None, :]
    at = item * (K * V) + key[:, None] * V + column[None, :]
    state = floats(before + at, masked_by(inside, begun != 0))
    q += sequence * q_s + head // group * q_h
    k += sequence * k_s + head // group * k_h
    v += sequence * v_s + head * v_h
    decay += sequence * decay_s + head * decay_h
    if HAS_BETA:
        beta += sequence * beta_s + head * beta_h
    out += (sequence * tokens * heads + head) * V
    for _ in range(tokens):
        q_now, k_now = floats(q + key, in_k), floats(k + key, in_k)
        if NORMALISED:
            q_now = q_now / tl.sqrt_rn(tl.sum(q_now * q_now, 0) + 1e-6)
            k_now = k_now / tl.sqrt_rn(tl.sum(k_now * k_now, 0) + 1e-6)
        q_now = q_now * scale
        new = floats(v + column, in_v)
        if BY_KEY:
            state = state * exp(floats(decay + key, in_k))[:, None]
        else:
            state = state * exp(tl.load(decay).to(tl.float32))
        if CORRECTED:
            new = new - tl.sum(state * k_now[:, None], 0)
        if HAS_BETA:
            new = new * tl.load(beta).to(tl.float32)
            beta += beta_t
        state = tl.fma(k_now[:, None], new[None, :], state)
        tl.store(out + column, tl.sum(state * q_now[:, None], 0), mask=in_v)
        q += q_t
        k += k_t
        v += v_t
        decay += decay_t
        out += heads * V
    tl.store(after + at, state, mask=inside)


@_one_code
def scan_kernel(
    x, dt, b, c, z, a, d, bias, before, after, out,
    x_s, x_t, x_h, dt_s, dt_t, dt_h, b_s, b_t, b_h, c_s, c_t, c_h, z_s, z_t, z_h,
    tokens, heads, group, least, most, begun,
    BY_CHANNEL: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    WIDTH_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    sequence, head = item // heads, item % heads
    channel, n = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_N)
    in_p, in_n = channel < P, n < N
    inside = in_p[:, None] & in_n[None, :]
    within = channel[:, None] * N + n[None, :]
    at = item * (P * N) + within
    state = floats(before + at, masked_by(inside, begun != 0))
    own = channel if BY_CHANNEL else tl.zeros_like(channel)  # of dt, d and bias
    each: tl.constexpr = P if BY_CHANNEL else 1
    skip = tl.zeros((ROWS,), tl.float32)
    more = tl.zeros((ROWS,), tl.float32)
    if HAS_D:
        skip = floats(d + head * each + own, in_p)
    if HAS_BIAS:
        more = floats(bias + head * each + own, in_p)
    if BY_CHANNEL:
        rate = floats(a + head * (P * N) + within, inside)
    else:
        rate = tl.load(a + head).to(tl.float32)
    x += sequence * x_s + head * x_h
    dt += sequence * dt_s + head * dt_h
    b += sequence * b_s + head // group * b_h
    c += sequence * c_s + head // group * c_h
    if HAS_Z:
        z += sequence * z_s + head * z_h
    out += (sequence * tokens * heads + head) * P
    for _ in range(tokens):
        x_now = floats(x + channel, in_p)
        step = time_step(floats(dt + own, in_p), more, least, most, SOFTPLUS)
        b_now, c_now = floats(b + n, in_n), floats(c + n, in_n)
        if BY_CHANNEL:
            state = state * exp(step[:, None] * rate)
        else:
            state = state * exp(step * rate)[:, None]
        state = tl.fma((step * x_now)[:, None], b_now[None, :], state)
        y = tl.sum(state * c_now[None, :], 1)
        if HAS_D:
            y = tl.fma(skip, x_now, y)
        if HAS_Z:
            z_now = floats(z + channel, in_p)
            y = y * (z_now / (1.0 + tl.exp(-z_now)))
            z += z_t
        tl.store(out + channel, y, mask=in_p)
        x += x_t
        dt += dt_t
        b += b_t
        c += c_t
        out += heads * P
    tl.store(after + at, state, mask=inside)


@triton.jit
def inputs(x, before, token, channel, inside, x_t, begun, S: tl.constexpr):
    """Inputs of these tokens, those before the first one (negative) from the state."""
    now = floats(x + token * x_t + channel, masked_by(inside, token >= 0))
    held = masked_by(masked_by(inside, begun != 0), token < 0)
    return now + floats(before + channel * S + (S + token), held)


@_one_code
def convolution_kernel(
    x, weight, bias, before, after, out, x_s, x_t, tokens, channels, begun,
    TAPS: tl.constexpr, S: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    inside = channel < channels
    x += sequence * x_s
    before += sequence * channels * S
    columns, wanted = channel[None, :], inside[None, :] & (token < tokens)
    y = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if HAS_BIAS:
        y += floats(bias + channel, inside)[None, :]
    for j in tl.static_range(TAPS):
        tap = floats(weight + channel * TAPS + j, inside)[None, :]
        past = inputs(x, before, token - (TAPS - 1 - j), columns, wanted, x_t, begun, S)
        y = tl.fma(past, tap, y)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out + (sequence * tokens + token) * channels + columns, y, mask=wanted)
    if tl.program_id(2) == 0:
        for i in tl.static_range(S):
            back = tokens.to(tl.int64) - (S - i)
            last = inputs(x, before, back, channel, inside, x_t, begun, S)
            tl.store(after + sequence * channels * S + channel * S + i, last, mask=inside)


register("cuda", run)
