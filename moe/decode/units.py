"""The units of a decode program, on strided operands, to which a recorded token is lowered.

`moe.decode.lower` makes units, `moe.decode.program` orders them and writes their records. The
functions at the end view operands, values and constants alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.program import DIMS, Code, Element
from kernels.recurrence import Recurrence
from moe.decode.history import Indexer
from moe.decode.recorder import Value
from moe.decode.trace import Attends
from moe.describe.description import NotDescribed, Projection

Operand = Value | Tensor
"""A value, or a constant."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; operands have the strides of ``sizes``, zeros where they broadcast. Only the
    last token of ``every`` so many needs what it makes."""

    code: Code
    sizes: tuple[int, ...]
    out: Operand
    inputs: tuple[Operand, ...]
    count: int = 0
    number: float = 0.0
    every: int = 1


@dataclass(frozen=True)
class Product:
    """``out = matrix * rows``, of dense rows; ``codes``: their quantised copy, or None."""

    projection: Projection
    rows: Value
    codes: Value | None
    out: Value
    multiple: int


@dataclass(frozen=True)
class Selection:
    """``out[r] = matrices[ids[r]] * rows[r]`` of dense rows ``(multiple, columns)`` and integers
    ``(multiple,)``; the matrices are ``(any, rows, columns)`` float32."""

    matrices: Tensor
    rows: Value
    ids: Value
    out: Value


@dataclass(frozen=True)
class AttentionOf:
    """Attention of dense queries to a cache that the dense rows are added to: keys and values, or
    in ``key`` latents and rotated keys. `Attends` says what the others are, if they are there.
    The last token of every few adds ``entry`` to a cache of entries."""

    attends: Attends
    query: Value
    key: Value
    value: Value
    out: Value
    chosen: Value | None
    sinks: Value | None
    bias: Value | None
    entry: Value | None

    @property
    def attends_together(self) -> bool:
        """The new tokens of a prompt can attend together: to what they see by the same rule."""
        own = self.chosen, self.sinks, self.bias, self.entry
        return all(each is None for each in own)


@dataclass(frozen=True)
class IndexerOf:
    """The positions ``out`` that an indexer chooses, by dense queries ``(H, D)`` and weights of its
    heads, among its keys, which the dense key is added to."""

    indexer: Indexer
    query: Value
    weights: Value
    key: Value
    out: Value


@dataclass(frozen=True)
class ExpertsOf:
    """The experts of a layer read the arrays HIDDEN, IDS and WEIGHTS and write ROUTED."""

    layer: int
    top_k: int
    hidden: int
    read: tuple[int, ...]  # buffers
    routed: int


@dataclass(frozen=True)
class Recurrent:
    """One token of a recurrent layer: ``recurrence`` reads ``rows``, which lie as it says, and the
    whole state ``before``, and writes ``after`` and ``out``."""

    recurrence: Recurrence
    rows: tuple[Value | None, ...]
    before: Value | None
    after: Value
    out: Value


Unit = Instruction | Product | Selection | AttentionOf | IndexerOf | ExpertsOf | Recurrent


def element_of(dtype: torch.dtype) -> Element:
    """The interpreter's type for a dtype; it computes all floats in float32."""
    if dtype == torch.bool:
        return Element.BOOLEAN
    return Element.FLOAT if dtype.is_floating_point else Element.INTEGER


def is_whole(x: Value) -> bool:
    """It is dense and all of its buffer."""
    count = x.meta.untyped_storage().nbytes() // x.meta.dtype.itemsize
    return x.meta.is_contiguous() and x.meta.numel() == count


_FIXED_DIMS = {Code.MATMUL: 2, Code.SINKHORN: 2} | dict.fromkeys(
    (Code.TOP, Code.CUMULATE, Code.SUM, Code.LARGEST, Code.SMALLEST, Code.NORM, Code.SOFTMAX,
     Code.ROTATE), 1,
)  # fmt: skip
"""The last dimensions that an instruction means by themselves."""


