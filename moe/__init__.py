"""moe: run Mixture-of-Experts language models that are larger than the memory they run in."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe.completion import Completion, StreamEvent
    from moe.model import MoE
    from moe.sampling.params import SamplingParams, Structure
    from moe.settings import Profile

try:
    __version__ = version("moe-inference")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "Completion": "moe.completion",
    "MoE": "moe.model",
    "Profile": "moe.settings.profile",
    "SamplingParams": "moe.sampling.params",
    "StreamEvent": "moe.completion",
    "Structure": "moe.sampling.params",
}

__all__ = [
    "Completion",
    "MoE",
    "Profile",
    "SamplingParams",
    "StreamEvent",
    "Structure",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use: `moe --version` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
