"""One MoE layer by a compiled library, whatever its weights are: argument checks and the calls.

Where C++ knows the layer's activation, and no norm follows, the whole layer is one C++ call;
otherwise the callables run in torch between three.

Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.activation import Activation, by_blocks, empty_rows, recognise
from kernels.cpu.interface import (
    DTYPES,
    NUMBER,
    POINTER,
    SIZE,
    LayerPlan,
    MatrixPlan,
    RoutingRecord,
    Signatures,
    check_done,
    declare,
    plan_layer,
    plan_matrix,
)
from kernels.cpu.records import Record
from kernels.planes import PlaneMatrix, QuantizedExperts
from kernels.quantized import check_rows
from kernels.reference import ExpertWeights, check_shapes, id_error

Weights = TypeVar("Weights", ExpertWeights, QuantizedExperts)


class Plan(Protocol):
    """What C++ is told of a layer; no activation: one that it does not know."""

    @property
    def record(self) -> ctypes.Structure: ...

    @property
    def activation(self) -> Activation | None: ...


@dataclass(frozen=True)
class LayerArguments(Generic[Weights]):
    """Tensors as C++ reads them: contiguous, float32 or bf16 rows, int64 ids, float32 weights.

    Attributes:
        output_TH: to be filled, unless there is a sum so far.
        so_far: address of that sum, which is then gone on with.
    """

    hidden_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    experts: Weights
    output_TH: Tensor
    so_far: int | None


class LayerCall(NamedTuple):
    """Addresses of the C++ function that runs a whole layer, and of its first two arguments, which
    point into what is kept."""

    forward: int
    layer: int
    activation: int
    kept: object


class NativeLayer(ABC, Generic[Weights]):
    """`experts_forward` on the CPU by a compiled library (see kernels/cpu/build.py)."""

    def __init__(self, library: ctypes.CDLL, signatures: Signatures) -> None:
        declare(library, signatures)
        self._library = library

    def experts(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: Weights,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        """As kernels.reference.experts_forward, without gradients; a row's bits depend on its own
        inputs only, not on the other rows of the call nor on the number of threads.

        float16 activations go as float32.
        """
        check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
        if expert_ids_TK.numel() == 0:
            return torch.zeros_like(hidden_TH) if add_to_TH is None else add_to_TH
        plan, dtype = self._plan(experts), hidden_TH.dtype
        hidden_TH = (hidden_TH.float() if dtype == torch.float16 else hidden_TH).contiguous()
        ids_TK = expert_ids_TK.to(torch.int64).contiguous()
        weights_TK = weights_TK.to(torch.float32).contiguous()
        output_TH = torch.empty_like(hidden_TH) if add_to_TH is None else add_to_TH
        so_far = None if add_to_TH is None else add_to_TH.data_ptr()
        whole = plan.activation is not None and experts.post_norm is None
        run = self._at_once if whole else self._in_steps
        run(plan, LayerArguments(hidden_TH, ids_TK, weights_TK, experts, output_TH, so_far))
        return output_TH if add_to_TH is not None else output_TH.to(dtype)

    def layer_call(self, experts: Weights) -> LayerCall | None:
        """What C++ callers run a layer with; None where Python has to act on the way."""
        plan = self._plan(experts)
        if plan.activation is None or experts.post_norm is not None:
            return None
        forward = ctypes.cast(self._forward, ctypes.c_void_p).value  # type: ignore[arg-type]
        assert forward is not None
        records = ctypes.addressof(plan.record), ctypes.addressof(plan.activation)
        return LayerCall(forward, *records, (plan, experts))

    def _at_once(self, plan: Plan, call: LayerArguments[Weights]) -> None:
        assert plan.activation is not None
        done = self._forward(
            ctypes.addressof(plan.record),
            ctypes.addressof(plan.activation),
            call.hidden_TH.data_ptr(),
            DTYPES[call.hidden_TH.dtype],
            call.ids_TK.data_ptr(),
            call.weights_TK.data_ptr(),
            *call.ids_TK.shape,
            call.output_TH.data_ptr(),
            call.so_far,
            torch.get_num_threads(),
        )
        check_done(done, call.experts)

    def _in_steps(self, plan: Plan, call: LayerArguments[Weights]) -> None:
        library, ids_TK, experts = self._library, call.ids_TK, call.experts
        size, count, hidden = ids_TK.numel(), experts.num_experts, experts.hidden_size
        numbers = torch.empty(
            library.moe_routing_numbers(size, count), dtype=torch.int32, device="cpu"
        )
        record = RoutingRecord()
        routing, layer = ctypes.addressof(record), ctypes.addressof(plan.record)
        rows = library.moe_route(ids_TK.data_ptr(), size, count, numbers.data_ptr(), routing)
        if rows < 0:
            raise id_error(experts)
        first_AG = self._first(layer, routing, rows, call)
        inner_AF = by_blocks(experts.activation, first_AG, experts.intermediate_size)
        row_AH = empty_rows(rows, hidden)
        dtype = DTYPES[call.hidden_TH.dtype]
        self._second(layer, routing, inner_AF, row_AH, dtype)
        if experts.post_norm is not None:
            row_AH = by_blocks(experts.post_norm, row_AH, hidden)
        library.moe_combine(
            routing,
            row_AH.data_ptr(),
            call.weights_TK.data_ptr(),
            *ids_TK.shape,
            hidden,
            call.output_TH.data_ptr(),
            dtype,
            call.so_far,
            torch.get_num_threads(),
        )

    @property
    @abstractmethod
    def _forward(self) -> Callable[..., int]:
        """The C++ function that runs a whole layer."""

    @abstractmethod
    def _plan(self, experts: Weights) -> Plan:
        """Made on a layer's first call."""

    @abstractmethod
    def _first(self, layer: int, routing: int, rows: int, call: LayerArguments[Weights]) -> Tensor:
        """(A, G) float32, the first projection; addresses of the layer and of the routing."""

    @abstractmethod
    def _second(
        self, layer: int, routing: int, inner_AF: Tensor, out_AH: Tensor, dtype: int
    ) -> None:
        """Fill the rows with the second projection; ``dtype`` is that of the hidden rows."""


