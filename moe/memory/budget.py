"""Divides memory among its uses: weights, activations, keys and values, and a cache of experts.

Sizes of weights come from the checkpoint's headers, all others from `moe.memory.footprint`. Experts
that do not fit may stay on disk if they are in a store; the memory left over caches them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from moe.kv.cache import SNAPSHOTS
from moe.kv.visibility import RowVisibility
from moe.loading.memory_plan import (
    GIB,
    RESERVE,
    MemoryPlan,
    Offloadable,
    PlanLine,
    PlannedTier,
)
from moe.memory.footprint import Footprint
from moe.settings import Profile
from offload.offloaded import HOST

RESERVE_SHARE = 1 / 20
LEAST_POOL = 2048
"""A KV pool that the profile does not set holds at least this many tokens, or one context."""
UNKNOWN_CONTEXT = 2**17
"""Tokens of a sequence if neither the model nor the profile sets a limit."""
LEAST_BLOCK = 64
"""The fewest tokens of such a pool, where memory has no room for more."""
KV_SHARE = 1 / 8
"""Share for a KV pool that the profile does not set, if experts are on disk."""
ACTIVATION_SHARE = 1 / 8
"""Most of the memory for activations, experts, keys and values that a prefill batch claims if the
profile does not set its tokens and experts are on disk."""
PREFIX_SHARE, MOST_PREFIX_BYTES = 1 / 2, 4 * GIB
"""Share of the KV pool for a prefix cache that the profile does not set, and the most bytes of it.
It gives way to requests, so that its size costs them nothing."""
WAVES = tuple(8192 >> halved for halved in range(8))
"""Tokens that a prefill batch may have if the profile does not set them, the best first."""


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
    kv_policy: RowVisibility | None = None,
    recordings_bytes: int = 0,
) -> MemoryPlan:
    """Plan one model: with all experts in memory if they fit, else with some.

    Args:
        weights: bytes of each kind of weights, by name.
        footprint: measured with `prefill_batch_tokens` of this profile.
        place: name of the memory, for people.
        available_bytes: free now; None if unknown.
        context_length: most tokens of a sequence; None for no limit.
        logits_size: V of the logits.
        offloadable: experts that may stay on disk; None if they must be resident.
        host_bytes: main memory for experts that a GPU does not hold; None on a CPU.
        kv_policy: that decode steps will follow; None: none.
        recordings_bytes: that decode steps take which are recorded (`step_rows` at a time).
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
        PlanLine(RESERVE, reserve, "memory.reserve_gib, half of it for requests"),
    ]
    if recordings_bytes:
        what = f"decode steps of up to {step_rows(profile)} rows, with their logits"
        lines.append(PlanLine("recordings", recordings_bytes, what))
    if footprint.bytes_per_sequence:
        state, copies = footprint.bytes_per_sequence, _state_copies(profile)
        what = f"{batch} sequences of {copies} times {state} bytes"
        lines.append(PlanLine("states", batch * copies * state, what))
    for name, own in footprint.between_steps.items():
        what = f"{batch} sequences of {own} bytes, what a step leaves for the next"
        lines.append(PlanLine(name, batch * own, what))
    used = sum(line.bytes for line in lines)
    left = None if available_bytes is None else available_bytes - used
    per_token = max(footprint.kv_bytes_per_token, 1)
    plan = MemoryPlan(
        tuple(lines), place, available_bytes, 0, per_token, (), host_bytes,
        wave_tokens=profile.prefill.most_tokens,
        read_tokens=profile.prefill.longest_part, kv_windows=footprint.windows,
        kv_policy=kv_policy,
    )  # fmt: skip
    resident = _with_pool(plan, profile, left, context_length)
    if offloadable is None or left is None or (resident.fits and offloadable.most is None):
        return resident
    return _offloaded(plan, profile, left + weights["experts"], context_length, offloadable)


def step_rows(profile: Profile) -> int:
    """Most rows of a decode step: a token of each sequence, and those that are drafted behind."""
    drafted = 0 if profile.speculation.mode == "off" else profile.speculation.max_depth
    return profile.engine.max_batch_size * (1 + drafted)


def _state_copies(profile: Profile) -> int:
    """Most copies of its recurrent states that a sequence has: now, after each drafted token, and
    where prompt passes ended."""
    drafted = 0 if profile.speculation.mode == "off" else 1 + profile.speculation.max_depth
    return 1 + drafted + (SNAPSHOTS if profile.memory.prefix_tokens else 0)


