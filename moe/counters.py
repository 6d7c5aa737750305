"""What a loaded model has done and what runs how, ready for JSON."""

from __future__ import annotations

from typing import Any

from moe.loaded import LoadedModel
from moe.parallel.following import Following
from moe.parallel.leading import Leading
from routing import READERS

Session = Leading | Following | None
"""The ranks of a launch, if this process is one of them."""


def counters(loaded: LoadedModel, session: Session) -> dict[str, Any]:
    """See `MoE.stats`."""
    experts = loaded.experts
    bytes_by, layers = experts.expert_bytes_read_by, experts.statistics.snapshot()
    offloaded, speculator = loaded.offloaded, loaded.speculation.speculator
    return {
        "weight_bytes": loaded.weight_bytes,
        "expert_bytes": experts.expert_bytes,
        "expert_bytes_read": sum(bytes_by.values()),
        "expert_bytes_read_by": bytes_by,
        "expert_loads_by": {
            reader: sum(layer["expert_loads_by"][reader] for layer in layers) for reader in READERS
        },
        "layers": layers,
        "offload": None if offloaded is None else offloaded.statistics(),
        "speculation": None if speculator is None else speculator.figures(),
        "parallel": session.statistics() if isinstance(session, Leading) else None,
    }


def reset(loaded: LoadedModel, session: Session) -> None:
    """Count from here on."""
    loaded.experts.statistics.reset()
    if loaded.offloaded is not None:
        loaded.offloaded.reset_statistics()
    if isinstance(session, Leading):
        session.reset_statistics()
    if loaded.speculation.speculator is not None:
        loaded.speculation.speculator.report.reset()


def describe(loaded: LoadedModel, session: Session) -> dict[str, Any]:
    """See `MoE.status`."""
    offloaded, speculation = loaded.offloaded, loaded.speculation
    return {
        "architecture": type(loaded.trunk.model).__name__,
        "device": str(loaded.trunk.device),
        "packing": {"enabled": loaded.packing.enabled, "why": loaded.packing.reason},
        "fused": {"enabled": loaded.fused.enabled, "why": loaded.fused.reason},
        "speculation": {
            "enabled": speculation.speculator is not None,
            "why": speculation.reason,
        },
        "expert_kernel": {"name": loaded.backend.name, "reason": loaded.backend.reason},
        "offload": None if offloaded is None else offloaded.status(),
        "parallel": session.status() if isinstance(session, Leading) else None,
        "tools": loaded.codec.tools.as_dict(),
        "reasoning": loaded.codec.reasoning.as_dict(),
        "notices": list(loaded.notices),
    }
