"""One MoE layer's experts by the compiled library: whole weights, or nested bit planes.

A layer is one C++ call where C++ knows its activation, and the norm of its experts' rows if there
is one; otherwise both run in torch between three C++ calls. What C++ needs to know of a
layer's weights is a `LayerPlan`, made on the layer's first call: a record of addresses and sizes,
and float32 copies of the biases. The tensors must stay where they are; what they hold may change
(slots of an expert cache, see offload/).

Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.activation import Activation, by_blocks, empty_rows, recognise
from kernels.cpu.interface import (
    DTYPES,
    NUMBER,
    POINTER,
    SIZE,
    Record,
    Signatures,
    check_done,
    declare,
    numbers,
    pointers,
    sizes,
)
from kernels.cpu.post_norm import PostNorm, PostNormRecord, recognise_norm
from kernels.planes import PLANE_BITS, PlaneFormat, PlaneMatrix, QuantizedExperts
from kernels.reference import ExpertWeights, check_rows, check_shapes, id_error
from kernels.scales import SCALES

Weights = TypeVar("Weights", ExpertWeights, QuantizedExperts)

_CALL_BYTES = 96 << 20
"""C++ keeps up to 128 MiB for the next call (calls.h). New pages for each layer take a tenth of
a long prompt's time."""
_LEAST_TOKENS = 256

_FORWARD = (
    NUMBER,
    (*(POINTER,) * 3, NUMBER, *(POINTER,) * 2, SIZE, SIZE, *(POINTER,) * 2, NUMBER),
)
_LAYER_SIGNATURES: Signatures = {
    "moe_routing_numbers": (SIZE, (SIZE, SIZE)),
    "moe_route": (SIZE, (POINTER, SIZE, SIZE, POINTER, POINTER)),
    "moe_combine": (None, (*(POINTER,) * 3, *(SIZE,) * 3, POINTER, NUMBER, POINTER, NUMBER)),
}
_WHOLE_SIGNATURES: Signatures = {
    "moe_first": (None, (POINTER, POINTER, POINTER, NUMBER, SIZE, POINTER, NUMBER)),
    "moe_second": (None, (POINTER, POINTER, POINTER, NUMBER, POINTER, NUMBER)),
    "moe_forward": _FORWARD,
    "moe_weighted_sum": (
        None,
        (POINTER, SIZE, *(POINTER,) * 3, *(SIZE,) * 3, POINTER, NUMBER, NUMBER),
    ),
}
_PLANE_SIGNATURES: Signatures = {
    "moe_plane_linear": (NUMBER, (*(POINTER,) * 3, NUMBER, SIZE, POINTER, NUMBER)),
    "moe_file_rows": (None, (POINTER, POINTER, SIZE, POINTER)),
    "moe_quantized_first": (NUMBER, (*(POINTER,) * 3, NUMBER, SIZE, SIZE, POINTER, NUMBER)),
    "moe_quantized_second": (NUMBER, (*(POINTER,) * 4, NUMBER)),
    "moe_quantized_forward": _FORWARD,
}


class RoutingRecord(Record, struct="Routing"):
    _fields_ = (
        *pointers("slot", "position", "begin", "active"),
        *sizes("rows", "num_active"),
    )


class WholeLayerRecord(Record, struct="WholeLayer"):
    _fields_ = (
        *pointers("gate_up", "down", "gate_up_bias", "down_bias"),
        *sizes("experts", "hidden", "width", "gate_up_rows"),
        *numbers("weight_dtype", "gating"),
        ("post", PostNormRecord),
    )


class PlaneFormatRecord(Record, struct="PlaneFormat"):
    _fields_ = numbers("group_size", "bits", "scales")

    @classmethod
    def of(cls, own: PlaneFormat) -> PlaneFormatRecord:
        return cls(own.group_size, own.bits, SCALES.index(own.scales))


class PlaneMatrixRecord(Record, struct="PlaneMatrix"):
    _fields_ = (
        ("plane", POINTER * len(PLANE_BITS)),
        *pointers("scales"),
        *sizes("rows", "columns"),
        ("format", PlaneFormatRecord),
        *numbers("planes"),
    )


