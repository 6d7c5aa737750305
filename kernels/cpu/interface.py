"""The C interface of the compiled kernels: the records and functions that ctypes calls.

Every structure that Python shares with C++ is a `Record` that names its C++ struct.
`check_layouts` compares the fields of all of them (name, order, offset, size and kind) with the
layout that the compiler gave each struct (kernels/cpu/layouts.h), so that a field added on one
side only is an error when the library is loaded, and never overwrites memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from kernels.reference import AnyExperts, id_error

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POINTER, SIZE, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_NO_MEMORY = "no memory for the scratch rows of this call; use fewer tokens at once"
Signatures = Mapping[str, tuple[object, tuple[object, ...]]]
"""Result and argument types of C functions, by name."""


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Tell ctypes the result and argument types of functions."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def integers(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """64-bit integers for C++; on a hot path, a numpy array and its address take longer."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def check_done(result: int, experts: AnyExperts | None = None) -> None:
    """Raise what a C++ function's result says: MemoryError for 0, it found no memory for scratch
    rows; where it reads the ids of ``experts``, ValueError for a negative result, a bad id."""
    if result < 0 and experts is not None:
        raise id_error(experts)
    if not result:
        raise MemoryError(_NO_MEMORY)


class LayoutError(AssertionError):
    """A `Record` and its C++ struct differ; the message names the struct, the field and both."""


class Record(ctypes.Structure):
    """Base of the structures that C++ reads or writes: ``class ARecord(Record, struct="ns::A")``.

    Attributes:
        by_struct: every subclass, by the name of its C++ struct.
    """

    by_struct: ClassVar[dict[str, type[Record]]] = {}

    def __init_subclass__(cls, *, struct: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Record.by_struct[struct] = cls


Fields = tuple[tuple[str, Any], ...]


def pointers(*names: str) -> Fields:
    return tuple((name, POINTER) for name in names)


def sizes(*names: str) -> Fields:
    """int64_t fields."""
    return tuple((name, SIZE) for name in names)


def numbers(*names: str) -> Fields:
    """int32_t fields."""
    return tuple((name, NUMBER) for name in names)


def floats(*names: str) -> Fields:
    return tuple((name, ctypes.c_float) for name in names)


def doubles(*names: str) -> Fields:
    return tuple((name, ctypes.c_double) for name in names)


class Field(NamedTuple):
    """The place of a field, in bytes. Its kind is "p" for a pointer, "f" for a floating-point
    number, "i" for an integer, "r" for a record or an array."""

    name: str
    offset: int
    size: int
    kind: str

    def __str__(self) -> str:
        return f"'{self.name}' (offset {self.offset}, {self.size} bytes, kind {self.kind})"


class Layout(NamedTuple):
    """A struct's size in bytes and its fields in order."""

    size: int
    fields: list[Field]


def compiled_layouts(library: ctypes.CDLL) -> dict[str, Layout]:
    """The layout of each struct that the library shares with Python, by its name."""
    library.moe_layouts.restype = ctypes.c_char_p
    layouts = {}
    for line in library.moe_layouts().decode().splitlines():
        struct, size, *fields = line.split()
        parts = (field.split(":") for field in fields)
        own = [Field(name, int(offset), int(length), kind) for name, offset, length, kind in parts]
        layouts[struct] = Layout(int(size), own)
    return layouts


def record_layout(record: type[Record]) -> Layout:
    """The layout that ctypes gives a record."""
    fields = []
    for name, kind, *_ in record._fields_:
        place = getattr(record, name)
        code = getattr(kind, "_type_", None)  # a letter for numbers and pointers only
        letter = {"P": "p", "f": "f", "d": "f"}.get(code, "i") if isinstance(code, str) else "r"
        fields.append(Field(name, place.offset, place.size, letter))
    return Layout(ctypes.sizeof(record), fields)


def check_layouts(layouts: Mapping[str, Layout]) -> None:
    """Raise LayoutError unless each struct has one record, of the very same layout."""
    if unmatched := layouts.keys() ^ Record.by_struct.keys():
        raise LayoutError(f"only one of C++ and Python has {', '.join(sorted(unmatched))}")
    for struct, layout in layouts.items():
        record = Record.by_struct[struct]
        own = record_layout(record)
        for theirs, ours in zip(layout.fields, own.fields, strict=False):
            if theirs != ours:
                raise LayoutError(f"{struct} has field {theirs}, {record.__name__} has {ours}")
        if layout != own:
            raise LayoutError(
                f"{struct} has {len(layout.fields)} fields in {layout.size} bytes, "
                f"{record.__name__} has {len(own.fields)} in {own.size}"
            )
