"""The compiled C++ kernels for CPUs: `choose_kernel` finds or builds them, once a process.

`NativeKernels` holds one object for each job: experts of whole weights (`whole`) or bit planes
(`planes`), linear layers, attention and norms of prompts, decode steps, and the assignment of slots
to ranks; it makes the objects that keep state (`reads`, `all_to_all`, `learner`). Recurrent layers
of CPU tensors (kernels/recurrence.py) run on the library once it is loaded. Where it does not
build, experts run on the torch reference, with a warning.
`MOE_CPU_KERNEL=native` makes a failed build an error, `MOE_CPU_KERNEL=reference` skips the build.
"""

from __future__ import annotations

import logging
import os
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

import kernels.cpu.program
import kernels.cpu.stages  # noqa: F401
from kernels.cpu.all_to_all import NativeAllToAll, NativeAssign
from kernels.cpu.build import load_library
from kernels.cpu.compiler import BUNDLED_DIR, BuildError
from kernels.cpu.decode import NativeDecode
from kernels.cpu.dense import NativeAttention, NativeLinear, NativeNorms
from kernels.cpu.experts import LayerCall, NativeExperts, NativePlanes
from kernels.cpu.kv import NativeKV
from kernels.cpu.learning import NativeLearner
from kernels.cpu.recurrence import use_library
from kernels.cpu.streaming import ArrivingCall, NativeReads
from kernels.planes import QuantizedExperts
from kernels.reference import AnyExperts

_ENVIRONMENT = "MOE_CPU_KERNEL"
_logger = logging.getLogger("moe")


@dataclass(frozen=True)
class NativeKernels:
    """The kernels of one loaded library."""

    library: CDLL
    whole: NativeExperts
    planes: NativePlanes
    linear: NativeLinear
    decode: NativeDecode
    attention: NativeAttention
    kv: NativeKV
    norms: NativeNorms
    assign: NativeAssign

    @classmethod
    def of(cls, library: CDLL) -> NativeKernels:
        use_library(library)
        return cls(
            library,
            NativeExperts(library),
            NativePlanes(library),
            NativeLinear(library),
            NativeDecode(library),
            NativeAttention(library),
            NativeKV(library),
            NativeNorms(library),
            NativeAssign(library),
        )

    def supports(self, hidden_TH: Tensor, experts: AnyExperts) -> bool:
        """Return whether `experts_forward` knows these activations and weights."""
        if isinstance(experts, QuantizedExperts):
            known = experts.first.for_cpus and experts.second.for_cpus
            return known and self.planes.supports(hidden_TH, experts.scales[0])
        return self.whole.supports(hidden_TH, experts)

    def experts_forward(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: AnyExperts,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        """As kernels.reference.experts_forward, without gradients."""
        if isinstance(experts, QuantizedExperts):
            return self.planes.experts(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
        return self.whole.experts(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)

    def layer_call(self, hidden_TH: Tensor, experts: AnyExperts) -> LayerCall | None:
        """Return the call by which compiled callers run a layer for rows like these; None where
        they cannot."""
        if not self.supports(hidden_TH, experts):
            return None
        if isinstance(experts, QuantizedExperts):
            return self.planes.layer_call(experts)
        return self.whole.layer_call(experts)

    def all_to_all(self, *arguments: Any, **options: Any) -> NativeAllToAll:
        """Dispatch and combine between ranks of one machine; see NativeAllToAll."""
        return NativeAllToAll(self.library, *arguments, **options)

    def learner(self, *arguments: Any, **options: Any) -> NativeLearner:
        """Request rates of a cache's experts; see NativeLearner."""
        return NativeLearner(self.library, *arguments, **options)

    def arriving(self, *arguments: Any) -> ArrivingCall:
        """A call of a layer whose experts are still being read; see ArrivingCall."""
        return ArrivingCall(self.library, *arguments)

    def reads(self, most: int) -> NativeReads:
        """A pool of threads that read files; see NativeReads."""
        return NativeReads(self.library, most)


@cache
def choose_kernel() -> tuple[NativeKernels | None, str]:
    """The compiled kernels, or None for the reference; and the reason. May build on the first call.

    Raises:
        ValueError: MOE_CPU_KERNEL is neither "native" nor "reference".
        BuildError: MOE_CPU_KERNEL is "native" and the build failed.
        LayoutError: the library's structs differ from Python's records.
    """
    wanted = os.environ.get(_ENVIRONMENT, "")
    if wanted not in ("", "native", "reference"):
        raise ValueError(f'{_ENVIRONMENT} must be "native" or "reference", got "{wanted}"')
    if wanted == "reference":
        return None, f"{_ENVIRONMENT}=reference"
    try:
        library = load_library()
    except BuildError as error:
        if wanted == "native":
            raise
        _logger.warning("CPU experts run on the slow reference kernel: %s", error)
        return None, str(error)
    path = Path(library._name)
    bundled = path.parent == BUNDLED_DIR
    reason = f"the wheel's library {path.stem}" if bundled else "compiled for this CPU"
    reason += ", with AMX" if library.moe_uses_amx() else ""
    return NativeKernels.of(library), reason


def backend_status() -> dict[str, str]:
    """`name` ("native" or "reference") and `reason` of the CPU kernel in use."""
    native, reason = choose_kernel()
    return {"name": "reference" if native is None else "native", "reason": reason}
