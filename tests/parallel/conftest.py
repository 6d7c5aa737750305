"""Launches of several ranks as processes, whatever becomes of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("rank.py")
PATIENCE_S = 240
"""For what has no bound of its own: a shared machine starts processes slowly."""


class Launched:
    """Ranks as processes; their output is in files."""

    def __init__(self, folder: Path, argv: Sequence[str], environs: list[dict[str, str]]) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, environ in enumerate(environs):
            with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as e:
                self.processes.append(
                    subprocess.Popen([*argv], env=environ, stdout=out, stderr=e, cwd=folder)
                )

    def out(self, rank: int = 0) -> str:
        return (self.folder / f"out{rank}").read_text()

    def errors(self, rank: int = 0) -> str:
        return (self.folder / f"err{rank}").read_text()

    def everything(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()}" for file in self.folder.iterdir())

    def wait_for(self, text: str, rank: int = 0) -> str:
        """The line of a rank's output that has this text in it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for line in self.out(rank).splitlines():
                if text in line:
                    return line
            if self.processes[rank].poll() is not None:
                break
            time.sleep(0.05)
        pytest.fail(f"rank {rank} did not say {text!r}:\n{self.everything()}")

    def codes(self, timeout_s: float = PATIENCE_S) -> list[int]:
        """Exit codes of all, once all have ended."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running after {timeout_s} s:\n{self.everything()}")
        return [process.returncode for process in self.processes]

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


Launch = Callable[..., AbstractContextManager[Launched]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Starts so many ranks of a command line of ``moe``, or of a script."""

    @contextmanager
    def start(
        ranks: int, argv: Sequence[str], fault: Any = None, of: int | None = None, **own: Any
    ) -> Iterator[Launched]:
        common = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(own.get("port") or free_port()),
            "WORLD_SIZE": str(of or ranks),
            "LOCAL_SIZE": str(of or ranks),
        }
        if fault:
            common["TEST_FAULT"] = json.dumps(fault)
        environs = [
            common | {"RANK": str(r), "LOCAL_RANK": str(r)} | own.get("environs", {}).get(r, {})
            for r in range(ranks)
        ]
        folder = tmp_path / f"launch{len(list(tmp_path.glob('launch*')))}"
        folder.mkdir()
        launched = Launched(folder, [sys.executable, str(RANK), *map(str, argv)], environs)
        try:
            yield launched
        finally:
            launched.end()

    return start
