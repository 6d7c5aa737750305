"""Tables in terminals, files and pipes."""

from __future__ import annotations

import pytest
from rich.table import Table

from moe.commands.console import stdout_console

CELLS = [f"{12345678 + 111 * place}" for place in range(30)]


def shown() -> list[str]:
    table = Table(*CELLS)
    table.add_row(*CELLS)
    stdout_console().print(table)
    return CELLS


def test_no_figure_is_cut_off_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    cells, out = shown(), capsys.readouterr().out
    assert all(out.count(cell) == 2 for cell in cells)


def test_columns_are_obeyed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    shown()
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70
