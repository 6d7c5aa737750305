"""The choice of a model's expert kernels, from the profile's name and the device, while loading.

CUDA tensors go to Triton, or to the reference with a warning where Triton cannot run. Recurrent
layers run on the same devices (`enable_recurrence`).

Shape legend as in kernels/reference.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import backend_status, choose_kernel
from kernels.reference import AnyExperts
from kernels.triton import triton_status

_logger = logging.getLogger("moe")


class BackendError(ValueError):
    """The chosen backend cannot run the experts; the message says why and what to do."""


class Forward(Protocol):
    """The signature of `kernels.experts_forward`."""

    def __call__(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: AnyExperts,
        add_to_TH: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Backend:
    """The kernels that run the experts (`name`), why (`reason`), and the function (`forward`).

    Attributes:
        check_weights: raises `BackendError` for weights that it cannot multiply; None: it can all.
    """

    name: str
    reason: str
    forward: Forward
    check_weights: Callable[[Sequence[AnyExperts]], None] | None = None

    def check(self, layers: Sequence[AnyExperts]) -> None:
        """Raise `BackendError` where it cannot multiply these weights."""
        if self.check_weights is not None:
            self.check_weights(layers)


def choose_backend(wanted: str, device: torch.device, auto: Forward) -> Backend:
    """The backend called `wanted`: auto, triton or reference.

    Args:
        device: where the model is.
        auto: `kernels.experts_forward`, which chooses a kernel for each call.

    Raises:
        BackendError: triton was wanted and cannot run here.
    """
    if wanted == "reference":
        return Backend("reference", "chosen in the profile", reference.experts_forward)
    if wanted != "auto" and device.type != "cuda":
        raise BackendError(f"{wanted} needs a CUDA device, and the model runs on '{device}'")
    status = backend_status() if device.type == "cpu" else triton_status()
    if wanted == "triton" and status["name"] != "triton":
        raise BackendError(f"triton cannot run here: {status['reason']}")
    return Backend(status["name"], status["reason"], auto)


@cache
def triton_kernels() -> ModuleType | None:
    """The module of kernels for CUDA tensors; None, with one warning, where Triton cannot run."""
    status = triton_status()
    if status["name"] != "triton":
        _logger.warning("CUDA experts run on the slow reference kernel: %s", status["reason"])
        return None
    from kernels.triton import experts

    return experts


def enable_recurrence(device: torch.device) -> str:
    """Let the operations of kernels/recurrence.py run on tensors there; else the reason why not."""
    if device.type == "cpu":
        native, reason = choose_kernel()
        return reason if native is None else ""
    if device.type != "cuda":
        return f"there are no kernels for '{device}'"
    status = triton_status()
    if status["name"] != "triton":
        return status["reason"]
    import kernels.triton.recurrence  # noqa: F401 - registers itself

    return ""
