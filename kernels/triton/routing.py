"""Slots sorted by expert and cut into blocks, on the device, without reading anything back.

Every shape depends on the number of slots only, so that a CUDA graph can capture the calls and
replay them with other routings.

Shape legend: T tokens, K slots a token, S = T*K slots, E experts, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.language import overlap_options, wait_for_others

MOST_SLOTS = 2048
"""That one kernel aligns: those of a decode step. Two that count and place take more."""
MOST_COUNTED = 512
"""Whose counts a program of either way holds; torch sorts for more."""
CHUNK = 512
"""Slots of a program that counts or places."""
SORT_OPTIONS: dict[str, int | bool] = {"num_warps": 8, "enable_fp_fusion": False}
"""Options of those programs' launches for Triton's compiler."""


@dataclass(frozen=True)
class Blocks:
    """The slots that each program works on.

    Attributes:
        order_S: slots sorted by expert (a stable sort); unused ones last.
        offsets_E1: (E + 1,) where each expert's slots begin in ``order_S``; the last is their end.
        expert_B: expert of each block, -1 for a block without work.
        first_B: index in ``order_S`` of each block's first slot.
        rows: slots of a full block.
    """

    order_S: Tensor
    offsets_E1: Tensor
    expert_B: Tensor
    first_B: Tensor
    rows: int

    @property
    def count(self) -> int:
        return self.expert_B.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order of the kernels' arguments."""
        return self.order_S, self.offsets_E1, self.expert_B, self.first_B


def most_blocks(slots: int, experts: int, rows: int) -> int:
    """Blocks that the worst routing needs, where every expert's last block is partly empty."""
    begun = min(slots, experts)
    return begun + (slots - begun) // rows


def route(expert_ids_TK: Tensor, experts: int, rows: int, distinct: int | None = None) -> Blocks:
    """Sort slots and cut them into blocks of one expert each; all int32. One kernel for few slots,
    two for many; operations of torch for more experts than the kernels hold, and on a CPU.

    Args:
        expert_ids_TK: (T, K) integers, at least one slot; outside [0, experts) a slot is unused.
        experts: E.
        rows: slots of a full block.
        distinct: experts that the slots can ask for at most; None: all.
    """
    ids_S = expert_ids_TK.reshape(-1)
    if ids_S.is_cuda and experts <= MOST_COUNTED:
        few = len(ids_S) <= MOST_SLOTS
        return (align if few else sort_slots)(ids_S, experts, rows, distinct)
    ids_S = ids_S.masked_fill((ids_S < 0) | (ids_S >= experts), experts)
    sorted_S, order_S = ids_S.sort(stable=True)
    bounds_E1 = torch.arange(experts + 1, device=ids_S.device, dtype=ids_S.dtype)
    offsets_E1 = torch.searchsorted(sorted_S, bounds_E1, out_int32=True)
    blocks_E = (offsets_E1.diff() + (rows - 1)) // rows
    end_E = blocks_E.cumsum(0, dtype=torch.int32)
    index_B = torch.arange(
        most_blocks(ids_S.shape[0], distinct or experts, rows),
        device=ids_S.device,
        dtype=torch.int32,
    )
    expert_B = torch.searchsorted(end_E, index_B, right=True, out_int32=True)
    unused_B = expert_B >= experts
    known_B = expert_B.masked_fill(unused_B, 0)
    within_B = index_B - (end_E - blocks_E)[known_B]
    return Blocks(
        order_S.to(torch.int32),
        offsets_E1,
        expert_B.masked_fill(unused_B, -1),
        offsets_E1[known_B] + within_B * rows,
        rows,
    )


@triton.jit
def _experts_of(ids, slot, slots, experts):
    """Return the experts of these slots; those that are unused, or beyond the last, have the number
    after all."""
    own = tl.load(ids + slot, mask=slot < slots, other=-1)
    return tl.where((own < 0) | (own >= experts), experts, own).to(tl.int32)


