"""How much of memory each use gets: all experts if they fit, else some, and keys and values.

Weights are counted from the headers of the checkpoint, everything else by `moe.memory.footprint`.
Experts that do not fit may stay on disk, if they are in a store: what is left holds a cache of
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from moe.loading.memory_plan import GIB, MemoryPlan, Offloadable, PlanLine, PlannedTier
from moe.memory.footprint import Footprint
from moe.settings import Profile
from offload.offloaded import HOST

RESERVE = "reserve"
RESERVE_SHARE = 1 / 20
LEAST_POOL = 2048
"""Tokens of keys and values below which a pool that nobody has set is not worth loading for."""
UNKNOWN_CONTEXT = 2**17
"""Tokens of a sequence where neither the model nor the profile sets a limit."""
KV_SHARE = 1 / 8
"""Of what experts on disk leave, for a pool of keys and values that nobody has set."""


def plan_memory(
    weights: Mapping[str, int],
    footprint: Footprint,
    profile: Profile,
    *,
    place: str,
    available_bytes: int | None,
    context_length: int | None,
    logits_size: int,
    offloadable: Offloadable | None = None,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """The plan of one model: with all experts in memory if they fit, else with some.

    Args:
        weights: bytes of each kind of weights, by name.
        footprint: measured with `prefill_batch_tokens` of this profile.
        available_bytes: what can be taken now; None where that is not known.
        logits_size: V of the logits.
        offloadable: experts that may stay on disk; None where they may not.
        host_bytes: main memory for experts that a GPU does not hold; None on a CPU.
    """
    if profile.memory.device_gib is not None:
        budget = int(profile.memory.device_gib * GIB)
        available_bytes = budget if available_bytes is None else min(budget, available_bytes)
    batch = profile.engine.max_batch_size
    reserve = _reserve(profile, available_bytes)
    lines = [PlanLine(name, size, "from the headers") for name, size in weights.items()]
    lines += [
        PlanLine(
            "activations",
            footprint.activation_bytes,
            f"{prefill_batch_tokens(profile)} prompt tokens, {footprint.how}",
        ),
        PlanLine("logits", 2 * 4 * batch * logits_size, f"{batch} sequences of {logits_size}"),
        PlanLine(RESERVE, reserve, "memory.reserve_gib"),
    ]
    if footprint.bytes_per_sequence:
        state = footprint.bytes_per_sequence
        what = f"{batch} sequences of {state} bytes"
        lines.append(PlanLine("states", batch * state, what))
    used = sum(line.bytes for line in lines)
    left = None if available_bytes is None else available_bytes - used
    per_token = max(footprint.kv_bytes_per_token, 1)
    plan = MemoryPlan(tuple(lines), place, available_bytes, 0, per_token, (), host_bytes)
    resident = _with_pool(plan, profile, left, context_length)
    if offloadable is None or left is None or (resident.fits and offloadable.most is None):
        return resident
    return _offloaded(plan, profile, left + weights["experts"], context_length, offloadable)


def _with_pool(
    plan: MemoryPlan, profile: Profile, left: int | None, context_length: int | None
) -> MemoryPlan:
    """The plan with a line for keys and values, of which ``left`` bytes are a part."""
    per_token = plan.kv_bytes_per_token
    tokens, why = _pool(profile, per_token, left, context_length)
    how = f"{tokens} tokens of {per_token} B, {why}"
    line = PlanLine("keys and values", tokens * per_token, how)
    return replace(plan, lines=(*plan.lines, line), kv_tokens=tokens)


def _offloaded(
    plan: MemoryPlan,
    profile: Profile,
    left: int,
    context_length: int | None,
    offloadable: Offloadable,
) -> MemoryPlan:
    """The plan with as many experts in memory as fit, or the fewest that there must be."""
    fixed = offloadable.fixed_bytes if plan.host_bytes is None else 0
    left -= fixed
    size, total = offloadable.slot_bytes, offloadable.experts
    wanted = total if offloadable.most is None else min(offloadable.most, total)
    least = min(offloadable.least, total)
    pool = max(min(int(left * KV_SHARE), left - least * size), left - wanted * size)
    plan = _with_pool(plan, profile, pool, context_length)
    left -= plan.lines[-1].bytes
    slots = max(min(left // size, wanted), least)
    host = _host_tier(plan, offloadable)
    where = "in host memory" if host and host[0].experts == total else "on disk"
    how = f"{slots} of {total} at a time ({slots / total:.1%}), the others {where}"
    line = PlanLine("experts", slots * size + fixed, how)
    lines = tuple(line if old.name == "experts" else old for old in plan.lines)
    tiers = (
        PlannedTier(plan.place, slots, slots * size),
        *host,
        PlannedTier("disk", total, total * size),
    )
    return replace(plan, lines=lines, tiers=tiers)


def _host_tier(plan: MemoryPlan, offloadable: Offloadable) -> tuple[PlannedTier, ...]:
    """Beside a GPU: as many experts as there is room for, or the fewest that there must be."""
    if plan.host_bytes is None:
        return ()
    size, fixed, total = offloadable.slot_bytes, offloadable.fixed_bytes, offloadable.experts
    slots = max(min((plan.host_bytes - fixed) // size, total), min(offloadable.least, total))
    return (PlannedTier(HOST, slots, slots * size + fixed),)


def prefill_batch_tokens(profile: Profile) -> int:
    """Most prompt tokens that a step reads together."""
    prefill = profile.prefill
    return prefill.chunk_tokens if prefill.mode == "chunked" else prefill.wave_tokens


def _pool(
    profile: Profile, per_token: int, left: int | None, context_length: int | None
) -> tuple[int, str]:
    """Tokens of keys and values, and who says so."""
    memory = profile.memory
    if memory.kv_tokens is not None:
        return memory.kv_tokens, "memory.kv_tokens"
    if memory.kv_gib is not None:
        return max(int(memory.kv_gib * GIB) // per_token, 1), "memory.kv_gib"
    context = context_length or UNKNOWN_CONTEXT
    most = profile.engine.max_batch_size * context + memory.prefix_tokens
    fit = most if left is None else max(left, 0) // per_token
    if fit >= most:
        return most, "as many as a full batch can use"
    return max(fit, min(LEAST_POOL, context)), "what is left"


def available_for(profile: Profile, plan: MemoryPlan) -> int:
    """Bytes that must be available for what a plan needs: with more of them the reserve grows."""
    needed = sum(line.bytes for line in plan.lines if line.name != RESERVE)
    if profile.memory.reserve_gib is not None:
        return needed + _reserve(profile, None)
    return min(math.ceil(needed / (1 - RESERVE_SHARE)), needed + GIB)


def _reserve(profile: Profile, available_bytes: int | None) -> int:
    if profile.memory.reserve_gib is not None:
        return int(profile.memory.reserve_gib * GIB)
    return GIB if available_bytes is None else min(GIB, int(available_bytes * RESERVE_SHARE))
