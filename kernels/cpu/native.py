"""The compiled experts on whole weights: plans, and the calls.

A plan is what a layer's weights need once: their description for C++, biases in float32, and
which activation they have.

Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.activation import Activation, empty_rows, recognise
from kernels.cpu.calls import DTYPES, NUMBER, POINTER, SIZE
from kernels.cpu.layer import Call, NativeLayer
from kernels.reference import ExpertWeights

_SIGNATURES = {
    "moe_first": (None, (POINTER, POINTER, POINTER, NUMBER, SIZE, POINTER, NUMBER)),
    "moe_second": (None, (POINTER, POINTER, POINTER, NUMBER, POINTER, NUMBER)),
    "moe_forward": (
        NUMBER,
        (*(POINTER,) * 3, NUMBER, *(POINTER,) * 2, SIZE, SIZE, *(POINTER,) * 2, NUMBER),
    ),
}


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("experts", "hidden", "width", "gate_up_rows")),
        ("weight_dtype", ctypes.c_int32),
    )


@dataclass(frozen=True)
class _Plan:
    key: tuple[object, ...]  # the storage that the plan points to
    record: _Layer
    biases: tuple[Tensor | None, Tensor | None]  # kept alive: float32 copies
    activation: Activation | None  # of gate and up in halves, where C++ knows it


class NativeExperts(NativeLayer[ExpertWeights]):
    """Whole experts on the CPU.

    bf16 activations with bf16 weights use the CPU's bf16 dot products where it has them (the inner
    activations are rounded to bf16 then, as in transformers); all else is float32.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, _SIGNATURES)
        self._plans: WeakKeyDictionary[ExpertWeights, _Plan] = WeakKeyDictionary()

    @staticmethod
    def supports(hidden_TH: Tensor, experts: ExpertWeights) -> bool:
        """Whether dtypes, devices and layout are ones that the library knows."""
        gate_up, down = experts.gate_up_EGH, experts.down_EHF
        return (
            hidden_TH.device.type == gate_up.device.type == down.device.type == "cpu"
            and hidden_TH.dtype in DTYPES
            and gate_up.dtype in DTYPES
            and gate_up.is_contiguous()
            and down.is_contiguous()
        )

    @property
    def _forward(self) -> Callable[..., int]:
        return self._library.moe_forward

    def _first(self, layer: int, routing: int, rows: int, call: Call[ExpertWeights]) -> Tensor:
        out_AG = empty_rows(rows, call.experts.gate_up_EGH.shape[1])
        hidden, dtype = call.hidden_TH.data_ptr(), DTYPES[call.hidden_TH.dtype]
        slots, out, threads = call.ids_TK.shape[1], out_AG.data_ptr(), torch.get_num_threads()
        self._library.moe_first(layer, routing, hidden, dtype, slots, out, threads)
        return out_AG

    def _second(
        self, layer: int, routing: int, inner_AF: Tensor, out_AH: Tensor, dtype: int
    ) -> None:
        inner, out, threads = inner_AF.data_ptr(), out_AH.data_ptr(), torch.get_num_threads()
        self._library.moe_second(layer, routing, inner, dtype, out, threads)

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
    rows, width = experts.gate_up_EGH.shape[1], experts.intermediate_size
    layer = _Layer(
        experts.gate_up_EGH.data_ptr(),
        experts.down_EHF.data_ptr(),
        None if gate_up_bias is None else gate_up_bias.data_ptr(),
        None if down_bias is None else down_bias.data_ptr(),
        experts.num_experts,
        experts.hidden_size,
        width,
        rows,
        DTYPES[experts.gate_up_EGH.dtype],
    )
    known = recognise(experts.activation, width, parts=2) if rows == 2 * width else None
    return _Plan(key, layer, (gate_up_bias, down_bias), known)
