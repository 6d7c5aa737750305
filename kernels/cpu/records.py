"""The ctypes structures that Python shares with C++, checked against the compiler's layout.

Every one is a `Record` that names its C++ struct. `check_layouts` compares name, order, offset, size
and kind of all fields with what `moe_layouts` of the library lists (kernels/cpu/layouts.h), so that a
field added on one side only is an error when the library is loaded, not memory overwritten later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple


class LayoutError(AssertionError):
    """A `Record` and its C++ struct differ; the message names struct, field and both layouts."""


class Record(ctypes.Structure):
    """Base of all structures that C++ reads or writes: ``class XRecord(Record, struct="ns::X")``."""

    by_struct: ClassVar[dict[str, type[Record]]] = {}

    def __init_subclass__(cls, *, struct: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Record.by_struct[struct] = cls


class FieldLayout(NamedTuple):
    """Where a field lies, in bytes; kind "p" is a pointer, "f" a floating-point number, "i" an
    integer, "r" a record or an array."""

    name: str
    offset: int
    size: int
    kind: str

    def __str__(self) -> str:
        return f"'{self.name}' (offset {self.offset}, {self.size} bytes, kind {self.kind})"


def check_layouts(library: ctypes.CDLL) -> None:
    """Raise LayoutError unless all records have the layout of the library's structs."""
    library.moe_layouts.restype = ctypes.c_char_p
    compiled = {}
    for line in library.moe_layouts().decode().splitlines():
        struct, size, *fields = line.split()
        parts = (field.split(":") for field in fields)
        layout = [FieldLayout(name, int(at), int(length), kind) for name, at, length, kind in parts]
        compiled[struct] = int(size), layout
    compare_layouts(compiled, Record.by_struct)


def compare_layouts(
    compiled: Mapping[str, tuple[int, Sequence[FieldLayout]]], records: Mapping[str, type[Record]]
) -> None:
    """Raise LayoutError unless each struct, of a size and fields, has a record like it."""
    if alone := compiled.keys() ^ records.keys():
        raise LayoutError(f"only one of C++ and Python knows {', '.join(sorted(alone))}")
    for struct, (size, expected) in compiled.items():
        record = records[struct]
        found = [_field_layout(record, name, kind) for name, kind, *_ in record._fields_]
        for theirs, ours in zip(expected, found, strict=False):
            if theirs != ours:
                raise LayoutError(
                    f"struct {struct} has field {theirs} where {record.__qualname__} has {ours}"
                )
        if len(expected) != len(found) or size != ctypes.sizeof(record):
            raise LayoutError(
                f"struct {struct} has {len(expected)} fields and {size} bytes, "
                f"{record.__qualname__} has {len(found)} and {ctypes.sizeof(record)}"
            )


def _field_layout(record: type[Record], name: str, kind: Any) -> FieldLayout:
    place = getattr(record, name)
    code = getattr(kind, "_type_", None)  # a type for arrays, no attribute of structures
    letter = {"P": "p", "f": "f", "d": "f"}.get(code, "i") if isinstance(code, str) else "r"
    return FieldLayout(name, place.offset, place.size, letter)
