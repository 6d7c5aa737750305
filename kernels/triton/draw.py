"""Draws tokens of a batch on a GPU in two launches and a sort, where torch needs some thirty;
`peaks_of` finds the largest logits in one launch.

`keys_of` turns scores into whole numbers, whose order is that of the scores and, among equal ones,
of the ids, and sums the weights of all tokens. After `torch.topk` of the keys, `draw` keeps what
top-k, top-p and min-p let a row keep, and draws from it. `moe.sampling.draws` says the same in
torch: scores are float32, weights and their sums float64.

Shape legend: B rows, V vocabulary, C candidates in falling order of their scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1024
"""Candidates that one program takes."""
CHUNK = 1024
"""Scores of a program of `keys_kernel`."""
PEAK_CHUNK = 4096
"""Logits of a program of `peaks_kernel`."""
OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}


def peaks_of(logits_BV: Tensor) -> Tensor:
    """The position and the value of each row's largest logit, in one launch.

    The lower one of equal positions; NaN is larger than all numbers.

    Args:
        logits_BV: of a float dtype of 32 bits at most.

    Returns:
        ``(2, B)`` int64: positions, and values as the bits of float64.
    """
    count, size = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    chunks = triton.cdiv(size, PEAK_CHUNK)
    keys = torch.empty(count, chunks, dtype=torch.int64, device=logits_BV.device)
    peaks = torch.empty(2, count, dtype=torch.int64, device=logits_BV.device)
    peaks_kernel[count, chunks](
        logits_BV, logits_BV.stride(0), keys, _arrived(count, logits_BV.device), peaks, size,
        CHUNK=PEAK_CHUNK, CHUNKS=triton.next_power_of_2(chunks), **OPTIONS,
    )  # fmt: skip
    return peaks


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _arrived(count: int, device: torch.device) -> Tensor:
    """Zeros, as `peaks_kernel` leaves them; launches that may overlap have others."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _counters.get((device, stream))
    if found is None or len(found) < count:
        room = max(64, triton.next_power_of_2(count))
        found = _counters[device, stream] = torch.zeros(room, dtype=torch.int32, device=device)
    return found


def keys_of(scores_BV: Tensor, peak_B1: Tensor, temperature_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of the scores, and the sums of their weights.

    Args:
        scores_BV: float32.
        peak_B1: of any float dtype, the largest of each row.
        temperature_B1: float64.

    Returns:
        keys_BV: int64; the lower half has the id, counted down.
        totals_B1: float64.
    """
    count, size = scores_BV.shape
    scores_BV = scores_BV.contiguous()
    keys = torch.empty_like(scores_BV, dtype=torch.int64)
    chunks = triton.cdiv(size, CHUNK)
    sums = torch.empty(count, chunks, dtype=torch.float64, device=keys.device)
    keys_kernel[count, chunks](
        scores_BV, peak_B1, temperature_B1, keys, sums, size, CHUNK=CHUNK, **OPTIONS
    )
    return keys, sums.sum(-1, keepdim=True)


def draw(
    keys_BC: Tensor,
    peak_B1: Tensor,
    numbers_4B1: Tensor,
    top_k_B1: Tensor | None,
    totals_B1: Tensor | None,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """The token of each row.

    Args:
        keys_BC: the largest of the row, falling, at most `MOST`.
        peak_B1: see `keys_of`.
        numbers_4B1: float64, contiguous: temperature, random number, top-p and min-p.
        top_k_B1: int64, at most C; None: rows keep all tokens.
        totals_B1: see `keys_of`; None with top-k.
        whole: these are all tokens.

    Returns:
        ids_B1: int64.
        enough_B1: bool: no token beyond these would be kept.
    """
    count, size = keys_BC.shape
    ids = torch.empty_like(peak_B1, dtype=torch.int64)
    enough = torch.empty_like(peak_B1, dtype=torch.bool)
    draw_kernel[count,](
        keys_BC, peak_B1, numbers_4B1, top_k_B1, totals_B1, ids, enough, count, size,
        BOUNDED=top_k_B1 is not None, WHOLE=whole, WIDTH=triton.next_power_of_2(size), **OPTIONS,
    )  # fmt: skip
    return ids, enough


@triton.jit
def peaks_kernel(
    logits, stride, keys, arrived, peaks, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, chunks = tl.num_programs(0), tl.num_programs(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    used = i < size
    logit = tl.load(logits + row * stride + i, mask=used, other=float("-inf")).to(tl.float32)
    key = ordered(logit, i)
    tl.store(keys + row * chunks + chunk, tl.max(key, 0))
    # The last program of a row, by which all others have stored theirs, joins them.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == chunks - 1:
        c = tl.arange(0, CHUNKS)
        found = tl.load(
            keys + row * chunks + c, mask=c < chunks, other=-(1 << 63), cache_modifier=".cg"
        )
        best = tl.max(found, 0)
        bits = (best >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(peaks + row, (-1 - best.to(tl.int32)).to(tl.int64))
        tl.store(peaks + count + row, value.to(tl.float64).to(tl.int64, bitcast=True))
        tl.store(arrived + row, 0)


@triton.jit
def ordered(score, i):
    """int64 in the order of float32 scores, NaN above all, and among equal ones of falling ids."""
    score = score + 0.0  # no -0.0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFE)
    # Ids count down in the lower half, so that the lower one of two is the larger key.
    return ((bits.to(tl.int64) + 1) << 32) - 1 - i


@triton.jit
def keys_kernel(scores, peak, temperature, keys, sums, size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    used = i < size
    score = tl.load(scores + row * size + i, mask=used, other=float("-inf"))
    tl.store(keys + row * size + i, ordered(score, i), mask=used)
    shifted = score.to(tl.float64) - tl.load(peak + row).to(tl.float64)
    weight = tl.where(used, tl.exp(shifted / tl.load(temperature + row)), 0.0)
    tl.store(sums + row * tl.num_programs(1) + chunk, tl.sum(weight, 0))


@triton.jit
def draw_kernel(
    keys, peak, numbers, top_k, totals, ids, enough, count, size,
    BOUNDED: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    used = i < size
    key = tl.load(keys + row.to(tl.int64) * size + i, mask=used, other=0)
    bits = (key >> 32).to(tl.int32)
    score = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    shifted = score.to(tl.float64) - tl.load(peak + row).to(tl.float64)
    if BOUNDED:
        used = used & (i < tl.load(top_k + row))
    weight = tl.where(used, tl.exp(shifted / tl.load(numbers + row)), 0.0)
    mass = tl.cumsum(weight, 0)
    held = tl.max(mass, 0)
    total = held
    if not BOUNDED:
        total = tl.load(totals + row)
    top_p = tl.load(numbers + 2 * count + row)
    goal = top_p * total
    # The token that crosses the goal is kept, hence the mass before it decides.
    limit = tl.where(top_p < 1, goal, float("inf"))
    kept = tl.where(mass - weight < limit, weight, 0.0)
    kept = tl.where(weight >= tl.load(numbers + 3 * count + row), kept, 0.0)
    mass = tl.where(kept > 0, tl.cumsum(kept, 0), 0.0)
    # The first whose mass exceeds the goal; sums of a scan may differ in their last bit.
    above = mass > tl.max(mass, 0) * tl.load(numbers + count + row)
    place = tl.min(tl.where(above, i, size - 1), 0)
    own = tl.sum(tl.where(i == place, key, 0), 0)
    tl.store(ids + row, -1 - own.to(tl.int32))
    tl.store(enough + row, (held >= goal) | WHOLE)