class QuantizedLayerRecord(Record, struct="QuantizedLayer"):
    _fields_ = (
        *pointers("blobs", "planes", "first_bias", "second_bias"),
        *sizes("experts", "hidden", "width"),
        *((name, PlaneFormatRecord) for name in ("first", "second")),
        *numbers("parts", "interleaved", "digits"),
        ("post", PostNormRecord),
    )


@dataclass(frozen=True)
class MatrixPlan:
    """A matrix of bit planes for C++. `bias` is its address, `kept` what must stay alive."""

    record: PlaneMatrixRecord
    bias: int | None
    kept: Tensor | None


@dataclass(frozen=True)
class LayerPlan:
    """A layer for C++; `kept` must stay alive. No activation: C++ does not know it, or the norm of
    its experts' rows."""

    record: Record
    activation: Activation | None
    kept: tuple[object, ...]


class LayerCall(NamedTuple):
    """A call by which compiled callers run a layer: the address of the C++ function, and those of
    its first two arguments, which point into what is kept."""

    forward: int
    layer: int
    activation: int
    kept: object


@dataclass(frozen=True)
class LayerArguments(Generic[Weights]):
    """Tensors as C++ reads them: contiguous, float32 or bf16 rows, int64 ids, float32 weights.

    Attributes:
        output_TH: filled by the call, unless ``so_far`` is given.
        so_far: address of a float32 sum that the call adds to instead.
    """

    hidden_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    experts: Weights
    output_TH: Tensor
    so_far: int | None


