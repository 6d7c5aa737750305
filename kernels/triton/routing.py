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

MOST_SLOTS, MOST_EXPERTS = 2048, 512
"""That one kernel aligns: those of a decode step. Sorting pays for more."""


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


def most_blocks(slots: int, experts: int, rows: int) -> int:
    """Blocks that the worst routing needs, where every expert's last block is partly empty."""
    begun = min(slots, experts)
    return begun + (slots - begun) // rows


def route(expert_ids_TK: Tensor, experts: int, rows: int, distinct: int | None = None) -> Blocks:
    """Sort slots and cut them into blocks of one expert each; all int32. Operations of torch for
    many slots, and anywhere but on a GPU; else one kernel.

    Args:
        expert_ids_TK: (T, K) integers, at least one slot; outside [0, experts) a slot is unused.
        experts: E.
        rows: slots of a full block.
        distinct: experts that the slots can ask for at most; None: all.
    """
    ids_S = expert_ids_TK.reshape(-1)
    if ids_S.is_cuda and len(ids_S) <= MOST_SLOTS and experts < MOST_EXPERTS:
        return align(ids_S, experts, rows, distinct)
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
def align_kernel(
    ids, order, offsets, block_expert, block_first, slots, experts, blocks, per_block,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program places the slots of one expert, the last one those that are unused. Each of them
    counts the slots of all experts, so that none waits for another."""
    own = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    theirs = tl.load(ids + slot, mask=slot < slots, other=-1).to(tl.int32)
    theirs = tl.where((theirs < 0) | (theirs >= experts), experts, theirs)
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
    """As `route`, by one kernel, for at most `MOST_SLOTS` and fewer than `MOST_EXPERTS`."""
    slots = len(ids_S)
    count = most_blocks(slots, distinct or experts, rows)
    sizes = [slots, experts + 1, count, count]
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=ids_S.device)
    order, offsets, expert_B, first_B = memory.split(sizes)
    # A lane at least for each thread: counting must not meet a slot twice.
    size = max(32, triton.next_power_of_2(slots))
    align_kernel[experts + 1,](
        ids_S, order, offsets, expert_B, first_B, slots, experts, count, rows,
        SLOTS=size, EXPERTS=triton.next_power_of_2(experts + 1),
        BLOCKS=triton.next_power_of_2(count), **align_options(size),
    )  # fmt: skip
    return Blocks(order, offsets, expert_B, first_B, rows)


def align_options(size: int) -> dict[str, int | bool]:
    """What every launch for so many slots passes to Triton's compiler."""
    return {"num_warps": min(8, size // 32), "enable_fp_fusion": False}


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
