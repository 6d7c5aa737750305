"""The compiled kernels on bit planes behind torch tensors: experts, and linear layers.

Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.activation import empty_rows
from kernels.cpu.calls import DTYPES, NUMBER, POINTER, SIZE, check_done
from kernels.cpu.layer import Call, NativeLayer
from kernels.cpu.plans import LayerPlan, MatrixPlan, plan_layer, plan_matrix
from kernels.plane_weights import PlaneMatrix, QuantizedExperts
from kernels.quantized import check_rows

_SIGNATURES = {
    "moe_plane_linear": (NUMBER, (*(POINTER,) * 3, NUMBER, SIZE, POINTER, NUMBER)),
    "moe_quantized_first": (
        NUMBER,
        (*(POINTER,) * 3, NUMBER, SIZE, SIZE, POINTER, NUMBER),
    ),
    "moe_quantized_second": (NUMBER, (*(POINTER,) * 4, NUMBER)),
    "moe_quantized_forward": (
        NUMBER,
        (*(POINTER,) * 3, NUMBER, *(POINTER,) * 2, SIZE, SIZE, *(POINTER,) * 2, NUMBER),
    ),
}


class NativePlanes(NativeLayer[QuantizedExperts]):
    """Quantised experts and linear layers on the CPU by a compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, _SIGNATURES)
        self._matrices: WeakKeyDictionary[PlaneMatrix, MatrixPlan] = WeakKeyDictionary()
        self._layers: WeakKeyDictionary[QuantizedExperts, LayerPlan] = WeakKeyDictionary()

    @staticmethod
    def supports(x: Tensor, scales: Tensor) -> bool:
        """Whether the library knows the activations' dtype, and everything is on the CPU."""
        return x.device.type == scales.device.type == "cpu" and x.dtype in DTYPES

    def linear(self, x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
        """As kernels.quantized.linear_forward; a row's bits depend on its own inputs only."""
        check_rows(x_TK, matrix)
        if x_TK.dtype == torch.float16:
            return self.linear(x_TK.float(), matrix).to(torch.float16)
        x_TK = x_TK.contiguous()
        tokens, plan = x_TK.shape[0], self._matrix_plan(matrix)
        output_TN = x_TK.new_empty(tokens, matrix.layout.rows)
        if tokens:
            done = self._library.moe_plane_linear(
                ctypes.addressof(plan.record),
                plan.bias,
                x_TK.data_ptr(),
                DTYPES[x_TK.dtype],
                tokens,
                output_TN.data_ptr(),
                torch.get_num_threads(),
            )
            check_done(done)
        return output_TN

    @property
    def _forward(self) -> Callable[..., int]:
        return self._library.moe_quantized_forward

    def _first(self, layer: int, routing: int, rows: int, call: Call[QuantizedExperts]) -> Tensor:
        width = call.experts.intermediate_size
        out_AG = empty_rows(rows, call.experts.parts * width)
        done = self._library.moe_quantized_first(
            layer,
            routing,
            call.hidden_TH.data_ptr(),
            DTYPES[call.hidden_TH.dtype],
            *call.ids_TK.shape,
            out_AG.data_ptr(),
            torch.get_num_threads(),
        )
        check_done(done)
        if call.experts.interleaved:
            return out_AG.unflatten(1, (2, width)).transpose(1, 2).flatten(1)
        return out_AG

    def _second(
        self, layer: int, routing: int, inner_AF: Tensor, out_AH: Tensor, dtype: int
    ) -> None:
        inner, out, threads = inner_AF.data_ptr(), out_AH.data_ptr(), torch.get_num_threads()
        check_done(self._library.moe_quantized_second(layer, routing, inner, out, threads))

    def _matrix_plan(self, matrix: PlaneMatrix) -> MatrixPlan:
        plan = self._matrices.get(matrix)
        if plan is None:
            plan = self._matrices[matrix] = plan_matrix(matrix)
        return plan

    def _plan(self, experts: QuantizedExperts) -> LayerPlan:
        plan = self._layers.get(experts)
        if plan is None:
            plan = self._layers[experts] = plan_layer(experts)
        return plan