def tokens_a_call(slots: int, hidden_size: int, intermediate_size: int) -> int:
    """Most tokens of a call of C++, whose scratch memory is to take `_CALL_BYTES`."""
    row_bytes = 5 * hidden_size + 4 * intermediate_size  # of a slot: its input, inner row, output
    return max(_LEAST_TOKENS, _CALL_BYTES // (slots * row_bytes))


class NativeLayer(ABC, Generic[Weights]):
    """`experts_forward` on the CPU by a compiled library (see kernels/cpu/build.py)."""

    def __init__(self, library: ctypes.CDLL, signatures: Signatures) -> None:
        declare(library, {**_LAYER_SIGNATURES, **signatures})
        self._library = library

    def experts(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        experts: Weights,
        add_to_TH: Tensor | None = None,
    ) -> Tensor:
        """As kernels.reference.experts_forward, without gradients.

        A row's bits depend on its own inputs only, not on the other rows of the call or the number
        of threads. float16 activations are computed as float32.
        """
        check_shapes(hidden_TH, expert_ids_TK, weights_TK, experts, add_to_TH)
        if expert_ids_TK.numel() == 0:
            return torch.zeros_like(hidden_TH) if add_to_TH is None else add_to_TH
        plan, dtype = self._plan(experts), hidden_TH.dtype
        hidden_TH = (hidden_TH.float() if dtype == torch.float16 else hidden_TH).contiguous()
        ids_TK = expert_ids_TK.to(torch.int64).contiguous()
        weights_TK = weights_TK.to(torch.float32).contiguous()
        output_TH = torch.empty_like(hidden_TH) if add_to_TH is None else add_to_TH
        run = self._run_in_steps if plan.activation is None else self._run_whole
        (tokens, slots), sizes = ids_TK.shape, (experts.hidden_size, experts.intermediate_size)
        step = -(-tokens // -(-tokens // tokens_a_call(slots, *sizes)))  # calls of about one size
        for first in range(0, tokens, step):
            own = slice(first, first + step)
            so_far = None if add_to_TH is None else output_TH[own].data_ptr()
            given = hidden_TH[own], ids_TK[own], weights_TK[own]
            run(plan, LayerArguments(*given, experts, output_TH[own], so_far))
        return output_TH if add_to_TH is not None else output_TH.to(dtype)

    def layer_call(self, experts: Weights) -> LayerCall | None:
        """Return the call by which compiled callers run the layer; None if part of it runs in
        Python."""
        plan = self._plan(experts)
        if plan.activation is None:
            return None
        forward = ctypes.cast(self._forward, ctypes.c_void_p).value  # type: ignore[arg-type]
        assert forward is not None
        records = ctypes.addressof(plan.record), ctypes.addressof(plan.activation)
        return LayerCall(forward, *records, (plan, experts))

    def _run_whole(self, plan: LayerPlan, call: LayerArguments[Weights]) -> None:
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

    def _run_in_steps(self, plan: LayerPlan, call: LayerArguments[Weights]) -> None:
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
    def _plan(self, experts: Weights) -> LayerPlan:
        """The layer's plan, made on its first call."""

    @abstractmethod
    def _first(self, layer: int, routing: int, rows: int, call: LayerArguments[Weights]) -> Tensor:
        """(A, G) float32, the first projection; ``layer`` and ``routing`` are addresses."""

    @abstractmethod
    def _second(
        self, layer: int, routing: int, inner_AF: Tensor, out_AH: Tensor, dtype: int
    ) -> None:
        """Fill ``out_AH`` with the second projection; ``dtype`` is that of the hidden rows."""


class NativeExperts(NativeLayer[ExpertWeights]):
    """Whole experts on the CPU.

    bf16 activations with bf16 weights use the CPU's bf16 dot products where it has them (the inner
    activations are rounded to bf16 then, as in transformers); all else is float32.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, _WHOLE_SIGNATURES)
        self._plans: WeakKeyDictionary[ExpertWeights, tuple[object, LayerPlan]] = (
            WeakKeyDictionary()
        )

    @staticmethod
    def supports(hidden_TH: Tensor, experts: ExpertWeights) -> bool:
        """Return whether dtypes, devices and layout are ones that the library knows."""
        gate_up, down = experts.gate_up_EGH, experts.down_EHF
        return (
            hidden_TH.device.type == gate_up.device.type == down.device.type == "cpu"
            and hidden_TH.dtype in DTYPES
            and gate_up.dtype in DTYPES
            and gate_up.is_contiguous()
            and down.is_contiguous()
        )

    def weighted_sum(
        self,
        row_AH: Tensor,
        position_TK: Tensor,
        weights_TK: Tensor,
        dtype: torch.dtype,
        more_BH: Tensor,
    ) -> Tensor:
        """As kernels.backends.weighted_sum, of contiguous tensors: float32, and int32 positions."""
        (rows, hidden), (tokens, slots) = row_AH.shape, position_TK.shape
        output_TH = torch.empty(tokens, hidden, dtype=dtype)
        self._library.moe_weighted_sum(
            row_AH.data_ptr(),
            rows,
            more_BH.data_ptr(),
            position_TK.data_ptr(),
            weights_TK.data_ptr(),
            tokens,
            slots,
            hidden,
            output_TH.data_ptr(),
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        return output_TH

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

    def _plan(self, experts: ExpertWeights) -> LayerPlan:
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
        known = self._plans.get(experts)
        if known is None or known[0] != key:
            known = self._plans[experts] = key, _plan_whole(experts)
        return known[1]


class NativePlanes(NativeLayer[QuantizedExperts]):
    """Quantised experts and linear layers on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, _PLANE_SIGNATURES)
        self._matrices: WeakKeyDictionary[PlaneMatrix, MatrixPlan] = WeakKeyDictionary()
        self._layers: WeakKeyDictionary[QuantizedExperts, LayerPlan] = WeakKeyDictionary()

    @staticmethod
    def supports(x: Tensor, scales: Tensor) -> bool:
        """Return whether the library knows the activations' dtype, and everything is on the CPU."""
        return x.device.type == scales.device.type == "cpu" and x.dtype in DTYPES

    def linear(self, x_TK: Tensor, matrix: PlaneMatrix) -> Tensor:
        """As kernels.reference.linear_forward; a row's bits depend on its own inputs only."""
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

    def rows(self, ids_T: Tensor, matrix: PlaneMatrix) -> Tensor:
        """``(T, K)`` float32 rows of a matrix with a file's own codes; ids are in range."""
        ids_T, plan = ids_T.to(torch.int64).contiguous(), self._matrix_plan(matrix)
        output_TK = torch.empty(len(ids_T), matrix.layout.columns)
        record, out = ctypes.addressof(plan.record), output_TK.data_ptr()
        self._library.moe_file_rows(record, ids_T.data_ptr(), len(ids_T), out)
        return output_TK

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
            plan = self._layers[experts] = _plan_quantized(experts)
        return plan


def plan_matrix(matrix: PlaneMatrix) -> MatrixPlan:
    """Addresses and sizes of a matrix of bit planes."""
    layout, addresses = matrix.layout, _addresses(matrix.planes, matrix.scales)
    record = PlaneMatrixRecord(
        (POINTER * len(PLANE_BITS))(*addresses[:-1]),
        addresses[-1],
        layout.rows,
        layout.columns,
        PlaneFormatRecord.of(layout.format),
        len(matrix.planes),
    )
    bias = _float_copy(matrix.bias)
    return MatrixPlan(record, _address(bias), bias)


def _plan_whole(experts: ExpertWeights) -> LayerPlan:
    biases = _float_copy(experts.gate_up_bias_EG), _float_copy(experts.down_bias_EH)
    rows, width = experts.gate_up_EGH.shape[1], experts.intermediate_size
    gating, known = _recognise_gating(experts.activation, width, rows)
    post, known = _with_norm(experts, known)
    record = WholeLayerRecord(
        experts.gate_up_EGH.data_ptr(),
        experts.down_EHF.data_ptr(),
        *map(_address, biases),
        experts.num_experts,
        experts.hidden_size,
        width,
        rows,
        DTYPES[experts.gate_up_EGH.dtype],
        gating,
    )
    if post is not None:
        record.post = post.record
    return LayerPlan(record, known, (*biases, post))


def _with_norm(
    experts: ExpertWeights | QuantizedExperts, known: Activation | None
) -> tuple[PostNorm | None, Activation | None]:
    """The norm of the experts' rows, and the activation; without it if there is a norm that C++
    does not know."""
    if experts.post_norm is None or known is None:
        return None, known
    post = recognise_norm(experts.post_norm, experts.hidden_size)
    return post, None if post is None else known


class Gating(IntEnum):
    """The way in which rows of a first projection make an inner row: the gate alone; all of the
    gate's, then all of up's; or both in turn."""

    UNGATED = 0
    HALVES = 1
    ALTERNATING = 2


def _recognise_gating(
    activation: Callable[[Tensor], Tensor], width: int, rows: int
) -> tuple[Gating, Activation | None]:
    if rows != 2 * width:
        known = recognise(activation, width, parts=1) if rows == width else None
        return Gating.UNGATED, known
    ways = Gating.HALVES, Gating.ALTERNATING
    found = {way: recognise(activation, width, 2, way is Gating.ALTERNATING) for way in ways}
    return next(((way, known) for way, known in found.items() if known), (Gating.HALVES, None))


def _plan_quantized(experts: QuantizedExperts) -> LayerPlan:
    rows = [_addresses(*blobs) for blobs in zip(experts.planes, experts.scales, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    counts = torch.tensor([len(p) for p in experts.planes], dtype=torch.int32, device="cpu")
    biases = _float_copy(experts.gate_up_bias_EG), _float_copy(experts.down_bias_EH)
    kept = table, counts, *biases
    record = QuantizedLayerRecord(
        *map(_address, kept),
        experts.num_experts,
        experts.hidden_size,
        experts.intermediate_size,
        PlaneFormatRecord.of(experts.first.format),
        PlaneFormatRecord.of(experts.second.format),
        experts.parts,
        experts.interleaved,
        experts.row_bits // 8,
    )
    width, parts = experts.intermediate_size, experts.parts
    known = recognise(experts.activation, width, parts, experts.interleaved)
    post, known = _with_norm(experts, known)
    if post is not None:
        record.post = post.record
    return LayerPlan(record, known, (*kept, post))


def _float_copy(bias: Tensor | None) -> Tensor | None:
    """In float32 and contiguous; the tensor itself where it is so already."""
    return None if bias is None else bias.detach().float().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(planes: tuple[Tensor, ...], scales: Tensor) -> list[int]:
    """Return the addresses of planes 0 to 3 (0 where absent) and of the scales."""
    absent = [0] * (len(PLANE_BITS) - len(planes))
    return [*(plane.data_ptr() for plane in planes), *absent, scales.data_ptr()]