def collapsed(
    unit: Instruction,
) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides of an instruction with neighbouring dimensions joined where all operands
    allow it, and dimensions of size 1 left out.

    Raises:
        NotDescribed: more dimensions are left than an instruction has.
    """
    operands = [unit.out, *unit.inputs]
    if unit.code is Code.QUANTISE:  # dense rows; its sizes are numbers of its own
        return list(unit.sizes), [[0] * len(unit.sizes) for _ in operands]
    strides = [list((x.meta if isinstance(x, Value) else x).stride()) for x in operands]
    sizes = list(unit.sizes)
    fixed = _FIXED_DIMS.get(unit.code, 0)
    d = len(sizes) - 1 - fixed
    while d >= 0:
        if sizes[d] == 1:
            for each in [sizes, *strides]:
                del each[d]
        elif d + 1 < len(sizes) - fixed and all(
            own[d] == own[d + 1] * sizes[d + 1] for own in strides
        ):
            sizes[d] *= sizes.pop(d + 1)
            for own in strides:
                own[d] = own.pop(d + 1)
        d -= 1
    return _padded(sizes, strides)


def _padded(sizes: list[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    if not sizes:
        sizes, strides = [1], [[0] for _ in strides]
    if len(sizes) > DIMS:
        raise NotDescribed(f"an operation of {len(sizes)} dimensions")
    return sizes, strides


def shape_of(x: Operand) -> tuple[int, ...]:
    return tuple((x.meta if isinstance(x, Value) else x).shape)


def viewed(x: Operand, view: Callable[[Tensor], Tensor]) -> Any:
    return x.viewed(view) if isinstance(x, Value) else view(x)


def constant(x: Operand | float | bool) -> Operand:
    """A constant has one of the interpreter's types."""
    if isinstance(x, Value):
        return x
    if not isinstance(x, Tensor):
        return torch.tensor(float(x))
    kinds = {
        Element.FLOAT: torch.float32,
        Element.INTEGER: torch.int64,
        Element.BOOLEAN: torch.bool,
    }
    return x.to(kinds[element_of(x.dtype)])


def broadcast(x: Operand, sizes: Sequence[int]) -> Operand:
    return viewed(x, lambda meta: meta.expand(tuple(sizes)))


def stride_of(x: Operand, dim: int) -> int:
    return (x.meta if isinstance(x, Value) else x).stride(dim)


def without(x: Operand, dim: int, sizes: Sequence[int]) -> Operand:
    """The first of a dimension, as if it were all of them; the others as far as ``sizes``."""

    def view(meta: Tensor) -> Tensor:
        for d, size in enumerate(sizes):
            meta = meta.narrow(d, 0, 1 if d == dim else min(size, meta.shape[d]))
        return meta.expand(tuple(sizes))

    return viewed(x, view)


def narrow(dim: int, start: int, size: int) -> Callable[[Tensor], Tensor]:
    return lambda meta: meta.narrow(dim, start, size)


def select(dim: int, index: int, meta: Tensor) -> Tensor:
    return meta.select(dim, index)


def unsqueeze(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda meta: meta.unsqueeze(dim)


def values_of(unit: Unit) -> list[Value]:
    """The values that a unit reads or writes."""
    match unit:
        case Instruction():
            found: Sequence[Any] = (unit.out, *unit.inputs)
        case Product():
            found = (unit.rows, unit.codes, unit.out)
        case Selection():
            found = (unit.rows, unit.ids, unit.out)
        case AttentionOf():
            found = (*_attention_reads(unit), unit.out)
        case IndexerOf():
            found = (unit.query, unit.weights, unit.key, unit.out)
        case Recurrent():
            found = (*unit.rows, unit.before, unit.after, unit.out)
        case _:
            found = ()
    return [value for value in found if isinstance(value, Value)]


def _attention_reads(unit: AttentionOf) -> tuple[Value | None, ...]:
    return unit.query, unit.key, unit.value, unit.chosen, unit.sinks, unit.bias, unit.entry


def writes_of(unit: Unit) -> list[int]:
    """Buffers that a unit writes."""
    match unit:
        case Instruction(code=Code.TOP):
            return [x.buffer for x in (unit.out, unit.inputs[2]) if isinstance(x, Value)]
        case Instruction(code=Code.SORT_CHOICE):
            return [x.buffer for x in unit.inputs if isinstance(x, Value)]
        case Recurrent():
            return [unit.after.buffer, unit.out.buffer]
        case ExpertsOf():
            return [unit.routed]
        case _:
            assert isinstance(unit.out, Value)
            return [unit.out.buffer]


def reads_of(unit: Unit) -> list[int]:
    """Buffers that a unit reads."""
    match unit:
        case ExpertsOf():
            return list(unit.read)
        case Instruction(code=Code.TOP):
            found: Sequence[Any] = unit.inputs[:1]
        case Instruction(code=Code.SCATTER_ADD):
            found = (unit.out, *unit.inputs)
        case Instruction():
            found = unit.inputs
        case Product():
            found = (unit.rows, unit.codes)
        case Selection():
            found = (unit.rows, unit.ids)
        case Recurrent():
            found = (*unit.rows, unit.before)
        case IndexerOf():
            found = (unit.query, unit.weights, unit.key)
        case _:
            found = _attention_reads(unit)
    return [value.buffer for value in found if isinstance(value, Value)]
