"""The compiled kernels on bit planes behind torch tensors: argument checks and the calls.

Where C++ knows a layer's activation the whole layer is one C++ call; otherwise the callable runs in
torch between two calls.

Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.
"""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.activation import empty_rows
from kernels.cpu.calls import (
    DTYPES,
    NUMBER,
    POINTER,
    SIZE,
    check_done,
    declare,
    in_steps,
    run_layer,
)
from kernels.cpu.plans import LayerPlan, MatrixPlan, plan_layer, plan_matrix
from kernels.plane_weights import PlaneMatrix, QuantizedExperts
from kernels.quantized import check_rows
from kernels.reference import check_shapes

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


class NativePlanes:
    """Quantised experts and linear layers on the CPU by a compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, _SIGNATURES)
        self._library = library
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
        tokens, plan = x_TK.shape[0], self.matrix_plan(matrix)
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

    def experts(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: QuantizedExperts,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        """As kernels.reference.experts_forward, without gradients; a row's bits depend on its own
        inputs only, not on the other rows of the call nor on the number of threads.
        """
        check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
        if expert_ids_TK.numel() == 0:
            return torch.zeros_like(hidden_TH) if add_to_TH is None else add_to_TH
        plan = self.layer_plan(experts)

        def steps(hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            return self._in_steps(hidden_TH, ids_TK, weights_TK, experts, plan, add_to_TH)

        return run_layer(
            self._library.moe_quantized_forward,
            plan.record,
            plan.activation,
            steps,
            hidden_TH,
            expert_ids_TK,
            weights_TK,
            experts,
            add_to_TH,
        )

    def _in_steps(
        self,
        hidden_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        experts: QuantizedExperts,
        plan: LayerPlan,
        add_to_TH: Tensor | None,
    ) -> Tensor:
        library, layer = self._library, ctypes.addressof(plan.record)
        threads, parts, width = torch.get_num_threads(), experts.parts, experts.intermediate_size

        def first(routing: int, rows: int) -> Tensor:
            out_AG = empty_rows(rows, parts * width)
            hidden, dtype, out = hidden_TH.data_ptr(), DTYPES[hidden_TH.dtype], out_AG.data_ptr()
            check_done(
                library.moe_quantized_first(
                    layer, routing, hidden, dtype, *ids_TK.shape, out, threads
                )
            )
            if experts.interleaved:
                return out_AG.unflatten(1, (2, width)).transpose(1, 2).flatten(1)
            return out_AG

        def second(routing: int, inner_AF: Tensor, out_AH: Tensor) -> None:
            inner, out = inner_AF.data_ptr(), out_AH.data_ptr()
            check_done(library.moe_quantized_second(layer, routing, inner, out, threads))

        return in_steps(library, hidden_TH, ids_TK, weights_TK, experts, add_to_TH, first, second)

    def matrix_plan(self, matrix: PlaneMatrix) -> MatrixPlan:
        """The matrix's plan, made on the first call."""
        plan = self._matrices.get(matrix)
        if plan is None:
            plan = self._matrices[matrix] = plan_matrix(matrix)
        return plan

    def layer_plan(self, experts: QuantizedExperts) -> LayerPlan:
        """The layer's plan, made on the first call."""
        plan = self._layers.get(experts)
        if plan is None:
            plan = self._layers[experts] = plan_layer(experts)
        return plan
