"""moe: run Mixture-of-Experts language models that are larger than the memory they run in."""

from __future__ import annotations

import os
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

if "OMP_WAIT_POLICY" not in os.environ:
    # GCC's OpenMP, which torch brings, reads this when it is loaded. Its threads spin at the end of
    # each of torch's operations, by default for 7 ms on a Zen 5. Where other processes leave two
    # threads one core, they spin whole time slices away: a prompt of ten tokens takes 100 ms in
    # place of 30. After .2 ms they sleep; what lies between the operations of a pass is shorter.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

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
