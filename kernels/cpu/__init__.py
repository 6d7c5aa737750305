"""Choice of the CPU kernel: compiled C++ where it builds, else the reference, and why.

`MOE_CPU_KERNEL=native` makes a failed build an error, `MOE_CPU_KERNEL=reference` skips the build.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from kernels.cpu.build import BuildError, load_library
from kernels.cpu.native import NativeExperts

_ENVIRONMENT = "MOE_CPU_KERNEL"
_logger = logging.getLogger("moe")


@cache
def choose_kernel() -> tuple[NativeExperts | None, str]:
    """The compiled experts, or None for the reference; and the reason. Builds on the first call.

    Raises:
        ValueError: MOE_CPU_KERNEL is neither "native" nor "reference".
        BuildError: MOE_CPU_KERNEL is "native" and the build failed.
    """
    wanted = os.environ.get(_ENVIRONMENT, "")
    if wanted not in ("", "native", "reference"):
        raise ValueError(f'{_ENVIRONMENT} must be "native" or "reference", got "{wanted}"')
    if wanted == "reference":
        return None, f"{_ENVIRONMENT}=reference"
    try:
        native = NativeExperts(load_library())
    except BuildError as error:
        if wanted == "native":
            raise
        _logger.warning("CPU experts run on the slow reference kernel: %s", error)
        return None, str(error)
    return native, "compiled for this CPU"


def backend_status() -> dict[str, str]:
    """`name` ("native" or "reference") and `reason` of the CPU kernel in use."""
    native, reason = choose_kernel()
    return {"name": "reference" if native is None else "native", "reason": reason}