@triton.jit
def align_kernel(
    ids, order, offsets, block_expert, block_first, slots, experts, blocks, per_block,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program places the slots of one expert, the last one those that are unused. Each of them
    counts the slots of all experts, so that none waits for another."""
    wait_for_others(PDL)
    own = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    theirs = _experts_of(ids, slot, slots, experts)
    count = tl.histogram(theirs, EXPERTS)
    before = tl.arange(0, EXPERTS) < own
    begin = tl.sum(tl.where(before, count, 0), 0)
    tl.store(offsets + own, begin)
    same = theirs == own
    place = tl.cumsum(same.to(tl.int32), 0)
    tl.store(order + begin + place - 1, slot, mask=same & (slot < slots))
    first = tl.sum(tl.where(before, (count + per_block - 1) // per_block, 0), 0)
    needed = (tl.sum(same.to(tl.int32), 0) + per_block - 1) // per_block
    idle = own == experts
    block = tl.arange(0, BLOCKS)
    mask = (block >= first) & (block < tl.where(idle, blocks, first + needed))
    tl.store(block_expert + block, tl.where(idle, -1, own) + block * 0, mask=mask)
    tl.store(block_first + block, begin + (block - first) * per_block, mask=mask)


def align(ids_S: Tensor, experts: int, rows: int, distinct: int | None = None) -> Blocks:
    """As `route`, by one kernel, for at most `MOST_SLOTS` and `MOST_COUNTED`."""
    slots, blocks = len(ids_S), _empty(ids_S, experts, rows, distinct)
    # A lane at least for each thread: counting must not meet a slot twice.
    size = max(32, triton.next_power_of_2(slots))
    align_kernel[experts + 1,](
        ids_S, *blocks.tensors, slots, experts, blocks.count, rows,
        SLOTS=size, EXPERTS=triton.next_power_of_2(experts + 1),
        BLOCKS=triton.next_power_of_2(blocks.count), **align_options(size),
        **overlap_options(),
    )  # fmt: skip
    return blocks


def _empty(ids_S: Tensor, experts: int, rows: int, distinct: int | None) -> Blocks:
    """Not filled yet; one piece of memory."""
    count = most_blocks(len(ids_S), distinct or experts, rows)
    sizes = [len(ids_S), experts + 1, count, count]
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=ids_S.device)
    order_S, offsets_E1, expert_B, first_B = memory.split(sizes)
    return Blocks(order_S, offsets_E1, expert_B, first_B, rows)


def align_options(size: int) -> dict[str, int | bool]:
    """Return options for Triton's compiler of every launch for so many slots."""
    return {"num_warps": min(8, size // 32), "enable_fp_fusion": False}


# Lengths of prompts differ: none is a reason to compile anew.
@triton.jit(do_not_specialize=["slots"])
def count_kernel(ids, counts, slots, experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """A program counts the slots of each expert in a chunk."""
    chunk = tl.program_id(0)
    own = _experts_of(ids, chunk * CHUNK + tl.arange(0, CHUNK), slots, experts)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(own, EXPERTS))


@triton.jit(do_not_specialize=["slots", "blocks", "chunks"])
def sort_kernel(
    ids, counts, order, offsets, block_expert, block_first, slots, experts, blocks, per_block,
    chunks, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, AT_ONCE: tl.constexpr,
    PIECE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program places the slots of a chunk and writes its share of the blocks. Each of them adds
    up the counts of all chunks, so that none waits for another."""
    chunk, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, chunks, AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            other = begin + more
            mask = expert < tl.where(other < chunks, EXPERTS, 0)
            count = tl.load(counts + other * EXPERTS + expert, mask=mask, other=0)
            total += count
            before += tl.where(other < chunk, count, 0)
    offset = tl.cumsum(total, 0) - total
    tl.store(offsets + expert, offset, mask=expert < tl.where(chunk == 0, experts + 1, 0))
    # A slot comes behind those of its expert in earlier chunks, and before it in its own.
    at = tl.arange(0, CHUNK)
    slot = chunk * CHUNK + at
    own = _experts_of(ids, slot, slots, experts)
    place = tl.gather(offset + before, own, 0)
    for begin in range(0, CHUNK, PIECE):
        near = begin + tl.arange(0, PIECE)
        theirs = _experts_of(ids, chunk * CHUNK + near, slots, experts)
        earlier = (theirs[None, :] == own[:, None]) & (near[None, :] < at[:, None])
        place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + place, slot, mask=slot < slots)
    needed = tl.where(expert < experts, (total + per_block - 1) // per_block, 0)
    end = tl.cumsum(needed, 0)
    begin_of = end - needed
    used = tl.sum(needed, 0)
    share = (blocks + chunks - 1) // chunks
    for step in range(0, share, BLOCKS):
        within = step + tl.arange(0, BLOCKS)
        block = chunk * share + within
        whose = (begin_of[None, :] <= block[:, None]) & (block[:, None] < end[None, :])
        known = tl.sum(tl.where(whose, expert[None, :], 0), 1)
        start = tl.sum(tl.where(whose, (offset - begin_of * per_block)[None, :], 0), 1)
        mask = (within < share) & (block < blocks)
        idle = block >= used
        tl.store(block_expert + block, tl.where(idle, -1, known), mask=mask)
        tl.store(block_first + block, tl.where(idle, 0, start + block * per_block), mask=mask)


def sort_slots(ids_S: Tensor, experts: int, rows: int, distinct: int | None = None) -> Blocks:
    """As `route`, by two kernels, for any number of slots and at most `MOST_COUNTED`."""
    blocks, chunks = _empty(ids_S, experts, rows, distinct), triton.cdiv(len(ids_S), CHUNK)
    size = triton.next_power_of_2(experts + 1)
    counts = torch.empty(chunks, size, dtype=torch.int32, device=ids_S.device)
    count_kernel[chunks,](
        ids_S, counts, len(ids_S), experts, CHUNK=CHUNK, EXPERTS=size, **SORT_OPTIONS
    )
    sort_kernel[chunks,](
        ids_S, counts, *blocks.tensors, len(ids_S), experts, blocks.count, rows, chunks,
        CHUNK=CHUNK, EXPERTS=size, **sort_tile(size), **SORT_OPTIONS,
    )  # fmt: skip
    return blocks


def sort_tile(size: int) -> dict[str, int]:
    """Chunks, slots and blocks that a program takes at once, by the lanes of its experts."""
    return {"AT_ONCE": 8, "PIECE": 32, "BLOCKS": max(1, 8192 // size)}


def used_experts(blocks: Blocks, distinct: int) -> tuple[Tensor, Tensor]:
    """(distinct,) int32 experts that have slots, in order, then -1; (B,) each block's place there.

    Args:
        distinct: how many there can be.
    """
    used_E = blocks.offsets_E1.diff() > 0
    place_E = used_E.cumsum(0, dtype=torch.int32) - 1
    places = place_E.masked_fill(~used_E, distinct).long()
    expert_E = torch.arange(len(used_E), dtype=torch.int32, device=used_E.device)
    expert_U = expert_E.new_full((distinct + 1,), -1).scatter_(0, places, expert_E)[:distinct]
    return expert_U, place_E[blocks.expert_B.clamp(min=0)]
