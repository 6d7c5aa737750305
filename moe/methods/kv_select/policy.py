"""`Select`: the rule of Quest."""

from __future__ import annotations

from typing import ClassVar

from kernels.cpu.kv import BLOCK
from moe.kv.visibility import RowVisibility, SeenRow


class Select(RowVisibility):
    """Each key head sees the first block, the last ones, and those between that promise most."""

    name: ClassVar[str] = "select"
    bounds: ClassVar[bool] = True

    def row(self, prompt: int, position: int) -> SeenRow:
        most = self.tokens // BLOCK
        return SeenRow(None, position // BLOCK + 1, most, most // 2)