# ---- The compiled experts on whole weights: plans, and the calls.
#
# A plan is what a layer's weights need once: their description for C++, biases in float32, and
# which activation they have.
#
# Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.

_WHOLE_SIGNATURES = {
    "moe_first": (None, (POINTER, POINTER, POINTER, NUMBER, SIZE, POINTER, NUMBER)),
    "moe_second": (None, (POINTER, POINTER, POINTER, NUMBER, POINTER, NUMBER)),
    "moe_forward": (
        NUMBER,
        (*(POINTER,) * 3, NUMBER, *(POINTER,) * 2, SIZE, SIZE, *(POINTER,) * 2, NUMBER),
    ),
}


class _WholeLayerRecord(Record, struct="WholeLayer"):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("experts", "hidden", "width", "gate_up_rows")),
        ("weight_dtype", ctypes.c_int32),
    )


@dataclass(frozen=True)
class _Plan:
    key: tuple[object, ...]  # the storage that the plan points to
    record: _WholeLayerRecord
    biases: tuple[Tensor | None, Tensor | None]  # kept alive: float32 copies
    activation: Activation | None  # of gate and up in halves, where C++ knows it


class NativeExperts(NativeLayer[ExpertWeights]):
    """Whole experts on the CPU.

    bf16 activations with bf16 weights use the CPU's bf16 dot products where it has them (the inner
    activations are rounded to bf16 then, as in transformers); all else is float32.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, _WHOLE_SIGNATURES)
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

    def _first(
        self, layer: int, routing: int, rows: int, call: LayerArguments[ExpertWeights]
    ) -> Tensor:
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
    layer = _WholeLayerRecord(
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


# ---- The compiled kernels on bit planes behind torch tensors: experts, and linear layers.
#
# Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.

_PLANE_SIGNATURES = {
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
        super().__init__(library, _PLANE_SIGNATURES)
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

    def _first(
        self, layer: int, routing: int, rows: int, call: LayerArguments[QuantizedExperts]
    ) -> Tensor:
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
