"""Will a model fit, and how many tokens of keys and values beside it? Known before it is read.

Weights are counted from the headers of the checkpoint, everything else by `moe.footprint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moe.errors import DoesNotFitError
from moe.footprint import Footprint
from moe.settings import Profile

GIB = 2**30
RESERVE_SHARE = 1 / 20
LEAST_POOL = 2048
"""Tokens of keys and values below which a pool that nobody has set is not worth loading for."""
UNKNOWN_CONTEXT = 2**17
"""Tokens of a sequence where neither the model nor the profile sets a limit."""


@dataclass(frozen=True)
class PlanLine:
    """One use of memory: its name, its bytes and where the figure comes from."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a model will take.

    Attributes:
        lines: every use of memory.
        place: what is filled: ``memory``, or the name of a CUDA device.
        available_bytes: what was free; None where that cannot be read.
        kv_tokens: tokens of keys and values that may be held at once.
        kv_bytes_per_token: bytes of each.
    """

    lines: tuple[PlanLine, ...]
    place: str
    available_bytes: int | None
    kv_tokens: int
    kv_bytes_per_token: int

    @property
    def needed_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        rows = [f"{line.name:<{width}} {_size(line.bytes)}  {line.how}" for line in self.lines]
        free = "an unknown number" if self.available_bytes is None else _size(self.available_bytes)
        total = f"{'in all':<{width}} {_size(self.needed_bytes)}  of {free.strip()} available"
        return "\n".join([f"{self.place}:", *(f"  {row}" for row in [*rows, total])])

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"needed_bytes": self.needed_bytes, "fits": self.fits}


def plan_memory(
    weights: Mapping[str, int],
    footprint: Footprint,
    profile: Profile,
    *,
    place: str,
    available_bytes: int | None,
    context_length: int | None,
    logits_size: int,
) -> MemoryPlan:
    """The plan of one model.

    Args:
        weights: bytes of each kind of weights, by name.
        footprint: measured with `wave_tokens` of this profile.
        available_bytes: what can be taken now; None where that is not known.
        logits_size: V of the logits.
    """
    batch = profile.engine.max_batch_size
    reserve = _reserve(profile, available_bytes)
    lines = [PlanLine(name, size, "from the headers") for name, size in weights.items()]
    lines += [
        PlanLine(
            "activations",
            footprint.activation_bytes,
            f"{wave_tokens(profile)} prompt tokens, {footprint.how}",
        ),
        PlanLine("logits", 2 * 4 * batch * logits_size, f"{batch} sequences of {logits_size}"),
        PlanLine("reserve", reserve, "memory.reserve_gib"),
    ]
    if footprint.bytes_per_sequence:
        state = footprint.bytes_per_sequence
        what = f"{batch} sequences of {state} bytes"
        lines.append(PlanLine("states", batch * state, what))
    used = sum(line.bytes for line in lines)
    left = None if available_bytes is None else available_bytes - used
    per_token = max(footprint.kv_bytes_per_token, 1)
    tokens, why = _pool(profile, per_token, left, context_length)
    lines.append(
        PlanLine("keys and values", tokens * per_token, f"{tokens} tokens of {per_token} B, {why}")
    )
    return MemoryPlan(tuple(lines), place, available_bytes, tokens, per_token)


def wave_tokens(profile: Profile) -> int:
    """Most prompt tokens that a step reads together."""
    prefill = profile.prefill
    return prefill.chunk_tokens if prefill.mode == "chunked" else prefill.wave_tokens


def check_fit(plan: MemoryPlan, profile: Profile) -> None:
    """Raise `DoesNotFitError`, with all numbers and what to change, if it does not fit."""
    if plan.fits:
        return
    assert plan.available_bytes is not None
    needed, free = _size(plan.needed_bytes).strip(), _size(plan.available_bytes).strip()
    raise DoesNotFitError(
        f"the model does not fit: it needs {needed} and {free} are available in {plan}\n"
        + "\n".join(f"  - {remedy}" for remedy in _remedies(plan, profile))
    )


def _remedies(plan: MemoryPlan, profile: Profile) -> list[str]:
    """What would make room, most effective settings first; the last one always helps."""
    assert plan.available_bytes is not None
    size = {line.name: line.bytes for line in plan.lines}
    missing = plan.needed_bytes - plan.available_bytes
    remedies = []
    if profile.memory.kv_tokens is not None or profile.memory.kv_gib is not None:
        fit = (size["keys and values"] - missing) // plan.kv_bytes_per_token
        if fit > 0:
            remedies.append(f"memory.kv_tokens={fit} would fit ({fit * plan.kv_bytes_per_token} B)")
    wave = wave_tokens(profile)
    if wave > 512 and size["activations"] > missing // 4:
        key = "chunk_tokens" if profile.prefill.mode == "chunked" else "wave_tokens"
        remedies.append(f"a smaller prefill.{key} lowers the activations (it is {wave})")
    if profile.model.expert_dtype == "float32":
        half = _size(size["experts"] // 2).strip()
        remedies.append(f"model.expert_dtype=bfloat16 lowers the experts to {half}")
    gib = -(-plan.needed_bytes // GIB)
    return [*remedies, f"a machine with {gib} GiB of free memory"]


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
    fit = most if left is None else left // per_token
    if fit >= most:
        return most, "as many as a full batch can use"
    return max(fit, min(LEAST_POOL, context)), "what is left"


def _reserve(profile: Profile, available_bytes: int | None) -> int:
    if profile.memory.reserve_gib is not None:
        return int(profile.memory.reserve_gib * GIB)
    return GIB if available_bytes is None else min(GIB, int(available_bytes * RESERVE_SHARE))


def _size(number: int) -> str:
    unit, name = (GIB, "GiB") if number >= GIB else (2**20, "MiB")
    return f"{number / unit:8.2f} {name}"
