"""What to say and to change where a model does not fit."""

from __future__ import annotations

import math

from moe.errors import DoesNotFitError
from moe.plan.budget import available_for, wave_tokens
from moe.plan.memory import GIB, MemoryPlan, size_text
from moe.settings import Profile


def check_fit(plan: MemoryPlan, profile: Profile, why_resident: str = "") -> None:
    """Raise `DoesNotFitError`, with all numbers and what to change, if it does not fit.

    Args:
        why_resident: why experts cannot stay on disk, and what would help.
    """
    if plan.fits:
        return
    if plan.host_bytes is not None and plan.host_needed_bytes > plan.host_bytes:
        raise DoesNotFitError(
            f"the model does not fit: beside {plan.place}, {size_text(plan.host_bytes).strip()} of "
            f"main memory are available for experts, too little to bring them there: {plan}\n"
            f"  - memory.host_gib of at least {_gib(plan.host_needed_bytes)}, if so much is free"
        )
    assert plan.available_bytes is not None
    needed, free = size_text(plan.needed_bytes).strip(), size_text(plan.available_bytes).strip()
    raise DoesNotFitError(
        f"the model does not fit: it needs {needed} and {free} are available in {plan}\n"
        + "\n".join(f"  - {remedy}" for remedy in _remedies(plan, profile, why_resident))
    )


def _remedies(plan: MemoryPlan, profile: Profile, why_resident: str) -> list[str]:
    """What would make room, most effective settings first; the last one always helps."""
    assert plan.available_bytes is not None
    size = {line.name: line.bytes for line in plan.lines}
    missing = plan.needed_bytes - plan.available_bytes
    remedies = [why_resident] if why_resident else []
    if profile.memory.kv_tokens is not None or profile.memory.kv_gib is not None:
        fit = (size["keys and values"] - missing) // plan.kv_bytes_per_token
        if fit > 0:
            remedies.append(f"memory.kv_tokens={fit} would fit ({fit * plan.kv_bytes_per_token} B)")
    wave = wave_tokens(profile)
    if wave > 512 and size["activations"] > missing // 4:
        key = "chunk_tokens" if profile.prefill.mode == "chunked" else "wave_tokens"
        remedies.append(f"a smaller prefill.{key} lowers the activations (it is {wave})")
    if profile.model.expert_dtype == "float32":
        half = size_text(size["experts"] // 2).strip()
        remedies.append(f"model.expert_dtype=bfloat16 lowers the experts to {half}")
    least = available_for(profile, plan)
    limit = profile.memory.device_gib
    if limit is not None and int(limit * GIB) == plan.available_bytes:
        remedies.append(f"memory.device_gib of at least {_gib(least)} (it is the limit here)")
    if not plan.tiers:
        remedies.append(f"a machine with {-(-least // GIB)} GiB of free memory")
    else:
        remedies.append(
            f"{_gib(least)} GiB of free memory are the least for this model and profile: "
            f"{plan.expert_slots} experts in memory, the others on disk"
        )
    return remedies


def _gib(size: int) -> str:
    """Bytes in GiB, rounded up: whoever gives so much has enough."""
    return f"{math.ceil(size / GIB * 1000) / 1000:g}"
