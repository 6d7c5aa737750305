"""The records of a decode program (kernels/cpu/program.h); `moe.decode.program` writes them.

The fields mean what program.h says. A record holds addresses: its maker keeps the tensors alive.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

from kernels.cpu.decode import DecoderLayerRecord, MatrixRecord, RotationRecord
from kernels.cpu.interface import SIZE, Record, floats, numbers, pointers, sizes
from kernels.cpu.post_norm import NormRecord
from kernels.cpu.recurrence import ConvolutionCallRecord, GatedCallRecord, ScanCallRecord

DIMS = 6
SQUARE = 256
"""Most elements of a matrix that `Code.SINKHORN` balances."""


class Space(IntEnum):
    """The place of an operand."""

    ROW = 0
    CONSTANT = 1
    BEFORE = 2
    AFTER = 3
    EMBEDDED = 4
    TOKEN = 5
    POSITION = 6
    HIDDEN = 7
    IDS = 8
    WEIGHTS = 9
    ROUTED = 10
    LOGITS = 11
    FINAL = 12
    KEPT = 13


class Element(IntEnum):
    """The type of an operand's elements: float32, int64 or one byte of 0 and 1."""

    FLOAT = 0
    INTEGER = 1
    BOOLEAN = 2

    @property
    def bytes(self) -> int:
        return (4, 8, 1)[self]


class Code(IntEnum):
    """The operation of an instruction."""

    COPY = 0
    NEGATE = 1
    EXP = 2
    LOG = 3
    LOG1P = 4
    SIGMOID = 5
    SILU = 6
    TANH = 7
    RELU = 8
    RSQRT = 9
    SQRT = 10
    RECIPROCAL = 11
    COS = 12
    SIN = 13
    ABS = 14
    SOFTPLUS = 15
    GELU = 16
    GELU_TANH = 17
    ERF = 18
    FLOOR = 19
    NOT = 20
    ADD = 21
    SUBTRACT = 22
    MULTIPLY = 23
    DIVIDE = 24
    POWER = 25
    MAXIMUM = 26
    MINIMUM = 27
    EQUAL = 28
    UNEQUAL = 29
    LESS = 30
    LESS_EQUAL = 31
    AND = 32
    OR = 33
    WHERE = 34
    SUM = 35
    LARGEST = 36
    SMALLEST = 37
    CUMULATE = 38
    TOP = 39
    GATHER = 40
    SCATTER = 41
    SCATTER_ADD = 42
    MATMUL = 43
    QUANTISE = 44
    SORT_CHOICE = 45
    XOR = 46
    REMAINDER = 47
    SINKHORN = 48
    NORM = 49
    SOFTMAX = 50
    ROTATE = 51


class Kind(IntEnum):
    """The content of a stage: instructions row by row, products of all rows, one attention, one
    recurrent layer, the choice of one indexer, or rows times matrices that they choose."""

    ROWS = 0
    PRODUCTS = 1
    ATTENTION = 2
    RECURRENCE = 3
    INDEXER = 4
    SELECTION = 5


class PlaceRecord(Record, struct="program::Place"):
    _fields_ = (*sizes("base", "pitch", "offset"), *numbers("space", "element"))


class OperandRecord(Record, struct="program::Operand"):
    _fields_ = (("place", PlaceRecord), ("strides", SIZE * DIMS))


class InstructionRecord(Record, struct="program::Instruction"):
    _fields_ = (
        *((name, OperandRecord) for name in ("out", "a", "b", "c")),
        ("sizes", SIZE * DIMS),
        *sizes("count", "every"),
        *floats("number"),
        *numbers("code", "dims"),
    )


class ProjectedRecord(Record, struct="program::Projected"):
    _fields_ = (
        ("matrix", MatrixRecord),
        *((name, PlaceRecord) for name in ("from", "codes", "out")),
        *sizes("multiple", "group"),
    )


class SelectedRecord(Record, struct="program::Selected"):
    _fields_ = (
        *pointers("matrices"),
        *((name, PlaceRecord) for name in ("from", "ids", "out")),
        *sizes("multiple", "rows", "columns"),
    )


class AttendedRecord(Record, struct="program::Attended"):
    _fields_ = (
        ("layer", DecoderLayerRecord),
        *((name, PlaceRecord) for name in ("q", "k", "v", "out")),
        *((name, PlaceRecord) for name in ("chosen", "sinks", "bias", "entry")),
        *sizes("most", "reach", "pool", "entries", "rate"),
    )


class IndexerRecord(Record, struct="decode::Indexer"):
    _fields_ = (
        *sizes("cache", "heads", "size", "top_k", "rate", "pool", "stride"),
        *pointers("bias"),
        ("norm", NormRecord),
        ("rotation", RotationRecord),
    )


class IndexedRecord(Record, struct="program::Indexed"):
    _fields_ = (
        ("indexer", IndexerRecord),
        *((name, PlaceRecord) for name in ("q", "weights", "key", "chosen")),
        *sizes("most"),
    )


RECURRENT_KINDS = (GatedCallRecord, ScanCallRecord, ConvolutionCallRecord)
"""In the order of program::Recurrence."""


class RecurredRecord(Record, struct="program::Recurred"):
    _fields_ = (
        *pointers("call"),
        ("rows", PlaceRecord * 5),
        *((name, PlaceRecord) for name in ("before", "after", "out")),
        *numbers("kind", "inputs", "together"),
    )


class StageRecord(Record, struct="program::Stage"):
    _fields_ = (*sizes("begin", "end"), *numbers("kind", "in_order"))


class ProgramRecord(Record, struct="program::Program"):
    _fields_ = (
        *pointers("instructions", "products", "attention", "recurrent", "indexers"),
        *pointers("selections", "stages", "segments"),
        *sizes("count", "row_bytes", "kept_bytes", "logit_bytes", "tail", "work"),
    )


class StatesRecord(Record, struct="program::States"):
    _fields_ = (
        *pointers("before", "after", "to_kept", "tokens", "sequence"),
        *sizes("sequences"),
        *pointers("memory", "kept"),
        *sizes("chunk"),
    )


def code_row_bytes(width: int, group: int) -> int:
    """Bytes of a row of ``width`` quantised to codes: as ``row_stride`` of kernels/cpu/rows.h."""
    groups = -(-width // group)
    return (groups * (group + 8) + 63) // 64 * 64 + 64


def array(kind: type[ctypes.Structure], records: list[ctypes.Structure]) -> ctypes.Array:
    """The records side by side, for C++."""
    return (kind * len(records))(*records)
