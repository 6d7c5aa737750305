"""`Profile`: every key that a run can set, with its default and meaning.

The sections below it are in `moe.settings.sections`; import them from here. `moe.settings.profile`
loads a profile from files, environment and command line; `moe.settings.device` applies its device
and threads. Defaults are written here and nowhere else (a test compares ``configs/default.yaml``
with them). The docstring under a field is its description, also in `Profile.model_json_schema`.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from moe.hooks import methods, methods_on
from moe.section import Settings
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
    SpeculationSettings,
)

__all__ = [
    "EngineSettings",
    "GenerationSettings",
    "KernelSettings",
    "MemorySettings",
    "MethodsSettings",
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
    ("offload", "late", "host_int8", "host", "computes some experts on rounded activations"),
    ("parallel", "payload", "int8", "plain", "rounds what experts of other ranks read"),
)
"""Section, key, the value that changes the model's output, the value that does not, and why."""


if TYPE_CHECKING:

    class MethodsSettings(Settings):
        """A section for each method of this installation that has keys, under its name."""

        def __getattr__(self, name: str) -> Any: ...

else:
    MethodsSettings = create_model(
        "MethodsSettings",
        __base__=Settings,
        __doc__="A section for each method of this installation that has keys, under its name.",
        **{
            method.name: (method.settings, Field(method.settings(), description=method.about))
            for method in methods()
            if method.settings is not None
        },
    )


def _check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise PydanticCustomError("device", "must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return device


class Profile(Settings):
    """Every setting of a run. Immutable: a changed setting is a new profile."""

    device: Annotated[str, AfterValidator(_check_device)] = "auto"
    """Device that the model runs on: cpu, cuda or cuda:N. auto: cuda if there is one, else cpu."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads that torch uses. null: torch's own choice."""

    lossless: bool = True
    """Refuse every setting that can change the model's output at the chosen precision."""

    model: ModelSettings = ModelSettings()
    """Number formats of the weights, and checks while they are loaded."""

    kernels: KernelSettings = KernelSettings()
    """The code that computes the experts."""

    routing: RoutingSettings = RoutingSettings()
    """Changes to the model's choice of experts."""

    generation: GenerationSettings = GenerationSettings()
    """Sampling of requests that do not set it themselves."""

    engine: EngineSettings = EngineSettings()
    """The scheduler, and how decode steps are run."""

    prefill: PrefillSettings = PrefillSettings()
    """The processing of prompts beside sequences that are decoding."""

    memory: MemorySettings = MemorySettings()
    """Limits on memory: KV cache, experts and reserve."""

    offload: OffloadSettings = OffloadSettings()
    """Caching of a store's experts, and reads from disk, if memory does not hold them all."""

    speculation: SpeculationSettings = SpeculationSettings()
    """Speculative decoding: tokens are drafted, and the model verifies several in one pass."""

    parallel: ParallelSettings = ParallelSettings()
    """Expert parallelism: the ranks of one launch share the experts of a model."""

    server: ServerSettings = ServerSettings()
    """Limits of ``moe serve``."""

    methods: MethodsSettings = MethodsSettings()
    """Keys of published methods that are off by default (`moe methods` lists them)."""

    @model_validator(mode="after")
    def _check_methods(self) -> Profile:
        for method in methods_on(self):
            key = method.on_by(self)
            value, off = attrgetter(key)(self), _default(key)
            words = {"key": key, "value": value, "off": "null" if off is None else off}
            # A list is checked where it is parsed: it says which of its entries is meant.
            if self.lossless and method.changes_answers and not isinstance(value, tuple):
                raise PydanticCustomError(
                    "lossless",
                    "{key}: {value} {why}, which lossless: true refuses; set lossless: false or "
                    "{key}: {off}",
                    {**words, "why": method.changes_answers},
                )
            for other, needed in method.needs.items():
                if attrgetter(other)(self) != needed:
                    raise PydanticCustomError(
                        "methods",
                        "{key}: {value} needs {other}: {needed}; set that, or {key}: {off}",
                        {**words, "other": other, "needed": _as_yaml(needed)},
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


def _default(key: str) -> Any:
    """The default of a dotted key, as YAML."""
    fields, default = Profile.model_fields, None
    for name in key.split("."):
        default = fields[name].default
        fields = getattr(type(default), "model_fields", {})
    return default


def _as_yaml(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
