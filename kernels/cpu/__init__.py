"""Choice of the CPU kernels: compiled C++ where it builds, else the reference, and why.

`MOE_CPU_KERNEL=native` makes a failed build an error, `MOE_CPU_KERNEL=reference` skips the build.
"""

from __future__ import annotations

import logging
import os
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, dtype

from kernels.cpu import interface as calls
from kernels.cpu.all_to_all import NativeAllToAll, NativeAssign
from kernels.cpu.build import BuildError, load_library
from kernels.cpu.decode import NativeDecode
from kernels.cpu.dense import NativeAttention, NativeLinear, NativeNorms
from kernels.cpu.experts import LayerCall, NativeExperts, NativePlanes
from kernels.cpu.foresight import NativeForesight
from kernels.cpu.learning import NativeLearner
from kernels.cpu.streaming import ArrivingCall, NativeReads, declare_arriving
from kernels.planes import QuantizedExperts
from kernels.reference import AnyExperts

_ENVIRONMENT = "MOE_CPU_KERNEL"
_logger = logging.getLogger("moe")


@dataclass(frozen=True)
class NativeKernels:
    """Of one library: whole weights, bit planes, linear layers of whole weights, decode steps,
    attention of prompts and what is between its products, assignment."""

    library: CDLL
    whole: NativeExperts
    planes: NativePlanes
    linear: NativeLinear
    decode: NativeDecode
    attention: NativeAttention
    norms: NativeNorms
    assign: NativeAssign

    def supports(self, hidden_TH: Tensor, experts: AnyExperts) -> bool:
        """Whether `experts_forward` knows these activations and weights."""
        if isinstance(experts, QuantizedExperts):
            return self.planes.supports(hidden_TH, experts.scales[0])
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
        """How C++ callers run a layer for rows like these; None where they cannot."""
        if not self.supports(hidden_TH, experts):
            return None
        if isinstance(experts, QuantizedExperts):
            return self.planes.layer_call(experts)
        return self.whole.layer_call(experts)

    def meeting(self, *arguments: Any, **options: Any) -> NativeAllToAll:
        """Dispatches of ranks of one machine; see NativeMeeting."""
        return NativeAllToAll(self.library, *arguments, **options)

    def learner(self, *arguments: Any, **options: Any) -> NativeLearner:
        """What a cache of experts learns; see NativeLearner."""
        return NativeLearner(self.library, *arguments, **options)

    def foresight(self, *arguments: Any, **options: Any) -> NativeForesight:
        """How soon a cache's experts are asked for next; see NativeForesight."""
        return NativeForesight(self.library, *arguments, **options)

    def arriving(self, *arguments: Any) -> ArrivingCall:
        """A call of a layer whose experts are still coming; see ArrivingCall."""
        return ArrivingCall(self.library, *arguments)

    def reads(self, most: int) -> NativeReads:
        """Files read in the background; see NativeReads."""
        return NativeReads(self.library, most)

    def weighted_sum(
        self, row_AH: Tensor, position_TK: Tensor, weights_TK: Tensor, to: dtype, more_BH: Tensor
    ) -> Tensor:
        """As kernels.backends.weighted_sum, of contiguous tensors: float32, and int32 positions."""
        return calls.weighted_sum(self.library, row_AH, position_TK, weights_TK, to, more_BH)


@cache
def choose_kernel() -> tuple[NativeKernels | None, str]:
    """The compiled kernels, or None for the reference; and the reason. Builds on the first call.

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
        library = load_library()
    except BuildError as error:
        if wanted == "native":
            raise
        _logger.warning("CPU experts run on the slow reference kernel: %s", error)
        return None, str(error)
    native = NativeKernels(
        library,
        NativeExperts(library),
        NativePlanes(library),
        NativeLinear(library),
        NativeDecode(library),
        NativeAttention(library),
        NativeNorms(library),
        NativeAssign(library),
    )
    declare_arriving(library)
    return native, "compiled for this CPU" + (", with AMX" if library.moe_uses_amx() else "")


def backend_status() -> dict[str, str]:
    """`name` ("native" or "reference") and `reason` of the CPU kernel in use."""
    native, reason = choose_kernel()
    return {"name": "reference" if native is None else "native", "reason": reason}
