"""The compiled experts behind torch tensors: argument checks, plans, and the calls.

A plan is what a layer's weights need once: their description for C++, biases in float32, and
whether the activation is silu(gate) * up. Where it is, found by trying the callable on random
input, the whole layer is one C++ call; otherwise the callable runs in torch between two calls.

Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.activation import by_blocks, empty_rows, is_silu_gated
from kernels.reference import ExpertWeights, check_shapes, id_error

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_MEMORY = "no memory for the scratch rows of this call; use fewer tokens at once"


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("experts", "hidden", "width", "gate_up_rows")),
        ("weight_dtype", ctypes.c_int32),
    )


class _Routing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slot", "position", "begin", "active")),
        *((name, ctypes.c_int64) for name in ("rows", "num_active")),
    )


@dataclass(frozen=True)
class _Plan:
    key: tuple[object, ...]  # the storage that the plan points to
    layer: _Layer
    biases: tuple[Tensor | None, Tensor | None]  # kept alive: float32 copies
    gated: bool  # the activation is silu(gate) * up on concatenated halves


class NativeExperts:
    """`experts_forward` on the CPU by a compiled library (see kernels/cpu/build.py)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, dtype = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        signatures = {
            "moe_routing_numbers": (size, (size, size)),
            "moe_route": (size, (pointer, size, size, pointer, pointer)),
            "moe_first": (None, (pointer, pointer, pointer, dtype, size, pointer, dtype)),
            "moe_second": (None, (pointer, pointer, pointer, dtype, pointer, dtype)),
            "moe_combine": (None, (*(pointer,) * 4, size, size, pointer, dtype, dtype)),
            "moe_forward": (
                dtype,
                (pointer, pointer, dtype, pointer, pointer, size, size, pointer, dtype),
            ),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self._plans: WeakKeyDictionary[ExpertWeights, _Plan] = WeakKeyDictionary()

    @staticmethod
    def supports(hidden_TH: Tensor, experts: ExpertWeights) -> bool:
        """Whether dtypes, devices and layout are ones that the library knows."""
        gate_up, down = experts.gate_up_EGH, experts.down_EHF
        return (
            hidden_TH.device.type == gate_up.device.type == down.device.type == "cpu"
            and hidden_TH.dtype in _DTYPES
            and gate_up.dtype in _DTYPES
            and gate_up.is_contiguous()
            and down.is_contiguous()
        )

    def __call__(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """As kernels.reference.experts_forward, without gradients; a row's bits depend on its own
        inputs only, not on the other rows of the call nor on the number of threads.

        bf16 activations with bf16 weights use the CPU's bf16 dot products where it has them (the
        inner activations are rounded to bf16 then, as in transformers); all else is float32.
        """
        check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts)
        if hidden_TH.dtype == torch.float16:
            hidden = hidden_TH.float()
            return self(hidden, expert_ids_TK, weights_TK, experts).to(torch.float16)
        if expert_ids_TK.numel() == 0:
            return torch.zeros_like(hidden_TH)
        hidden_TH = hidden_TH.contiguous()
        ids_TK = expert_ids_TK.to(torch.int64).contiguous()
        weights_TK = weights_TK.to(torch.float32).contiguous()
        plan = self._plan(experts)
        if not plan.gated or experts.post_norm is not None:
            return self._in_steps(hidden_TH, ids_TK, weights_TK, experts, plan)
        output_TH = torch.empty_like(hidden_TH)
        done = self._library.moe_forward(
            ctypes.addressof(plan.layer),
            hidden_TH.data_ptr(),
            _DTYPES[hidden_TH.dtype],
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            *ids_TK.shape,
            output_TH.data_ptr(),
            torch.get_num_threads(),
        )
        if done < 0:
            raise id_error(experts)
        if not done:
            raise MemoryError(_NO_MEMORY)
        return output_TH

    def _in_steps(
        self,
        hidden_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        experts: ExpertWeights,
        plan: _Plan,
    ) -> Tensor:
        """The layer with the architecture's own activation and norm between the C++ calls."""
        library, layer = self._library, ctypes.addressof(plan.layer)
        dtype, threads, size = _DTYPES[hidden_TH.dtype], torch.get_num_threads(), ids_TK.numel()
        numbers = torch.empty(
            library.moe_routing_numbers(size, experts.num_experts), dtype=torch.int32, device="cpu"
        )
        record = _Routing()
        routing = ctypes.addressof(record)
        rows = library.moe_route(
            ids_TK.data_ptr(), size, experts.num_experts, numbers.data_ptr(), routing
        )
        if rows < 0:
            raise id_error(experts)
        projected_AG = empty_rows(rows, experts.gate_up_EGH.shape[1])
        hidden, slots = hidden_TH.data_ptr(), ids_TK.shape[1]
        library.moe_first(layer, routing, hidden, dtype, slots, projected_AG.data_ptr(), threads)
        inner_AF = by_blocks(experts.activation, projected_AG, experts.intermediate_size)
        row_AH = empty_rows(rows, experts.hidden_size)
        library.moe_second(layer, routing, inner_AF.data_ptr(), dtype, row_AH.data_ptr(), threads)
        if experts.post_norm is not None:
            row_AH = by_blocks(experts.post_norm, row_AH, experts.hidden_size)
        output_TH = torch.empty_like(hidden_TH)
        library.moe_combine(
            layer,
            routing,
            row_AH.data_ptr(),
            weights_TK.data_ptr(),
            *ids_TK.shape,
            output_TH.data_ptr(),
            dtype,
            threads,
        )
        return output_TH

    def _plan(self, experts: ExpertWeights) -> _Plan:
        # Parameters can be moved or converted in place under an unchanged object.
        biases = experts.gate_up_bias_EG, experts.down_bias_EH
        key = (
            experts.gate_up_EGH.data_ptr(),
            experts.down_EHF.data_ptr(),
            experts.gate_up_EGH.dtype,
            *(
                (b.data_ptr(), 0 if b.is_inference() else b._version)
                for b in biases
                if b is not None
            ),
        )
        plan = self._plans.get(experts)
        if plan is None or plan.key != key:
            plan = self._plans[experts] = _make_plan(experts, key)
        return plan


def _make_plan(experts: ExpertWeights, key: tuple[object, ...]) -> _Plan:
    def float_copy(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.detach().float().contiguous()

    gate_up_bias, down_bias = float_copy(experts.gate_up_bias_EG), float_copy(experts.down_bias_EH)
    layer = _Layer(
        experts.gate_up_EGH.data_ptr(),
        experts.down_EHF.data_ptr(),
        None if gate_up_bias is None else gate_up_bias.data_ptr(),
        None if down_bias is None else down_bias.data_ptr(),
        experts.num_experts,
        experts.hidden_size,
        experts.intermediate_size,
        experts.gate_up_EGH.shape[1],
        _DTYPES[experts.gate_up_EGH.dtype],
    )
    return _Plan(key, layer, (gate_up_bias, down_bias), is_silu_gated(experts))
