"""Finds norms, softmax and rotary positions among the instructions of a program: torch writes each
of them as some operations.

`with_patterns` makes one instruction of each. It looks at runs of instructions as a model's code
leaves them; what is written otherwise stays as it is, and computes the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from kernels.cpu.program import Code
from moe.decode.recorder import Value
from moe.decode.units import Instruction, Operand, Unit, element_of, reads_of, writes_of


class _Pattern(NamedTuple):
    """Codes that follow each other, and what makes one instruction of such a run, if it can."""

    codes: tuple[Code, ...]
    joined: Callable[[Sequence[Instruction]], Instruction | None]


def with_patterns(units: Sequence[Unit], kept: set[int]) -> list[Unit]:
    """The units, with one for each pattern whose results between nothing else reads.

    Args:
        kept: buffers that are read from elsewhere.
    """
    readers = Counter(buffer for unit in units for buffer in _reads(unit))
    made: list[Unit] = []
    at = 0
    while at < len(units):
        for pattern in _PATTERNS:
            run = units[at : at + len(pattern.codes)]
            if (found := _found(pattern, run, readers, kept)) is not None:
                made.append(found)
                at += len(run)
                break
        else:
            made.append(units[at])
            at += 1
    return made


def _found(
    pattern: _Pattern, run: Sequence[Unit], readers: Counter[int], kept: set[int]
) -> Instruction | None:
    instructions = [unit for unit in run if isinstance(unit, Instruction)]
    if tuple(unit.code for unit in instructions) != pattern.codes or len(instructions) < len(run):
        return None
    found = pattern.joined(instructions)
    if found is None or not all(map(_is_plain, (found.out, *found.inputs))):
        return None
    inside = Counter(buffer for unit in run for buffer in _reads(unit))
    between = {buffer for unit in run for buffer in writes_of(unit)} - set(writes_of(found))
    if between & kept or any(inside[buffer] != readers[buffer] for buffer in between):
        return None
    return found


def _reads(unit: Unit) -> set[int]:
    return {*reads_of(unit)}


def _norm(run: Sequence[Instruction]) -> Instruction | None:
    """``x * rsqrt(sum(x * x) / n + eps)``, times a weight."""
    square, total, mean, raised, root, scaled, *weighted = run
    x, n = square.inputs[0], square.sizes[-1]
    eps = _number(raised.inputs[1])
    if not _same(x, square.inputs[1]) or total.sizes != square.sizes or eps is None:
        return None
    if _number(mean.inputs[1]) is None or abs(n * (_number(mean.inputs[1]) or 0) - 1) > 1e-5:
        return None
    chain = [(square, total), (total, mean), (mean, raised), (raised, root)]
    if not all(_same(one.out, other.inputs[0]) for one, other in chain):
        return None
    if not _same(x, scaled.inputs[0]) or not _same(root.out, scaled.inputs[1]):
        return None
    if scaled.sizes != square.sizes:
        return None
    if not weighted:
        return replace(scaled, code=Code.NORM, inputs=(x, x), number=eps, count=0)
    (last,) = weighted
    for normed, weight in (last.inputs, last.inputs[::-1]):
        if _same(normed, scaled.out) and isinstance(weight, Tensor) and last.sizes == scaled.sizes:
            return replace(last, code=Code.NORM, inputs=(x, weight), number=eps, count=1)
    return None


def _softmax(run: Sequence[Instruction]) -> Instruction | None:
    high, shifted, powers, total, divided = run
    x = high.inputs[0]
    if not (high.sizes == shifted.sizes == powers.sizes == total.sizes == divided.sizes):
        return None
    same = [
        (shifted.inputs[0], x), (shifted.inputs[1], high.out), (powers.inputs[0], shifted.out),
        (total.inputs[0], powers.out), (divided.inputs[0], powers.out),
        (divided.inputs[1], total.out),
    ]  # fmt: skip
    if not all(_same(one, other) for one, other in same):
        return None
    return replace(divided, code=Code.SOFTMAX, inputs=(x,))


def _rotation(run: Sequence[Instruction]) -> Instruction | None:
    """``x * cos + rotate_half(x) * sin``."""
    plain, negated, copied, turned, joined = run
    x, half = plain.inputs[0], plain.sizes[-1] // 2
    if not (plain.sizes == turned.sizes == joined.sizes) or plain.sizes[-1] % 2:
        return None
    if not negated.sizes[-1] == copied.sizes[-1] == half:
        return None
    if not isinstance(x, Value) or not isinstance(turned.inputs[0], Value):
        return None
    parts = [
        (negated.inputs[0], x, half), (copied.inputs[0], x, 0), (negated.out, turned.inputs[0], 0),
        (copied.out, turned.inputs[0], half),
    ]  # fmt: skip
    for part, whole, first in parts:
        if not _same(part, whole.viewed(lambda meta, at=first: meta.narrow(-1, at, half))):  # type: ignore[misc]
            return None
    sums = [(joined.inputs[0], plain.out), (joined.inputs[1], turned.out)]
    if not all(_same(one, other) for one, other in sums):
        return None
    inputs = x, plain.inputs[1], turned.inputs[1]
    return replace(joined, code=Code.ROTATE, inputs=inputs)


_NORM = (Code.MULTIPLY, Code.SUM, Code.MULTIPLY, Code.ADD, Code.RSQRT, Code.MULTIPLY)
_PATTERNS = (
    _Pattern((*_NORM, Code.MULTIPLY), _norm),
    _Pattern(_NORM, _norm),
    _Pattern((Code.LARGEST, Code.SUBTRACT, Code.EXP, Code.SUM, Code.DIVIDE), _softmax),
    _Pattern((Code.MULTIPLY, Code.NEGATE, Code.COPY, Code.MULTIPLY, Code.ADD), _rotation),
)


def _is_plain(x: Operand) -> bool:
    """Floats, those of the last dimension side by side."""
    meta = x.meta if isinstance(x, Value) else x
    plain = element_of(meta.dtype) == element_of(Tensor().dtype)
    return plain and (meta.shape[-1] == 1 or meta.stride(-1) == 1)


def _number(x: Operand) -> float | None:
    """The one number of a constant."""
    if isinstance(x, Value) or any(n > 1 and s for n, s in zip(x.shape, x.stride(), strict=True)):
        return None
    return float(x.flatten()[0])


def _same(one: Operand, other: Operand) -> bool:
    """They are the same elements of one buffer, as far as both have them: where one is broadcast to
    a size, the other may have that dimension once."""
    if not isinstance(one, Value) or not isinstance(other, Value) or one.buffer != other.buffer:
        return False
    a, b = one.meta, other.meta
    return a.ndim == b.ndim and a.storage_offset() == b.storage_offset() and _steps(a) == _steps(b)


def _steps(meta: Tensor) -> list[tuple[int, int]]:
    """Size and stride of the dimensions in which its elements differ."""
    pairs = zip(meta.shape, meta.stride(), strict=True)
    return [(size, stride) if size > 1 and stride else (1, 0) for size, stride in pairs]
