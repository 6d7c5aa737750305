"""`MegaBlocksExperts`: the backend.

Shape legend as in kernels/reference.py; A is the number of slots in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version
from torch import Tensor

from kernels import Backend, BackendError
from kernels.reference import AnyExperts, ExpertWeights, check_shapes, id_error
from moe.methods.megablocks import INSTALL

_OLDEST, _NEWER = Version("0.7.0"), Version("0.11")


class MegaBlocksExperts:
    """`experts_forward` with MegaBlocks' grouped matrix products.

    Raises:
        BackendError: the package, its CUDA extension or grouped_gemm is absent, or its version is
            not supported.
    """

    def __init__(self) -> None:
        self._gmm = _load()

    @staticmethod
    def check(layers: Sequence[AnyExperts]) -> None:
        """Raise BackendError for layers that are not whole bf16 weights."""
        for index, layer in enumerate(layers):
            held = layer.gate_up_EGH.dtype if isinstance(layer, ExpertWeights) else "bit planes"
            if held != torch.bfloat16:
                raise BackendError(
                    f"MegaBlocks multiplies bfloat16 weights only, and the experts of MoE layer "
                    f"{index} are {held}; load them as bfloat16 or choose another backend"
                )

    def __call__(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: AnyExperts,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        """As kernels.reference.experts_forward, without gradients; products are of bf16.

        `check` must have accepted the experts.
        """
        assert isinstance(experts, ExpertWeights)
        check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
        tokens, slots = expert_ids_TK.shape
        ids_S = expert_ids_TK.reshape(-1).cpu()
        unused = int((ids_S == -1).sum())
        used_A = ids_S[ids_S != -1]
        if used_A.numel() == 0:
            return torch.zeros_like(hidden_TH) if add_to_TH is None else add_to_TH
        if int(used_A.min()) < 0 or int(used_A.max()) >= experts.num_experts:
            raise id_error(experts)
        sizes_E = torch.bincount(used_A, minlength=experts.num_experts)
        order_A = ids_S.argsort(stable=True)[unused:]
        expert_A, order_A = (x.to(hidden_TH.device) for x in (ids_S[order_A], order_A))
        row_AH = hidden_TH[order_A // slots].to(torch.bfloat16)
        inner_AG = self._gmm(row_AH, experts.gate_up_EGH, sizes_E, trans_b=True)
        if experts.gate_up_bias_EG is not None:
            inner_AG = inner_AG + experts.gate_up_bias_EG[expert_A]
        inner_AF = experts.activation(inner_AG).to(torch.bfloat16).contiguous()
        row_AH = self._gmm(inner_AF, experts.down_EHF, sizes_E, trans_b=True)
        if experts.down_bias_EH is not None:
            row_AH = row_AH + experts.down_bias_EH[expert_A]
        if experts.post_norm is not None:
            row_AH = experts.post_norm(row_AH)
        row_SH = hidden_TH.new_zeros(tokens * slots, hidden_TH.shape[1], dtype=torch.float32)
        row_TKH = row_SH.index_copy(0, order_A, row_AH.float()).unflatten(0, (tokens, slots))
        weights_TK1 = weights_TK.float().masked_fill(expert_ids_TK < 0, 0.0)[..., None]
        output_TH = torch.zeros_like(row_TKH[:, 0]) if add_to_TH is None else add_to_TH
        for k in range(slots):
            output_TH += weights_TK1[:, k] * row_TKH[:, k]
        return output_TH if add_to_TH is not None else output_TH.to(hidden_TH.dtype)


def make(device: torch.device) -> Backend:
    """The backend for a model on this device. Raises `BackendError` where it cannot run."""
    if device.type != "cuda":
        raise BackendError(f"megablocks needs a CUDA device, and the model runs on '{device}'")
    experts = MegaBlocksExperts()
    return Backend("megablocks", "chosen in the profile", experts, experts.check)


def _load() -> Callable[..., Tensor]:
    try:
        found = Version(version("megablocks"))
    except PackageNotFoundError:
        raise BackendError(f"MegaBlocks is not installed; {INSTALL}") from None
    if not _OLDEST <= found < _NEWER:
        raise BackendError(
            f"MegaBlocks must be >= {_OLDEST} and < {_NEWER}, found {found}; {INSTALL}"
        )
    try:
        util = import_module("megablocks.grouped_gemm_util")
    except ImportError as error:
        raise BackendError(
            f"MegaBlocks {found} is installed, but cannot be imported: {error} (megablocks_ops is "
            f"its CUDA extension, built when it is installed); {INSTALL}"
        ) from error
    if not util.grouped_gemm_is_available():
        raise BackendError(f"MegaBlocks {found} needs the package grouped_gemm; {INSTALL}")
    gmm: Callable[..., Tensor] = util.ops.gmm
    return gmm
