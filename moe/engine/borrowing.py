"""``offload.borrow``: the expert cache uses memory that the KV cache does not need now."""

from __future__ import annotations

from contextlib import suppress

from moe.loading.memory_plan import MemoryPlan
from moe.machine import give_back_freed_memory
from moe.settings import OffloadSettings, Profile
from offload.cache import ExpertCache
from offload.errors import OffloadError
from offload.offloaded import Offloaded

STEPS = 32
"""Number of cache sizes between the smallest and twice that, so that resizes are rare."""


def kv_borrowing(
    offloaded: Offloaded | None, plan: MemoryPlan, settings: OffloadSettings
) -> KVBorrowing | None:
    """None if the profile forbids it, or the slots are a GPU's, which are fixed."""
    if offloaded is None or not settings.borrow or len(offloaded.tiers) > 1:
        return None
    return KVBorrowing(offloaded.cache, plan)


def borrowing_notice(offloaded: Offloaded | None, profile: Profile) -> str:
    """Return a notice if the profile asks for borrowing on a GPU; else empty."""
    if offloaded is None or not profile.offload.borrow or len(offloaded.tiers) == 1:
        return ""
    return "offload.borrow changes nothing on a GPU: its slots are fixed while a model is loaded"


class KVBorrowing:
    """Moves the boundary between an expert cache and the KV cache.

    Args:
        cache: has the plan's slots while the KV cache is full, and more while it is not.
        plan: of the model.
    """

    def __init__(self, cache: ExpertCache, plan: MemoryPlan) -> None:
        near = plan.tiers[0]
        self._cache, self._least = cache, near.experts
        self._slot_bytes = near.bytes // near.experts
        self._kv_tokens, self._token_bytes = plan.kv_tokens, plan.kv_bytes_per_token
        self._stride = max(1, near.experts // STEPS)

    def resize_for(self, used_tokens: float) -> None:
        """Between steps: make room for the next step's KV, of this many tokens."""
        spare = max(0, self._kv_tokens - used_tokens) * self._token_bytes
        more = int(spare // self._slot_bytes) // self._stride * self._stride
        slots, now = self._least + more, self._cache.slots
        if slots < now or slots >= now + 2 * self._stride:
            if slots > now:  # what sequences have freed lies between blocks of others
                give_back_freed_memory()
            with suppress(OffloadError):  # a read hangs: keep the size until it has ended
                self._cache.resize(slots)
