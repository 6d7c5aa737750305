"""The interpreter's turns while a server runs, and no longer."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe.server import serve
from moe.server.interpreter import SWITCH_S


def test_c11_threads_change_places_soon_and_collections_leave_out_what_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else the check of one large body delays the engine's thread behind each of its kernels."""
    queue = SimpleNamespace(model=SimpleNamespace(notices=[]))
    seen: list[float] = []

    async def run(ready: Callable[[], None]) -> int:
        before = gc.get_freeze_count()
        ready()
        seen.extend((sys.getswitchinterval(), gc.get_freeze_count() - before))
        return 3

    service = SimpleNamespace(keys=None, queue=queue, model_names=["m"], address="here", run=run)
    interval = sys.getswitchinterval()
    assert asyncio.run(serve._run(cast(Any, service))) == 3
    assert seen[0] == pytest.approx(SWITCH_S)
    assert seen[0] <= 0.001
    assert seen[1] > 10_000, "objects of the modules at least"
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (interval, 0)
    assert "serving m at here" in capsys.readouterr().out
