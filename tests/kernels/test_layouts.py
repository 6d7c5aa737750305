"""The ctypes records have the layout of their C++ structs, and a difference is found at load."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu import choose_kernel
from kernels.cpu.build import load_library
from kernels.cpu.decode import NormRecord
from kernels.cpu.interface import (
    LayoutError,
    Record,
    check_layouts,
    compiled_layouts,
    record_layout,
)

ROOT = Path(__file__).parents[2]
FIELDS = tuple((name, kind) for name, kind, *_ in NormRecord._fields_)
WEIGHT, BIAS, EPS, CENTERED = FIELDS


def test_every_struct_has_a_record_with_its_fields() -> None:
    layouts = compiled_layouts(load_library())
    assert layouts.keys() == Record.by_struct.keys()
    for struct, record in Record.by_struct.items():
        assert record_layout(record) == layouts[struct], struct
    assert [field.name for field in layouts["decode::Norm"].fields] == [name for name, _ in FIELDS]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            (BIAS, WEIGHT, EPS, CENTERED),
            r"decode::Norm has field 'weight' \(offset 0, .*\), Changed has 'bias' \(offset 0",
        ),
        (
            (WEIGHT, EPS, CENTERED),
            r"decode::Norm has field 'bias' \(offset 8, 8 .*\), Changed has 'eps' \(offset 8, 4",
        ),
        (
            (WEIGHT, BIAS, ("eps", ctypes.c_double), CENTERED),
            r"decode::Norm has field 'eps' \(offset 16, 4 .*\), Changed has 'eps' \(offset 16, 8",
        ),
        (
            (WEIGHT, BIAS, ("eps", ctypes.c_int32), CENTERED),
            r"decode::Norm has field 'eps' .* kind f\), Changed has 'eps' .* kind i\)",
        ),
        (
            (*FIELDS, ("more", ctypes.c_int64)),
            r"decode::Norm has 4 fields in 24 bytes, Changed has 5 in 32",
        ),
        ((WEIGHT, BIAS, EPS), r"decode::Norm has 4 fields in 24 bytes, Changed has 3 in 24"),
    ],
    ids=["order", "missing", "width", "kind", "added", "missing-in-padding"],
)
def test_a_changed_field_stops_the_loading(
    monkeypatch: pytest.MonkeyPatch, fields: tuple[tuple[str, Any], ...], message: str
) -> None:
    monkeypatch.setattr(Record, "by_struct", dict(Record.by_struct))

    class Changed(Record, struct="decode::Norm"):
        _fields_ = fields

    with pytest.raises(LayoutError, match=message):
        load_library()
    with pytest.raises(LayoutError):  # does not fall back to the reference
        choose_kernel.__wrapped__()


def test_a_record_without_a_struct_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = compiled_layouts(load_library())
    monkeypatch.setattr(Record, "by_struct", dict(Record.by_struct))

    class Alone(Record, struct="Alone"):
        _fields_ = FIELDS

    with pytest.raises(LayoutError, match="only one of C\\+\\+ and Python has Alone"):
        check_layouts(layouts)
    monkeypatch.delitem(Record.by_struct, "Alone")
    check_layouts(layouts)
    monkeypatch.delitem(Record.by_struct, "decode::Norm")
    with pytest.raises(LayoutError, match="has decode::Norm"):
        check_layouts(layouts)


def test_every_structure_of_the_product_is_a_record() -> None:
    ctypes_names = {"Structure", "Union", "BigEndianStructure", "LittleEndianStructure"}
    found = {
        f"{file.relative_to(ROOT)}:{node.name}"
        for room in ("kernels", "routing", "experts", "offload", "moe")
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).rpartition("ctypes.")[2] in ctypes_names for base in node.bases)
    }
    linux = "moe/helper_process.py:_Program"  # of the system's own: a filter of its calls
    assert found == {"kernels/cpu/interface.py:Record", linux}