def _with_pool(
    plan: MemoryPlan,
    profile: Profile,
    left: int | None,
    context_length: int | None,
    room: int | None = None,
) -> MemoryPlan:
    """Add a line for keys and values, in ``left`` bytes if the profile does not set their size.

    Args:
        room: bytes that they may take rather than not fit; None: as many as they want.
    """
    per_token = plan.kv_bytes_per_token
    tokens, why = _pool(plan, profile, left, context_length, room)
    kept = _prefix_tokens(profile, per_token, tokens)
    how = f"{tokens} tokens of {per_token} B, {why}; the prefix cache has up to {kept} of them"
    line = PlanLine("keys and values", tokens * per_token, how)
    return replace(plan, lines=(*plan.lines, line), kv_tokens=tokens, prefix_tokens=kept)


def _prefix_tokens(profile: Profile, per_token: int, kv_tokens: int) -> int:
    wanted = profile.memory.prefix_tokens
    if wanted != "auto":
        return min(wanted, kv_tokens)
    return min(int(kv_tokens * PREFIX_SHARE), MOST_PREFIX_BYTES // per_token)


def _offloaded(
    plan: MemoryPlan,
    profile: Profile,
    left: int,
    context_length: int | None,
    offloadable: Offloadable,
) -> MemoryPlan:
    """The plan with as many experts in memory as fit, or the fewest that work."""
    fixed = offloadable.fixed_bytes if plan.host_bytes is None else 0
    left -= fixed
    size, total = offloadable.slot_bytes, offloadable.experts
    wanted = total if offloadable.most is None else min(offloadable.most, total)
    least = min(offloadable.least, total)
    pool = max(min(int(left * KV_SHARE), left - least * size), left - wanted * size)
    plan = _with_pool(plan, profile, pool, context_length, left - least * size)
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
    """Beside a GPU: as many experts in host memory as fit, or the fewest that work."""
    if plan.host_bytes is None:
        return ()
    size, fixed, total = offloadable.slot_bytes, offloadable.fixed_bytes, offloadable.experts
    slots = max(min((plan.host_bytes - fixed) // size, total), min(offloadable.least, total))
    return (PlannedTier(HOST, slots, slots * size + fixed),)


def prefill_batch_tokens(profile: Profile) -> int:
    """Most prompt tokens that a step reads."""
    prefill = profile.prefill
    return prefill.chunk_tokens if prefill.mode == "chunked" else prefill.most_tokens


def _pool(
    plan: MemoryPlan,
    profile: Profile,
    left: int | None,
    context_length: int | None,
    room: int | None,
) -> tuple[int, str]:
    """Tokens of the KV pool, and what set their number."""
    memory, per_token = profile.memory, plan.kv_bytes_per_token
    if memory.kv_tokens is not None:
        return memory.kv_tokens, "memory.kv_tokens"
    if memory.kv_gib is not None:
        return max(int(memory.kv_gib * GIB) // per_token, 1), "memory.kv_gib"
    context = context_length or UNKNOWN_CONTEXT
    kept = 0 if memory.prefix_tokens == "auto" else memory.prefix_tokens
    reading = context if plan.read_tokens is None else plan.read_tokens
    others = (profile.engine.max_batch_size - 1) * plan.kv_bytes(context)
    most = -(-(others + plan.kv_bytes(context, reading)) // per_token) + kept
    if memory.prefix_tokens == "auto":  # it keeps a prompt with what is behind windows
        most = max(most, context * min(int(1 / PREFIX_SHARE), profile.engine.max_batch_size))
    fit = most if left is None else max(left, 0) // per_token
    if fit >= most:
        return most, "as many as a full batch can use"
    least = LEAST_POOL if room is None else min(LEAST_POOL, max(room // per_token, LEAST_BLOCK))
    return max(fit, min(least, context)), "what is left"


def leaves_room(plan: MemoryPlan) -> bool:
    """Return whether a plan fits and its activations do not take what experts on disk want."""
    if not plan.fits or not plan.tiers or plan.available_bytes is None:
        return plan.fits
    size = {line.name: line.bytes for line in plan.lines}
    shared = size["activations"] + size["experts"] + size["keys and values"]
    room = plan.available_bytes - plan.needed_bytes + shared
    return size["activations"] <= room * ACTIVATION_SHARE


def available_for(profile: Profile, plan: MemoryPlan) -> int:
    """Bytes that must be free for a plan to fit, with the reserve, which grows with them."""
    needed = sum(line.bytes for line in plan.lines if line.name != RESERVE)
    if profile.memory.reserve_gib is not None:
        return needed + _reserve(profile, None)
    return min(math.ceil(needed / (1 - RESERVE_SHARE)), needed + GIB)


def _reserve(profile: Profile, available_bytes: int | None) -> int:
    if profile.memory.reserve_gib is not None:
        return int(profile.memory.reserve_gib * GIB)
    return GIB if available_bytes is None else min(GIB, int(available_bytes * RESERVE_SHARE))
