"""What is held in memory, and how the rest comes from disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from moe.settings.base import Off, Settings

_MOST_GIB = 1 << 20
"""More than any machine has, and few enough that bytes fit 64 bits."""


class MemorySettings(Settings):
    """What may be held in memory."""

    kv_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of all sequences whose keys and values are in memory at once.
    null: as many as kv_gib holds, or else as fit beside the weights."""

    kv_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """The same limit in GiB; give one of the two."""

    reserve_gib: float | None = Field(default=None, ge=0.0, le=_MOST_GIB)
    """GiB that the memory plan leaves free.
    null: a twentieth of what is available, at most 1 GiB."""

    device_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """GiB of the device (main memory on a CPU) that the memory plan may fill with everything.
    null: what is free. Experts of a store that do not fit stay on disk, and the rest is a cache."""

    host_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """GiB of main memory for experts that a GPU does not hold. null: what is free but a tenth, at
    most all experts, which are read from disk once then. Without a GPU there is no such tier, and
    this changes nothing."""

    pinned_gib: float | None = Field(default=None, ge=0.0, le=_MOST_GIB)
    """GiB of those that may be page-locked, from where copies to the GPU run beside its computing.
    null: at most half of main memory."""

    keep_freed: bool = True
    """Keep freed memory for the next pass over a long prompt, up to 1 GiB, where all experts are
    in memory on a CPU. Concerns all of the process; false gives it back to the system at once."""

    prefix_tokens: int = Field(default=0, ge=0)
    """Most tokens of prompts that are kept for others that begin alike, within kv_tokens. 0: every
    prompt is read from its start."""

    @field_validator("kv_gib")
    @classmethod
    def _check_one(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("kv_tokens") is not None:
            raise PydanticCustomError(
                "both", "and memory.kv_tokens are two ways to set one limit: give one of them"
            )
        return value


class OffloadSettings(Settings):
    """How experts come from disk where memory does not hold them all."""

    policy: Literal["forecast", "frequency_recency", "lru", "lfu"] = "forecast"
    """Which experts are worth keeping. forecast: those expected soonest, going by what has
    predicted better: habits of the routing, frequencies, or what `moe calibrate` has learnt.
    frequency_recency: those used most often of late. lru: those used last. lfu: those used most
    often."""

    predictor: Annotated[str, Off] = "auto"
    """Which predictor of `moe calibrate` says what comes next. auto: the ensemble of all, where the
    model has been calibrated. off: none."""

    prefetch: bool = True
    """Read experts before they are needed: as the predictor says, wherever that is found to pay,
    and those of the next layer where nearly all of a layer's are asked for, as by prompts."""

    late: Literal["wait", "prefix", "host"] = "wait"
    """Experts that are missing when the router asks for them. wait: until they have been read or
    copied. prefix: of those with little of their token's weight, wait for the first late_bits only;
    answers then depend on what was in memory. host: beside a GPU, the processor computes as many of
    them from main memory as is sooner, by a measurement at start; it rounds activations to 8 bits.
    ``lossless: true`` refuses both."""

    late_bits: Literal[2, 3, 4] = 2
    """prefix: bits of an expert that are read and kept instead of all, until it is evicted or is
    asked for with more weight."""

    late_share: float = Field(default=0.6, ge=0.0, le=1.0)
    """prefix: share of a token's router weight that has whole experts, the heaviest first; those
    behind it do with a prefix. 0: all do."""

    reader: Literal["auto", "direct", "deepspeed", "buffered"] = "auto"
    """What reads them. auto: the fastest that passes by the system's file cache, by a short trial;
    buffered: through that cache."""

    borrow: bool = False
    """Let experts have the room that keys and values do not need for the moment (main memory; on a
    GPU slots are fixed, and a notice says so)."""

    hot_set: bool = True
    """Write down at the end which experts were worth keeping, beside the store, and read those
    first at the next start."""
