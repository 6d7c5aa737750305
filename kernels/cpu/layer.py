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

import torch
from torch import Tensor

from kernels.cpu.activation import Activation, by_blocks, empty_rows
from kernels.cpu.calls import DTYPES, RoutingRecord, Signatures, check_done, declare
from kernels.plane_weights import QuantizedExperts
from kernels.reference import ExpertWeights, check_shapes, id_error

Weights = TypeVar("Weights", ExpertWeights, QuantizedExperts)


class Plan(Protocol):
    """What C++ is told of a layer; no activation: one that it does not know."""

    @property
    def record(self) -> ctypes.Structure: ...

    @property
    def activation(self) -> Activation | None: ...


@dataclass(frozen=True)
class Call(Generic[Weights]):
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
        run(plan, Call(hidden_TH, ids_TK, weights_TK, experts, output_TH, so_far))
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

    def _at_once(self, plan: Plan, call: Call[Weights]) -> None:
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

    def _in_steps(self, plan: Plan, call: Call[Weights]) -> None:
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
    def _first(self, layer: int, routing: int, rows: int, call: Call[Weights]) -> Tensor:
        """(A, G) float32, the first projection; addresses of the layer and of the routing."""

    @abstractmethod
    def _second(
        self, layer: int, routing: int, inner_AF: Tensor, out_AH: Tensor, dtype: int
    ) -> None:
        """Fill the rows with the second projection; ``dtype`` is that of the hidden rows."""
