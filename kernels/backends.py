"""What runs a model's experts: found out from a name and a device, once, while loading.

CUDA tensors go to Triton where it can be used, and to the reference, with a notice, where it
cannot. MegaBlocks runs only where it was asked for.

Shape legend as in kernels/reference.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import backend_status, choose_kernel
from kernels.megablocks import BackendError, MegaBlocksExperts
from kernels.reference import AnyExperts
from kernels.triton import triton_status

_logger = logging.getLogger("moe")


class Forward(Protocol):
    """What `kernels.experts_forward` is."""

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
    """Who runs the experts (`name`), why (`reason`), and how (`forward`)."""

    name: str
    reason: str
    forward: Forward

    def check(self, layers: Sequence[AnyExperts]) -> None:
        """Raise BackendError where MegaBlocks was chosen and cannot multiply these weights."""
        if isinstance(self.forward, MegaBlocksExperts):
            self.forward.check(layers)


def choose_backend(wanted: str, device: torch.device, auto: Forward) -> Backend:
    """The backend called `wanted`: auto, triton, megablocks or reference.

    Args:
        device: where the model is.
        auto: what decides for each call; `kernels.experts_forward`.

    Raises:
        BackendError: triton or megablocks was wanted and cannot run here.
    """
    if wanted == "reference":
        return Backend("reference", "chosen in the profile", reference.experts_forward)
    if wanted != "auto" and device.type != "cuda":
        raise BackendError(f"{wanted} needs a CUDA device, and the model runs on '{device}'")
    if wanted == "megablocks":
        return Backend("megablocks", "chosen in the profile", MegaBlocksExperts())
    status = backend_status() if device.type == "cpu" else triton_status()
    if wanted == "triton" and status["name"] != "triton":
        raise BackendError(f"triton cannot run here: {status['reason']}")
    return Backend(status["name"], status["reason"], auto)


@cache
def triton_kernels() -> ModuleType | None:
    """The kernels for CUDA tensors, or None (said once) where Triton cannot run them."""
    status = triton_status()
    if status["name"] != "triton":
        _logger.warning("CUDA experts run on the slow reference kernel: %s", status["reason"])
        return None
    from kernels.triton import experts

    return experts


# ---- The weighted sum of rows that experts gave, wherever they were computed.
#
# One definition for all kernels: products are rounded, then added in slot order, in the rows'
# dtype. So rows that come back from other processes give the bits that `experts_forward` gives
# where all experts are at hand.
#
# Shape legend as in kernels/reference.py; A is the number of rows.

_NATIVE = (torch.float32, torch.bfloat16)


def weighted_sum(
    row_AH: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    dtype: torch.dtype,
    more_BH: Tensor | None = None,
) -> Tensor:
    """``(T, H)`` in ``dtype``: `sum_k weights[t, k] * row[position[t, k]]`.

    Args:
        row_AH: experts' outputs before their weights, in the dtype of the sum.
        position_TK: integer row of each slot, negative for an unused one.
        weights_TK: float32.
        dtype: of the result, rounded once at the end.
        more_BH: rows that are counted on from those, wherever they lie.
    """
    more_BH = row_AH[:0] if more_BH is None else more_BH
    native = None
    if row_AH.device.type == "cpu" and row_AH.dtype == torch.float32 and dtype in _NATIVE:
        native, _ = choose_kernel()
    if native is not None:
        position_TK, weights_TK = position_TK.int().contiguous(), weights_TK.contiguous()
        rows = row_AH.contiguous(), more_BH.contiguous()
        return native.whole.weighted_sum(rows[0], position_TK, weights_TK, dtype, rows[1])
    row_AH = torch.cat([row_AH, more_BH])
    output_TH = row_AH.new_zeros(position_TK.shape[0], row_AH.shape[1])
    if len(row_AH):
        weights_TK = weights_TK.to(row_AH.dtype).masked_fill(position_TK < 0, 0)
        for k, position_T in enumerate(position_TK.clamp(min=0).unbind(1)):
            used_T1 = (position_TK[:, k, None] >= 0).to(row_AH.device)
            product_TH = weights_TK[:, k, None] * row_AH[position_T]
            output_TH += product_TH.where(used_T1, product_TH.new_zeros(()))
    return output_TH.to(dtype)
