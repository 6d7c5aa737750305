"""Tiers: how many experts each kind of memory holds, from byte budgets.

Numbers come from outside (what is free, what control groups allow); here they become slots. On a
CPU the only tier above the disk is main memory. On a GPU main memory is a second one between it and
the disk, pinned as far as that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.cache import LEAST_SLOTS
from offload.errors import BudgetError

GIB = 1 << 30
RESERVE_SHARE = 0.05
LEAST_RESERVE = GIB // 4
"""Left free of what is free, where nobody says how much to take: others live here too."""


@dataclass(frozen=True)
class Tier:
    """Room for experts in one kind of memory.

    Attributes:
        name: ``device`` or ``host``.
        slots: experts it holds.
        nbytes: memory they take.
        pinned: page-locked.
        reason: where the numbers come from, in words.
    """

    name: str
    slots: int
    nbytes: int
    pinned: bool
    reason: str


def budget(free: int, asked_gib: float | None, taken: int = 0) -> int:
    """Bytes for experts.

    Args:
        free: bytes that can be had now, control groups respected.
        asked_gib: the profile's limit for everything together; None for what is free less a
            reserve.
        taken: bytes of that limit that other things need.
    """
    reserved = free - max(LEAST_RESERVE, int(free * RESERVE_SHARE))
    limit = reserved if asked_gib is None else min(free, int(asked_gib * GIB))
    return max(0, limit - taken)


def device_tier(nbytes: int, slot_bytes: int, experts: int) -> Tier:
    """Slots on the device that computes.

    Args:
        nbytes: budget.
        slot_bytes: of one expert.
        experts: of all layers; more slots are of no use.

    Raises:
        BudgetError: not even `LEAST_SLOTS` fit.
    """
    slots = min(experts, nbytes // slot_bytes)
    if slots < LEAST_SLOTS:
        raise BudgetError(
            f"an expert cache needs room for {LEAST_SLOTS} experts, {LEAST_SLOTS * slot_bytes} "
            f"bytes at {slot_bytes} bytes each, and {nbytes} bytes are left for it: raise "
            "memory.device_gib, serve fewer bits or shorten the context"
        )
    share = slots / experts
    reason = f"{slots} of {experts} experts ({share:.0%}) fit into {nbytes / GIB:.2f} GiB"
    return Tier("device", slots, slots * slot_bytes, pinned=False, reason=reason)


def host_tier(nbytes: int, slot_bytes: int, experts: int, pinnable: int) -> Tier | None:
    """Slots in main memory behind a GPU; None where too few fit to be of use.

    Args:
        nbytes: budget.
        slot_bytes: of one expert.
        experts: of all layers.
        pinnable: bytes that may be page-locked; the tier is pageable where it needs more.
    """
    slots = min(experts, nbytes // slot_bytes)
    if slots < LEAST_SLOTS:
        return None
    taken = slots * slot_bytes
    pinned = taken <= pinnable
    how = "pinned" if pinned else f"pageable: only {pinnable / GIB:.2f} GiB may be pinned"
    reason = f"{slots} of {experts} experts in {taken / GIB:.2f} GiB, {how}"
    return Tier("host", slots, taken, pinned, reason)
