"""The settings tree: every key that a profile has, its default and what it does.

Defaults are written here and nowhere else (a test holds ``configs/default.yaml`` to them). The
docstring under a field is its description, also in ``Profile.model_json_schema()``.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moe.settings.sections import (
    EngineSettings,
    GenerationSettings,
    KernelSettings,
    MemorySettings,
    ModelSettings,
    OffloadSettings,
    ParallelSettings,
    PrefillSettings,
    RoutingSettings,
    ServerSettings,
    Settings,
    SpeculationSettings,
)

__all__ = [
    "EngineSettings",
    "GenerationSettings",
    "KernelSettings",
    "MemorySettings",
    "ModelSettings",
    "OffloadSettings",
    "ParallelSettings",
    "PrefillSettings",
    "Profile",
    "RoutingSettings",
    "ServerSettings",
    "Settings",
    "SpeculationSettings",
]

_NOT_LOSSLESS = (
    ("offload", "late", "host", "wait", "computes some experts of a GPU on rounded activations"),
    ("offload", "late", "prefix", "wait", "computes experts that come late with fewer bits"),
    ("parallel", "payload", "int8", "plain", "rounds what experts of other ranks read"),
)
"""Section, key, the value that changes what the model says, the one that does not, and why."""


def _check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise PydanticCustomError("device", "must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return device


class Profile(Settings):
    """Every setting of a run. Immutable: a changed setting is a new profile."""

    device: Annotated[str, AfterValidator(_check_device)] = "auto"
    """Where the model runs: cpu, cuda or cuda:N. auto: cuda where there is one, else cpu."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads used by torch. null: torch's own choice."""

    lossless: bool = True
    """Refuse everything that can change what the model says at the chosen precision."""

    model: ModelSettings = ModelSettings()
    """How the weights are held."""

    kernels: KernelSettings = KernelSettings()
    """What multiplies the experts."""

    routing: RoutingSettings = RoutingSettings()
    """Which experts a token goes to."""

    generation: GenerationSettings = GenerationSettings()
    """What a request gets when it does not say."""

    engine: EngineSettings = EngineSettings()
    """How requests share the machine."""

    prefill: PrefillSettings = PrefillSettings()
    """How prompts are read beside running sequences."""

    memory: MemorySettings = MemorySettings()
    """What may be held in memory."""

    offload: OffloadSettings = OffloadSettings()
    """How experts come from disk where memory does not hold them all."""

    speculation: SpeculationSettings = SpeculationSettings()
    """How the next tokens are drafted, for the model to verify several in one pass."""

    parallel: ParallelSettings = ParallelSettings()
    """How the processes of one launch share the experts of a model."""

    server: ServerSettings = ServerSettings()
    """Limits of ``moe serve``."""

    @model_validator(mode="after")
    def _check_contrast(self) -> Profile:
        if not self.speculation.contrast:
            return self
        for key, value, wrong in (
            ("lossless", "false", self.lossless),
            ("speculation.mode", "off", self.speculation.mode != "off"),
            ("parallel.enabled", "false", self.parallel.enabled),
        ):
            if wrong:
                raise PydanticCustomError(
                    "contrast",
                    "speculation.contrast changes what the model says and reads each token twice: "
                    "it needs {key}: {value}; set that, or speculation.contrast: 0",
                    {"key": key, "value": value},
                )
        return self

    @model_validator(mode="after")
    def _check_lossless(self) -> Profile:
        for section, key, lossy, instead, why in _NOT_LOSSLESS:
            if self.lossless and getattr(getattr(self, section), key) == lossy:
                raise PydanticCustomError(
                    "lossless",
                    "{name}: {lossy} {why}, which lossless: true refuses; "
                    "set lossless: false or {name}: {instead}",
                    {"name": f"{section}.{key}", "lossy": lossy, "instead": instead, "why": why},
                )
        return self
