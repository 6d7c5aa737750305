"""Processes that tests start: the ``moe`` command or a script, as one rank or several."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RANK = Path(__file__).with_name("rank.py")
PATIENCE_S = 240
"""For what has no bound of its own: a shared machine starts processes slowly."""


class Nursery:
    """The program `rank.py`, which forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, RANK],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Process:
    """A rank, as `subprocess.Popen` would have it."""

    def __init__(self, nursery: Nursery, **how: Any) -> None:
        self._nursery, self.pid = nursery, int(nursery.ask(**how))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Launched:
    """Ranks as processes; their output is in files."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        argv: Sequence[object],
        environs: list[dict[str, str]],
    ) -> None:
        self.folder = folder
        for name, rank in product(("out", "err"), range(len(environs))):
            (folder / f"{name}{rank}").touch()  # which may be read before a process begins
        self.processes = [
            Process(nursery, folder=str(folder), argv=[*map(str, argv)], environ=environ)
            for environ in environs
        ]

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

    def codes(self, timeout_s: float = PATIENCE_S) -> list[int | None]:
        """Exit codes of all, once all have ended."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            if not process.wait(deadline - time.monotonic()):
                pytest.fail(f"still running after {timeout_s} s:\n{self.everything()}")
        return [process.returncode for process in self.processes]

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)


Launch = Callable[..., AbstractContextManager[Launched]]


# Below the ports that the system gives away by itself: nobody gets one before its user listens.
PORTS = count(10_000 + os.getpid() * 64 % 20_000)


def free_port() -> int:
    for port in PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
