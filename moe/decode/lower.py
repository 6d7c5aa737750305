"""Lowers a recorded token (`moe.decode.trace`) to the units of a program (`moe.decode.units`).

Each aten operation becomes a few instructions of the interpreter (kernels/cpu/program.h) on
strided operands: a view costs nothing, a reduction runs over a last dimension, a softmax is five
instructions. `NotDescribed` names an operation that has no lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kernels import PlaneMatrix
from kernels.cpu.program import Code, Space
from kernels.recurrence import Recurrence, convolution_call, gated_call, scan_call
from moe.decode.recorder import DecodeTrace, Operation, Value
from moe.decode.sinkhorn import with_balancing
from moe.decode.units import (
    AttentionOf,
    ExpertsOf,
    IndexerOf,
    Instruction,
    Operand,
    Product,
    Recurrent,
    Selection,
    Unit,
    broadcast,
    constant,
    is_whole,
    narrow,
    select,
    shape_of,
    stride_of,
    unsqueeze,
    viewed,
    without,
)
from moe.describe.description import NotDescribed, Projection

_UNARY = {
    "neg": Code.NEGATE, "exp": Code.EXP, "log": Code.LOG, "log1p": Code.LOG1P,
    "sigmoid": Code.SIGMOID, "silu": Code.SILU, "tanh": Code.TANH, "relu": Code.RELU,
    "rsqrt": Code.RSQRT, "sqrt": Code.SQRT, "reciprocal": Code.RECIPROCAL, "cos": Code.COS,
    "sin": Code.SIN, "abs": Code.ABS, "erf": Code.ERF, "floor": Code.FLOOR,
    "logical_not": Code.NOT,
}  # fmt: skip
_BINARY = {
    "mul": Code.MULTIPLY, "maximum": Code.MAXIMUM, "minimum": Code.MINIMUM, "eq": Code.EQUAL,
    "ne": Code.UNEQUAL, "lt": Code.LESS, "le": Code.LESS_EQUAL,
    "clamp_min": Code.MAXIMUM, "clamp_max": Code.MINIMUM, "logical_and": Code.AND,
    "logical_or": Code.OR, "remainder": Code.REMAINDER,
}  # fmt: skip
_TURNED = {"gt": Code.LESS, "ge": Code.LESS_EQUAL}  # with the arguments the other way round
_LOGICAL = {"bitwise_and": Code.AND, "__and__": Code.AND, "bitwise_or": Code.OR, "__or__": Code.OR}
_COPIES = {
    "copy", "clone", "contiguous", "to", "_to_copy", "type_as", "reshape", "flatten",
    "_unsafe_view", "cat", "stack",
}  # fmt: skip
_FOLDS = {
    "sum": Code.SUM, "mean": Code.SUM, "amax": Code.LARGEST, "amin": Code.SMALLEST,
    "any": Code.LARGEST, "all": Code.SMALLEST,
}  # fmt: skip
_FILLED = {"zeros_like": 0.0, "new_zeros": 0.0, "ones_like": 1.0, "new_ones": 1.0, "zero": 0.0}
_RECURRENT: dict[str, tuple[Callable[..., Recurrence], int]] = {
    "gated": (gated_call, 5), "scan": (scan_call, 5), "convolve": (convolution_call, 1),
}  # fmt: skip
_EMPTY = {"empty_like", "new_empty", "new_empty_strided"}


_PREFIX = "_lower_"  # of methods that lower the operation of that name
_CONV: tuple[Any, ...] = (None, [1], [0], [1], 1)  # what a convolution leaves out


class Lowering:
    """Lowers the operations of a trace, in order.

    Attributes:
        units: what was made of them.
        sizes: bytes of each buffer for one row.
        spaces: buffers that lie elsewhere than in a step's memory.
    """

    def __init__(self, trace: DecodeTrace) -> None:
        self.trace = trace
        self.units: list[Unit] = []
        self.sizes: dict[int, int] = {}
        self.spaces: dict[int, Space] = dict(trace.inputs)
        self._next = 1 << 20  # above the trace's own buffers
        self._codes: dict[tuple[int, int], Value] = {}
        self._states = {x.buffer for own in (trace.before, trace.after) for x in own.values()}
        self._handlers = self._table()
        self.arrays = {
            space: self._buffer(space)
            for space in (Space.HIDDEN, Space.IDS, Space.WEIGHTS, Space.ROUTED)
        }
        for operation in with_balancing(trace.operations):
            self._lower(operation)

    def _buffer(self, space: Space) -> int:
        self._next += 1
        self.spaces[self._next] = space
        return self._next

    def fresh(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Value:
        """A dense value in a buffer of its own."""
        self._next += 1
        return Value(self._next, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def emit(
        self, code: Code, out: Value, *inputs: Operand | float | bool, count: int = 0,
        number: float = 0.0, shape: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add an instruction of the shape of ``out``, or of ``shape``; inputs broadcast to it."""
        sizes = tuple(out.meta.shape if shape is None else shape)
        if not out.meta.numel():
            return
        tensors = [x.meta if isinstance(x, Value) else x for x in inputs]
        if not any(x.is_floating_point() for x in tensors if isinstance(x, Tensor)):
            inputs = tuple(torch.tensor(x) if type(x) is int else x for x in inputs)
        operands = tuple(broadcast(constant(x), sizes) for x in inputs)
        self._written(out)
        self.units.append(Instruction(code, sizes, broadcast(out, sizes), operands, count, number))

    def dense(self, x: Operand) -> Value:
        """The same numbers, dense in a buffer of their own, whose rows lie side by side."""
        if isinstance(x, Value) and is_whole(x) and x.buffer not in self._states:
            return x
        made = self.fresh(shape_of(x))
        self.emit(Code.COPY, made, x)
        return made

    def _written(self, out: Value) -> None:
        for key in [key for key in self._codes if key[0] == out.buffer]:
            del self._codes[key]

    def _lower(self, operation: Operation) -> None:
        name = operation.name
        if name in _EMPTY:
            return
        handler = self._handlers.get(name)
        if handler is None:
            raise NotDescribed(f"'{name}' is no operation that a compiled step knows")
        try:
            handler(operation)
        except (TypeError, RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise NotDescribed(f"'{name}' is used in a way that is not known: {error}") from error

    def _table(self) -> dict[str, Callable[[Operation], None]]:
        table: dict[str, Callable[[Operation], None]] = {
            name.removeprefix(_PREFIX): getattr(self, name)
            for name in dir(self)
            if name.startswith(_PREFIX)
        }
        table |= {name: partial(self._unary, code) for name, code in _UNARY.items()}
        table |= {name: partial(self._binary, code) for name, code in _BINARY.items()}
        table |= {name: partial(self._binary, code, turned=True) for name, code in _TURNED.items()}
        table |= {name: partial(self._logical, code) for name, code in _LOGICAL.items()}
        table |= {name: partial(self._fold_dims, code) for name, code in _FOLDS.items()}
        table |= {name: partial(self._fill, number) for name, number in _FILLED.items()}
        table |= {name: partial(self._recurrent, *how) for name, how in _RECURRENT.items()}
        table |= dict.fromkeys(_COPIES, self._copy)
        return table

    # Elementwise

    def _unary(self, code: Code, op: Operation) -> None:
        self.emit(code, op.outputs[0], op.args[0])

    def _binary(self, code: Code, op: Operation, turned: bool = False) -> None:
        a, b = op.args[:2]
        self.emit(code, op.outputs[0], *((b, a) if turned else (a, b)))

    def _logical(self, code: Code, op: Operation) -> None:
        assert op.outputs[0].meta.dtype == torch.bool
        self._binary(code, op)

    def _lower_bitwise_xor(self, op: Operation) -> None:
        self._binary(Code.UNEQUAL if op.outputs[0].meta.dtype == torch.bool else Code.XOR, op)

    def _lower_cummax(self, op: Operation) -> None:
        x, (out, places) = op.args[0], op.outputs
        dim = _dim(op, 1, out)
        later = [each for other in self.trace.operations for each in tree_leaves(other.args)]
        read = (isinstance(each, Value) and each.buffer == places.buffer for each in later)
        assert not any(read), "where the largest are"
        self.emit(Code.COPY, out, x)
        for at in range(1, shape_of(x)[dim]):
            before, own = (out.viewed(narrow(dim, at - 1 + n, 1)) for n in (0, 1))
            self.emit(Code.MAXIMUM, own, before, own)

    def _lower_bitwise_not(self, op: Operation) -> None:
        assert op.outputs[0].meta.dtype == torch.bool
        self._unary(Code.NOT, op)

    def _sum_of(self, code: Code, op: Operation, turned: bool = False) -> None:
        a, b = op.args[:2]
        alpha = op.kwargs.get("alpha", op.args[2] if len(op.args) > 2 else 1)
        if alpha != 1:
            scaled = self.fresh(shape_of(b))
            self.emit(Code.MULTIPLY, scaled, b, alpha)
            b = scaled
        self.emit(code, op.outputs[0], *((b, a) if turned else (a, b)))

    def _lower_add(self, op: Operation) -> None:
        self._sum_of(Code.ADD, op)

    def _lower_sub(self, op: Operation) -> None:
        self._sum_of(Code.SUBTRACT, op)

    def _lower_rsub(self, op: Operation) -> None:
        self._sum_of(Code.SUBTRACT, op, turned=True)

    def _lower_div(self, op: Operation) -> None:
        rounding = "floor" if op.name == "floor_divide" else op.kwargs.get("rounding_mode")
        out = op.outputs[0]
        if rounding is None:
            return self.emit(Code.DIVIDE, out, *op.args[:2])
        quotient, size = (self.fresh(shape_of(out)) for _ in range(2))
        self.emit(Code.DIVIDE, quotient, *op.args[:2])
        if rounding == "floor":
            return self.emit(Code.FLOOR, out, quotient)
        assert rounding == "trunc", rounding
        self.emit(Code.ABS, size, quotient)
        self.emit(Code.FLOOR, size, size)
        self.emit(Code.LESS, quotient, quotient, 0.0)
        self.emit(Code.MULTIPLY, quotient, quotient, size)
        self.emit(Code.SUBTRACT, size, size, quotient)
        self.emit(Code.SUBTRACT, out, size, quotient)
        return None

    _lower_floor_divide = _lower_div

    def _lower_pow(self, op: Operation) -> None:
        base, power = op.args[:2]
        if isinstance(power, int | float) and power == 2:
            self.emit(Code.MULTIPLY, op.outputs[0], base, base)
        else:
            self.emit(Code.POWER, op.outputs[0], base, power)

    def _lower_sign(self, op: Operation) -> None:
        out, x = op.outputs[0], self.dense(op.args[0])
        above = self.fresh(shape_of(x))
        self.emit(Code.LESS, above, 0.0, x)
        self.emit(Code.LESS, out, x, 0.0)
        self.emit(Code.SUBTRACT, out, above, out)

    def _lower_square(self, op: Operation) -> None:
        self.emit(Code.MULTIPLY, op.outputs[0], op.args[0], op.args[0])

    def _lower_gelu(self, op: Operation) -> None:
        tanh = op.kwargs.get("approximate", "none") == "tanh"
        self.emit(Code.GELU_TANH if tanh else Code.GELU, op.outputs[0], op.args[0])

    def _lower_softplus(self, op: Operation) -> None:
        assert tuple(op.args[1:]) in ((), (1,), (1, 20), (1.0, 20.0)), op.args[1:]
        self.emit(Code.SOFTPLUS, op.outputs[0], op.args[0])

    def _lower_log_sigmoid(self, op: Operation) -> None:
        out = op.outputs[0]
        self.emit(Code.NEGATE, out, op.args[0])
        self.emit(Code.SOFTPLUS, out, out)
        self.emit(Code.NEGATE, out, out)

    def _lower_clamp(self, op: Operation) -> None:
        low, high = _at(op, 1, "min"), _at(op, 2, "max")
        out, x = op.outputs[0], op.args[0]
        for code, bound in ((Code.MAXIMUM, low), (Code.MINIMUM, high)):
            if bound is not None:
                self.emit(code, out, x, bound)
                x = out

    def _lower_where(self, op: Operation) -> None:
        self.emit(Code.WHERE, op.outputs[0], *op.args[:3])

    def _lower_masked_fill(self, op: Operation) -> None:
        x, mask, number = op.args[:3]
        self.emit(Code.WHERE, op.outputs[0], mask, number, x)

    def _lower_index_put(self, op: Operation) -> None:
        """One number where a mask says so."""
        x, (mask,), value = op.args[:3]
        kind = mask.meta.dtype if isinstance(mask, Value) else mask.dtype
        assert kind == torch.bool, "indices"
        assert shape_of(mask) == shape_of(x), "a mask of some dimensions"
        assert torch.Size(shape_of(value)).numel() == 1, "several values"
        self.emit(Code.WHERE, op.outputs[0], mask, value, x)

    def _fill(self, number: float, op: Operation) -> None:
        self.emit(Code.COPY, op.outputs[0], number)

    def _lower_fill(self, op: Operation) -> None:
        self.emit(Code.COPY, op.outputs[0], op.args[1])

    def _lower_new_full(self, op: Operation) -> None:
        self.emit(Code.COPY, op.outputs[0], op.args[2])

    def _lower_full_like(self, op: Operation) -> None:
        self.emit(Code.COPY, op.outputs[0], op.args[1])

    # Copies

    def _copy(self, op: Operation) -> None:
        out = op.outputs[0]
        if op.name == "cat":
            dim, start = _dim(op, 1, out), 0
            for part in op.args[0]:
                size = shape_of(part)[dim] if shape_of(part) != (0,) else 0
                if size:
                    self.emit(Code.COPY, out.viewed(narrow(dim, start, size)), part)
                start += size
        elif op.name == "stack":
            dim = _dim(op, 1, out)
            for index, part in enumerate(op.args[0]):
                self.emit(Code.COPY, out.viewed(partial(select, dim, index)), part)
        elif op.name == "copy":
            self.emit(Code.COPY, out, op.args[1])
        else:  # dense, in another shape
            shape = shape_of(op.args[0])
            self.emit(Code.COPY, out.viewed(lambda meta: meta.view(shape)), op.args[0])

    def _lower_repeat_interleave(self, op: Operation) -> None:
        out, (x, repeats) = op.outputs[0], op.args[:2]
        dim = _dim(op, 2, out)
        shape = (*shape_of(x)[: dim + 1], repeats, *shape_of(x)[dim + 1 :])
        self.emit(Code.COPY, out.viewed(lambda m: m.view(shape)), viewed(x, unsqueeze(dim + 1)))

    def _lower_repeat(self, op: Operation) -> None:
        out, (x, repeats) = op.outputs[0], op.args[:2]
        own = (1,) * (len(repeats) - len(shape_of(x))) + shape_of(x)
        shape = [n for pair in zip(repeats, own, strict=True) for n in pair]
        once = [n for size in own for n in (1, size)]
        self.emit(
            Code.COPY, out.viewed(lambda m: m.view(shape)), viewed(x, lambda m: m.reshape(once))
        )

    def _lower_pad(self, op: Operation) -> None:
        out, (x, sides) = op.outputs[0], op.args[:2]
        mode = op.args[2] if len(op.args) > 2 else op.kwargs.get("mode", "constant")
        value = op.args[3] if len(op.args) > 3 else op.kwargs.get("value")
        assert isinstance(mode, int | float) or mode == "constant", mode
        self.emit(Code.COPY, out, float(value or 0) if mode == "constant" else float(mode))
        inner, source = out, x
        for back, (low, high) in enumerate(zip(sides[::2], sides[1::2], strict=True)):
            dim = len(shape_of(x)) - 1 - back
            size = shape_of(source)[dim]
            start, end = max(-low, 0), size - max(-high, 0)
            source = viewed(source, narrow(dim, start, end - start))
            inner = inner.viewed(narrow(dim, max(low, 0), end - start))
        self.emit(Code.COPY, inner, source)

    _lower_constant_pad_nd = _lower_pad

    # Folds

    def _fold(self, code: Code, x: Operand, dim: int) -> Value:
        """``x`` folded over a dimension, which stays with size 1."""
        made = self.fresh(self._folded_shape(x, dim))
        self._fold_to(made, code, x, dim)
        return made

    def _folded_shape(self, x: Operand, dim: int) -> list[int]:
        shape = list(shape_of(x))
        shape[dim] = 1
        return shape

    def _fold_to(self, made: Value, code: Code, x: Operand, dim: int) -> None:
        last = viewed(x, lambda meta: meta.movedim(dim, -1))
        out = made.viewed(lambda meta: meta.movedim(dim, -1))
        self.emit(code, out, last, shape=shape_of(last))

    def _fold_dims(self, code: Code, op: Operation) -> None:
        x, out = op.args[0], op.outputs[0]
        dims = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
        given = [dims] if isinstance(dims, int) else list(dims or range(len(shape_of(x))))
        if not given:
            return self.emit(Code.COPY, out, x)
        number = out.meta.numel() / max(torch.Size(shape_of(x)).numel(), 1)
        for dim in given[:-1]:
            x = self._fold(code, x, dim)
        shape = self._folded_shape(x, given[-1])
        self._fold_to(out.viewed(lambda meta: meta.view(shape)), code, x, given[-1])
        if op.name == "mean":
            self.emit(Code.MULTIPLY, out, out, number)
        return None

    def _exponents(self, x: Operand, dim: int) -> tuple[Value, Value, Value]:
        """The largest of a dimension, e^(x - largest), and their sum."""
        high = self._fold(Code.LARGEST, x, dim)
        e = self.fresh(shape_of(x))
        self.emit(Code.SUBTRACT, e, x, high)
        self.emit(Code.EXP, e, e)
        return high, e, self._fold(Code.SUM, e, dim)

    def _lower_softmax(self, op: Operation) -> None:
        _, e, total = self._exponents(op.args[0], op.args[1])
        self.emit(Code.DIVIDE, op.outputs[0], e, total)

    _lower__softmax = _lower_softmax

    def _lower_log_softmax(self, op: Operation) -> None:
        high, _, total = self._exponents(op.args[0], op.args[1])
        self.emit(Code.LOG, total, total)
        self.emit(Code.ADD, total, total, high)
        self.emit(Code.SUBTRACT, op.outputs[0], op.args[0], total)

    def _lower_logsumexp(self, op: Operation) -> None:
        (dim,) = op.args[1] if isinstance(op.args[1], list | tuple) else (op.args[1],)
        high, _, total = self._exponents(op.args[0], dim)
        self.emit(Code.LOG, total, total)
        shape = shape_of(total)
        self.emit(Code.ADD, op.outputs[0].viewed(lambda m: m.view(shape)), total, high)

    def _lower_linalg_vector_norm(self, op: Operation) -> None:
        x, order = op.args[0], op.args[1] if len(op.args) > 1 else 2
        dims = op.args[2] if len(op.args) > 2 else op.kwargs.get("dim")
        assert order in (1, 2), order
        made = self.fresh(shape_of(x))
        if order == 1:
            self.emit(Code.ABS, made, x)
        else:
            self.emit(Code.MULTIPLY, made, x, x)
        for dim in [dims] if isinstance(dims, int) else list(dims or range(len(shape_of(x)))):
            made = self._fold(Code.SUM, made, dim)
        shape = shape_of(made)
        root = Code.COPY if order == 1 else Code.SQRT
        self.emit(root, op.outputs[0].viewed(lambda m: m.view(shape)), made)

    def _lower_layer_norm(self, op: Operation) -> None:
        x, sizes = op.args[:2]
        weight, bias = (_at(op, 2, "weight"), _at(op, 3, "bias"))
        assert len(sizes) == 1, sizes
        centred, mean = self.fresh(shape_of(x)), self._fold(Code.SUM, x, -1)
        self.emit(Code.MULTIPLY, mean, mean, 1 / sizes[0])
        self.emit(Code.SUBTRACT, centred, x, mean)
        eps = op.args[4] if len(op.args) > 4 else op.kwargs.get("eps", 1e-5)
        self._normalise(op.outputs[0], centred, sizes[0], eps, weight, bias)

    def _lower_rms_norm(self, op: Operation) -> None:
        x, sizes = op.args[:2]
        assert len(sizes) == 1, sizes
        eps = op.args[3] if len(op.args) > 3 else op.kwargs.get("eps")
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        self._normalise(op.outputs[0], x, sizes[0], eps, _at(op, 2, "weight"), None)

    def _normalise(
        self, out: Value, x: Operand, size: int, eps: float, weight: Operand | None,
        bias: Operand | None,
    ) -> None:  # fmt: skip
        squares = self.fresh(shape_of(x))
        self.emit(Code.MULTIPLY, squares, x, x)
        scale = self._fold(Code.SUM, squares, -1)
        self.emit(Code.MULTIPLY, scale, scale, 1 / size)
        self.emit(Code.ADD, scale, scale, eps)
        self.emit(Code.RSQRT, scale, scale)
        self.emit(Code.MULTIPLY, out, x, scale)
        if weight is not None:
            self.emit(Code.MULTIPLY, out, out, weight)
        if bias is not None:
            self.emit(Code.ADD, out, out, bias)

    def _lower_sinkhorn(self, op: Operation) -> None:
        x, dim, count, eps = op.args

        def last(meta: Tensor) -> Tensor:
            return meta if dim == -1 else meta.mT

        self.emit(
            Code.SINKHORN, op.outputs[0].viewed(last), viewed(x, last), count=count, number=eps
        )

    def _lower_cumsum(self, op: Operation) -> None:
        dim = _dim(op, 1, op.outputs[0])
        out = op.outputs[0].viewed(lambda meta: meta.movedim(dim, -1))
        self.emit(Code.CUMULATE, out, viewed(op.args[0], lambda meta: meta.movedim(dim, -1)))

    # Choices

    def _top(
        self, x: Operand, count: int, dim: int, largest: bool, values: Value, ids: Value
    ) -> None:
        last = viewed(constant(x), lambda meta: meta.movedim(dim, -1))
        out, chosen = (each.viewed(lambda meta: meta.movedim(dim, -1)) for each in (values, ids))
        self._written(ids)
        self._written(values)
        sizes, sign = shape_of(last), 1.0 if largest else -1.0
        self.units.append(Instruction(Code.TOP, sizes, out, (last, chosen, chosen), count, sign))

    def _lower_topk(self, op: Operation) -> None:
        dim = op.kwargs.get("dim", op.args[2] if len(op.args) > 2 else -1)
        largest = op.kwargs.get("largest", op.args[3] if len(op.args) > 3 else True)
        self._top(op.args[0], op.args[1], dim, largest, *op.outputs)

    def _lower_sort(self, op: Operation) -> None:
        dim, down = _at(op, 1, "dim"), _at(op, 2, "descending")
        dim = -1 if dim is None else dim
        self._top(op.args[0], shape_of(op.args[0])[dim], dim, bool(down), *op.outputs)

    def _lower_argsort(self, op: Operation) -> None:
        dim, down = _at(op, 1, "dim"), _at(op, 2, "descending")
        dim, x = -1 if dim is None else dim, op.args[0]
        self._top(x, shape_of(x)[dim], dim, bool(down), self.fresh(shape_of(x)), op.outputs[0])

    def _lower_max(self, op: Operation) -> None:
        x, dim = op.args[0], _at(op, 1, "dim")
        if isinstance(dim, Value | Tensor):
            return self.emit(Code.MAXIMUM, op.outputs[0], x, dim)
        if dim is None:
            return self._fold_dims(Code.LARGEST, op)
        shape = [*shape_of(x)]
        shape[dim] = 1
        values, ids = (each.viewed(lambda meta: meta.view(shape)) for each in op.outputs)
        return self._top(x, 1, dim, True, values, ids)

    def _lower_argmax(self, op: Operation) -> None:
        x, dim = op.args[0], _at(op, 1, "dim")
        assert dim is not None
        shape = [*shape_of(x)]
        shape[dim] = 1
        ids = op.outputs[0].viewed(lambda meta: meta.view(shape))
        self._top(x, 1, dim, True, self.fresh(shape), ids)

    def _lower_gather(self, op: Operation) -> None:
        x, dim, index = op.args[:3]
        dim %= len(shape_of(x))
        self._gather(op.outputs[0], x, dim, index)

    def _lower_flip(self, op: Operation) -> None:
        x, dims = op.args[:2]
        for place, dim in enumerate(dims):
            column = [-1 if d == dim % len(shape_of(x)) else 1 for d in range(len(shape_of(x)))]
            index = torch.arange(shape_of(x)[dim]).flip(0).view(column)
            out = op.outputs[0] if place + 1 == len(dims) else self.fresh(shape_of(x))
            self._gather(out, x, dim % len(shape_of(x)), index)
            x = out

    def _gather(self, out: Value, x: Operand, dim: int, index: Operand) -> None:
        """``out = x`` at ``index`` of a dimension; all have as many dimensions as ``out``."""
        sizes, x = shape_of(out), constant(x)
        inputs = without(x, dim, sizes), broadcast(constant(index), sizes)
        self._written(out)
        self.units.append(Instruction(Code.GATHER, sizes, out, inputs, stride_of(x, dim)))

    def _lower_scatter(self, op: Operation) -> None:
        self._scatter(Code.SCATTER, op)

    def _lower_scatter_add(self, op: Operation) -> None:
        self._scatter(Code.SCATTER_ADD, op)

    def _scatter(self, code: Code, op: Operation) -> None:
        x, dim, index, source = op.args[:4]
        assert len(op.args) == 4, "a reduction"
        assert not op.kwargs, "a reduction"
        out, sizes = op.outputs[0], shape_of(index)
        dim %= len(sizes)
        if not (isinstance(x, Value) and x.buffer == out.buffer):
            self.emit(Code.COPY, out, x)
        if isinstance(source, Value | Tensor):
            source = viewed(source, lambda m: m[tuple(slice(n) for n in sizes)])
        self._written(out)
        inputs = broadcast(constant(source), sizes), broadcast(constant(index), sizes)
        rest = without(out, dim, sizes)
        assert isinstance(rest, Value)
        self.units.append(Instruction(code, sizes, rest, inputs, stride_of(out, dim)))

    def _lower_index_add(self, op: Operation) -> None:
        x, dim, index, source = op.args[:4]
        assert op.kwargs.get("alpha", 1) == 1, "a factor"
        sizes = shape_of(source)
        column = [-1 if d == dim % len(sizes) else 1 for d in range(len(sizes))]
        index = broadcast(viewed(index, lambda meta: meta.reshape(column)), sizes)
        self._scatter(Code.SCATTER_ADD, Operation(op.name, (x, dim, index, source), {}, op.outputs))

    def _lower_searchsorted(self, op: Operation) -> None:
        """The place of each number in a row of ascending ones: how many come before it."""
        row, x = op.args[:2]
        assert len(shape_of(row)) == 1, "several rows"
        right = op.kwargs.get("right") or op.kwargs.get("side") == "right"
        code = Code.LESS_EQUAL if right else Code.LESS
        before = self.fresh((*shape_of(x), *shape_of(row)))
        self.emit(code, before, row, viewed(x, unsqueeze(-1)))
        counts = self._fold(Code.SUM, before, -1)
        self.emit(Code.COPY, op.outputs[0].viewed(unsqueeze(-1)), counts)

    def _lower_index(self, op: Operation) -> None:
        x, indices = op.args[:2]
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        assert len(given) == 1, "several indices"
        (dim, index), out = given[0], op.outputs[0]
        shape = shape_of(x)
        count = torch.Size(shape_of(index)).numel()
        flat = out.viewed(lambda meta: meta.view(*shape[:dim], count, *shape[dim + 1 :]))
        column = [count if d == dim else 1 for d in range(len(shape))]
        dtype = index.meta.dtype if isinstance(index, Value) else index.dtype
        assert dtype != torch.bool, "a mask as an index"
        self._gather(flat, x, dim, viewed(index, lambda meta: meta.reshape(column)))

    def _lower_index_select(self, op: Operation) -> None:
        x, dim, index = op.args[:3]
        column = [-1 if d == dim % len(shape_of(x)) else 1 for d in range(len(shape_of(x)))]
        index = viewed(index, lambda meta: meta.reshape(column))
        self._gather(op.outputs[0], x, dim % len(shape_of(x)), index)

    def _lower_embedding(self, op: Operation) -> None:
        table, index = op.args[:2]
        width = shape_of(table)[1]
        rows = op.outputs[0].viewed(lambda meta: meta.view(-1, width))
        self._gather(rows, table, 0, viewed(index, lambda meta: meta.reshape(-1, 1)))

    # Products

    def _project(self, x: Operand, projection: Projection, out: Value) -> None:
        rows = self.dense(x)
        columns = (
            projection.weight.shape[1]
            if isinstance(projection.weight, Tensor)
            else projection.weight.layout.columns
        )
        multiple = rows.meta.numel() // columns
        codes = None
        if isinstance(projection.weight, PlaneMatrix):
            codes = self._quantised(
                rows, columns, projection.weight.layout.format.row_group, multiple
            )
        with self._dense_output(out) as target:
            self.units.append(Product(projection, rows, codes, target, multiple))

    @contextmanager
    def _dense_output(self, out: Value) -> Iterator[Value]:
        """``out``, or dense memory that is then copied to it."""
        direct = is_whole(out) and out.buffer not in self._states
        target = out if direct else self.fresh(shape_of(out))
        self._written(target)
        yield target
        if not direct:
            self.emit(Code.COPY, out, target)

    def _quantised(self, rows: Value, columns: int, group: int, multiple: int) -> Value:
        codes = self._codes.get((rows.buffer, group))
        if codes is None:
            codes = self.fresh((multiple, columns))
            sizes = (columns, group)
            self.units.append(Instruction(Code.QUANTISE, sizes, codes, (rows,), multiple))
            self._codes[rows.buffer, group] = codes
        return codes

    def _lower_projection(self, op: Operation) -> None:
        self._project(op.args[1], op.args[0], op.outputs[0])

    def _lower_selected_projection(self, op: Operation) -> None:
        matrices, rows, ids = op.args
        with self._dense_output(op.outputs[0]) as out:
            self.units.append(Selection(matrices, self.dense(rows), self._integers(ids), out))

    def _integers(self, x: Operand) -> Value:
        made = self.fresh(shape_of(x), torch.int64)
        self.emit(Code.COPY, made, x)
        return made

    def _lower_linear(self, op: Operation) -> None:
        x, weight = op.args[:2]
        bias = _at(op, 2, "bias")
        assert isinstance(weight, Tensor), "a weight that varies"
        assert not isinstance(bias, Value), "a bias that varies"
        own = None if bias is None else bias.detach().float().clone()
        self._project(x, Projection(weight.detach(), own, nn.Identity()), op.outputs[0])

    def _lower_matmul(self, op: Operation) -> None:
        a, b, out = op.args[0], op.args[1], op.outputs[0]
        if isinstance(b, Tensor) and b.ndim == 2 and len(shape_of(a)) > 1:
            return self._project(a, Projection(b.t().contiguous(), None, nn.Identity()), out)
        if isinstance(a, Tensor) and a.ndim == 2 and len(shape_of(b)) > 1 and shape_of(b)[-1] == 1:
            return self._project(b, Projection(a.contiguous(), None, nn.Identity()), out)
        assert min(len(shape_of(a)), len(shape_of(b))) > 1
        *batch, m, n = shape_of(out)
        k = shape_of(a)[-1]
        sizes = (*batch, m, n, k)
        left = viewed(broadcast(a, (*batch, m, k)), lambda meta: meta.unsqueeze(-2))
        right = viewed(broadcast(b, (*batch, k, n)), lambda meta: meta.mT.unsqueeze(-3))
        target = out.viewed(lambda meta: meta.unsqueeze(-1))
        self.emit(Code.MATMUL, target, left, right, shape=sizes)
        return None

    _lower_mm = _lower_matmul

    def _lower_bmm(self, op: Operation) -> None:
        """One row of each batch with a matrix of its own is a product of rows with matrices."""
        (a, b), out = op.args, op.outputs[0]
        own = isinstance(b, Tensor) and b.dtype == torch.float32 and b.mT.is_contiguous()
        if not own or shape_of(a)[1] != 1:
            return self._lower_matmul(op)
        every = self._integers(torch.arange(len(b)))
        with self._dense_output(out) as target:
            self.units.append(Selection(b.mT, self.dense(viewed(a, _only_row)), every, target))
        return None

    def _lower_scaled_dot_product_attention(self, op: Operation) -> None:
        """Without a cache: over rows of the token itself."""
        query, key, value, *others = op.args
        scale = op.kwargs.get("scale")
        assert not any((*others, op.kwargs.get("attn_mask"), op.kwargs.get("is_causal")))
        assert not op.kwargs.get("enable_gqa"), "grouped queries"
        scores, weights = (self.fresh((*shape_of(query)[:-1], shape_of(key)[-2])) for _ in range(2))
        turned = viewed(key, lambda meta: meta.mT)
        self._lower_matmul(Operation("matmul", (query, turned), {}, (scores,)))
        self.emit(
            Code.MULTIPLY, scores, scores, shape_of(query)[-1] ** -0.5 if scale is None else scale
        )
        self._lower_softmax(Operation("softmax", (scores, -1), {}, (weights,)))
        self._lower_matmul(Operation("matmul", (weights, value), {}, op.outputs))

    def _lower_conv1d(self, op: Operation) -> None:
        x, weight = op.args[:2]
        bias, stride, padding, dilation, groups = [*op.args[2:], *_CONV[len(op.args) - 2 :]]
        out, (_, channels, size) = op.outputs[0], shape_of(x)
        assert isinstance(weight, Tensor), "a weight that varies"
        (step,) = dilation
        assert list(stride) == [1], "a stride"
        if list(padding) != [0]:
            wide = self.fresh((1, channels, size + 2 * padding[0]))
            self.emit(Code.COPY, wide, 0.0)
            self.emit(Code.COPY, wide.viewed(narrow(2, padding[0], size)), x)
            x = wide
        made, each, width = out.viewed(lambda meta: meta[0]), *weight.shape[1:]
        length = shape_of(made)[1]
        if each == 1 and groups == channels:
            for k in range(width):
                part = self.fresh(shape_of(made)) if k else made
                column = viewed(viewed(x, narrow(2, k * step, length)), partial(select, 0, 0))
                self.emit(Code.MULTIPLY, part, column, weight[:, 0, k : k + 1])
                if k:
                    self.emit(Code.ADD, made, made, part)
        else:
            assert step == 1, "a dilation"
            windows = viewed(x, lambda meta: meta[0].unfold(1, width, 1).permute(0, 2, 1))
            held = self.fresh(shape_of(windows))
            self.emit(Code.COPY, held, windows)
            rows = weight.reshape(groups, -1, each * width).unsqueeze(-2)  # (G, out, 1, K)
            sizes = (groups, rows.shape[1], length, each * width)
            columns = viewed(held, lambda m: m.view(groups, -1, length).mT.unsqueeze(1))
            target: Value = viewed(made, lambda m: m.view(groups, -1, length).unsqueeze(-1))
            self.emit(Code.MATMUL, target, rows, columns, shape=sizes)
        if bias is not None:
            self.emit(Code.ADD, out, out, bias[:, None])

    # Attention, recurrent layers and experts

    def _recurrent(self, call: Callable[..., Recurrence], rows: int, op: Operation) -> None:
        """The first ``rows`` arguments behind the state are inputs of a token."""
        state, *args = op.args
        made = [None if x is None else self._side_by_side(x) for x in args[:rows]]
        assert not any(isinstance(x, Value) for x in args[rows:]), "a weight that varies"
        recurrence = call(*(None if x is None else x.meta for x in made), *args[rows:])
        before = state
        if state is not None and not (isinstance(state, Value) and is_whole(state)):
            before = self.dense(state)
        out, after = op.outputs
        for each in (out, after):
            self._written(each)
        self.units.append(Recurrent(recurrence, tuple(made), before, after, out))

    def _side_by_side(self, x: Operand) -> Value:
        """The operand with the numbers of its last dimension side by side, copied if need be."""
        if isinstance(x, Value) and 1 in (x.meta.stride(-1), x.meta.shape[-1]):
            return x
        return self.dense(x)

    def _lower_attention(self, op: Operation) -> None:
        attends, query, key, value = op.args
        q, k, v = (viewed(x, lambda meta: meta[0, :, 0]) for x in (query, key, value))
        if attends.latents is not None:
            rows = self.fresh((1, shape_of(k)[1] + shape_of(v)[1]))
            self.emit(Code.COPY, rows.viewed(narrow(1, 0, shape_of(k)[1])), k)
            self.emit(Code.COPY, rows.viewed(narrow(1, shape_of(k)[1], shape_of(v)[1])), v)
            k = rows
        dense = [self.dense(x) for x in (q, k, v)]
        with self._dense_output(op.outputs[0]) as out:
            others = (op.kwargs.get(name) for name in ("chosen", "sinks", "bias", "entry"))
            extras = [None if x is None else self.dense(x) for x in others]
            self.units.append(AttentionOf(attends, dense[0], dense[1], dense[2], out, *extras))

    def _lower_indexer(self, op: Operation) -> None:
        indexer, *rows = op.args
        query, weights, key = map(self.dense, rows)
        assert is_whole(op.outputs[0])
        self.units.append(IndexerOf(indexer, query, weights, key, op.outputs[0]))

    def _lower_experts(self, op: Operation) -> None:
        layer, hidden, ids, weights = op.args
        width, top_k = shape_of(hidden)[-1], shape_of(ids)[-1]
        for space, x, dtype in (
            (Space.HIDDEN, hidden, torch.float32),
            (Space.IDS, ids, torch.int64),
            (Space.WEIGHTS, weights, torch.float32),
        ):
            to = Value(self.arrays[space], torch.empty(shape_of(x), dtype=dtype, device="meta"))
            self.emit(Code.COPY, to, x)
        pair = [
            Value(self.arrays[space], torch.empty(top_k, dtype=dtype, device="meta"))
            for space, dtype in ((Space.IDS, torch.int64), (Space.WEIGHTS, torch.float32))
        ]
        self.units.append(Instruction(Code.SORT_CHOICE, (top_k,), pair[1], tuple(pair), top_k))
        read = tuple(self.arrays[each] for each in (Space.HIDDEN, Space.IDS, Space.WEIGHTS))
        own = self.arrays[Space.ROUTED]
        self.units.append(ExpertsOf(layer, top_k, width, read, own))
        routed = torch.empty(shape_of(hidden), device="meta")
        self.emit(Code.COPY, op.outputs[0], Value(self.arrays[Space.ROUTED], routed))


def operation_names() -> set[str]:
    """The operations that can be lowered."""
    methods = {name.removeprefix(_PREFIX) for name in dir(Lowering) if name.startswith(_PREFIX)}
    tables = (_UNARY, _BINARY, _TURNED, _LOGICAL, _FOLDS, _FILLED, _RECURRENT, _COPIES, _EMPTY)
    return methods.union(*tables)


def _only_row(meta: Tensor) -> Tensor:
    return meta[:, 0]


def _at(op: Operation, place: int, name: str) -> Any:
    return op.args[place] if len(op.args) > place else op.kwargs.get(name)


def _dim(op: Operation, place: int, out: Value) -> int:
    dim = _at(op, place, "dim")
    return (0 if dim is None else int(dim)) % out.meta.ndim
