"""Servers under test, each a process of its own on a free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import httpx

from benchmarks.load_generator import Endpoint

ROOT = Path(__file__).parents[1]
LOADING_S = 600


class Surroundings(Protocol):
    """Something that a command can run in."""

    def command(self, command: Sequence[str]) -> list[str]: ...


class ServerError(RuntimeError):
    """A server did not come up; with the end of what it said."""


class Server:
    """A running server process and where it answers.

    Args:
        log: what it says.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], endpoint: Endpoint, log: IO[bytes]
    ) -> None:
        self.process = process
        self.endpoint = endpoint
        self._log = log

    def said(self) -> str:
        """Return its log so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def cpu_seconds(self) -> float:
        """Processor time it has taken so far, which a busy machine lengthens less than waiting."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes no processor time meanwhile, whatever it does when it has nothing to do."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def moe_serve(
    model: Path,
    *settings: str,
    within: Surroundings | None = None,
    descriptors: int | None = None,
) -> Iterator[Server]:
    """``moe serve`` of this tree; each setting is a ``key=value`` of the profile.

    Args:
        within: makes the command of what is to run there.
        descriptors: most that the server may have open; None: as many as this process.
    """
    port = _free_port()
    command = [sys.executable, "-m", "moe", "serve", str(model), "--port", str(port)]
    for setting in settings:
        command += ["--set", setting]
    endpoint = Endpoint(f"http://127.0.0.1:{port}", model.resolve().name)
    command = command if within is None else within.command(command)
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]
    with _running(command, endpoint, "/ready") as server:
        yield server


@contextmanager
def transformers_serve(model: Path, max_batch_tokens: int, kv_tokens: int) -> Iterator[Server]:
    """``transformers serve`` with continuous batching on the CPU.

    Its own default for the memory of keys and values is 60 % of the machine's, so it gets a number.
    """
    port = _free_port()
    page = 32
    command = [
        *(str(Path(sys.executable).with_name("transformers")), "serve", str(model)),
        *("--continuous-batching", "--device", "cpu", "--dtype", "float32"),
        *("--attn-implementation", "sdpa", "--cb-block-size", str(page)),
        *("--cb-num-blocks", str(kv_tokens // page)),
        *("--cb-max-batch-tokens", str(max_batch_tokens), "--port", str(port)),
    ]
    with _running(command, Endpoint(f"http://127.0.0.1:{port}", str(model)), "/health") as server:
        yield server


@contextmanager
def _running(command: Sequence[str], endpoint: Endpoint, ready: str) -> Iterator[Server]:
    # Otherwise SIGTERM would end the benchmark and leave its servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            server = Server(process, endpoint, log)
            if not _wait(process, endpoint.url + ready):
                said = server.said()[-2000:]
                raise ServerError(f"{' '.join(command)} did not get ready; it said: {said}")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> bool:
    """Return whether the server says that it is ready before it ends or the time is over."""
    deadline = time.monotonic() + LOADING_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
