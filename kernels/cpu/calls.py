"""What the compiled kernels' Python sides share: records and calls of the C interface.

Shape legend as in kernels/reference.py; A is the number of slots in use, rows sorted by expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels.cpu.activation import by_blocks, empty_rows
from kernels.reference import AnyExperts, id_error

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POINTER, SIZE, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_NO_MEMORY = "no memory for the scratch rows of this call; use fewer tokens at once"
_SIGNATURES = {
    "moe_routing_numbers": (SIZE, (SIZE, SIZE)),
    "moe_route": (SIZE, (POINTER, SIZE, SIZE, POINTER, POINTER)),
    "moe_combine": (None, (*(POINTER,) * 3, *(SIZE,) * 3, POINTER, NUMBER, POINTER, NUMBER)),
}


class _Routing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slot", "position", "begin", "active")),
        *((name, ctypes.c_int64) for name in ("rows", "num_active")),
    )


def declare(
    library: ctypes.CDLL, signatures: Mapping[str, tuple[object, tuple[object, ...]]]
) -> None:
    """Tell ctypes the result and argument types of functions."""
    for name, (result, arguments) in (*_SIGNATURES.items(), *signatures.items()):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def check_done(done: int, experts: AnyExperts | None = None) -> None:
    """Raise what a C function's result says: 0 for no memory, negative for a bad expert id."""
    if done < 0 and experts is not None:
        raise id_error(experts)
    if not done:
        raise MemoryError(_NO_MEMORY)


def run_layer(
    function: Callable[..., int],
    layer: ctypes.Structure,
    activation: ctypes.Structure | None,
    steps: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: AnyExperts,
    add_to_TH: Tensor | None,
) -> Tensor:
    """A layer on tensors as C++ reads them; float16 activations go as float32.

    Args:
        function: runs the whole layer, where C++ knows the activation and there is no post norm.
        layer: what it is told of the weights.
        activation: what it is told of the activation; None where C++ does not know it.
        steps: otherwise, from hidden, ids and weights to the (T, H) result.
    """
    dtype = hidden_TH.dtype
    hidden_TH = (hidden_TH.float() if dtype == torch.float16 else hidden_TH).contiguous()
    ids_TK = expert_ids_TK.to(torch.int64).contiguous()
    weights_TK = weights_TK.to(torch.float32).contiguous()
    if activation is None or experts.post_norm is not None:
        output_TH = steps(hidden_TH, ids_TK, weights_TK)
        return output_TH if add_to_TH is not None else output_TH.to(dtype)
    output_TH = torch.empty_like(hidden_TH) if add_to_TH is None else add_to_TH
    done = function(
        ctypes.addressof(layer),
        ctypes.addressof(activation),
        hidden_TH.data_ptr(),
        DTYPES[hidden_TH.dtype],
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        *ids_TK.shape,
        output_TH.data_ptr(),
        None if add_to_TH is None else add_to_TH.data_ptr(),
        torch.get_num_threads(),
    )
    check_done(done, experts)
    return output_TH if add_to_TH is not None else output_TH.to(dtype)


def weighted_sum(
    library: ctypes.CDLL,
    row_AH: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """As kernels.sums.weighted_sum; rows are float32 and contiguous, so are the weights."""
    tokens, slots = position_TK.shape
    hidden = row_AH.shape[1]
    positions = position_TK.to(torch.int32).contiguous()
    record = _Routing(position=positions.data_ptr(), rows=row_AH.shape[0])
    output_TH = torch.empty(tokens, hidden, dtype=dtype)
    library.moe_combine(
        ctypes.addressof(record),
        row_AH.data_ptr(),
        weights_TK.data_ptr(),
        tokens,
        slots,
        hidden,
        output_TH.data_ptr(),
        DTYPES[dtype],
        None,
        torch.get_num_threads(),
    )
    return output_TH


def in_steps(
    library: ctypes.CDLL,
    hidden_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: AnyExperts,
    add_to_TH: Tensor | None,
    first: Callable[[int, int], Tensor],
    second: Callable[[int, Tensor, Tensor], None],
) -> Tensor:
    """A layer with the architecture's own activation and norm between the C++ calls.

    Args:
        first: from the address of the routing and A to the (A, G) first projection.
        second: from the same address and the (A, F) inner activations, fills (A, H).
    """
    threads, size = torch.get_num_threads(), ids_TK.numel()
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
    inner_AF = by_blocks(experts.activation, first(routing, rows), experts.intermediate_size)
    row_AH = empty_rows(rows, experts.hidden_size)
    second(routing, inner_AF, row_AH)
    if experts.post_norm is not None:
        row_AH = by_blocks(experts.post_norm, row_AH, experts.hidden_size)
    output_TH = torch.empty_like(hidden_TH) if add_to_TH is None else add_to_TH
    library.moe_combine(
        routing,
        row_AH.data_ptr(),
        weights_TK.data_ptr(),
        *ids_TK.shape,
        experts.hidden_size,
        output_TH.data_ptr(),
        DTYPES[hidden_TH.dtype],
        None if add_to_TH is None else add_to_TH.data_ptr(),
        threads,
    )
    return output_TH
