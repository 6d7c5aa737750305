"""Helper processes, for what may cost too much or was made by strangers: `Helpers`.

Chat templates, structures and images are programs and files of others. Each is worked on in a
process with limits (`moe.helper_process`) and without this one's environment. What ends such a
process tells who is to blame: a request whose work reaches a limit is refused (`HelperLimitError`).
Where the system starts no process, or kills or stops one, the work is tried once more, and then
the request may be sent again (`BusyError`).
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from moe.errors import BusyError
from moe.fair_pool import without_interpreter
from moe.helper_process import ANSWER, OUT_OF_MEMORY, REQUEST

WALL_SECONDS = 30.0
"""For a busy machine: limits are of processor time."""
_PASSED_ON = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ")
_OTHERS_DO = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_CHUNK = 2**20
_PROCESS = Path(__file__).with_name("helper_process.py")


class HelperLimitError(Exception):
    """The work needs more than it is given; the message says of what."""


class _LostError(Exception):
    """The machine has ended or stopped a process; the message says which."""


class Helpers:
    """Processes of one program, started on demand; threads may share one object.

    Args:
        program: see `moe.helper_process`.
        memory: most bytes of each.
        seconds: of a processor for a request.
        most_bytes: of an answer.
        kept: how many idle processes are kept; 0: each answers one request.
        at_once: most processes that work at a time; None: any number.
    """

    def __init__(
        self,
        program: Path,
        *,
        memory: int,
        seconds: int,
        most_bytes: int,
        kept: int = 0,
        at_once: int | None = None,
    ) -> None:
        self._program, self._memory, self._seconds = program, memory, seconds
        self._most_bytes, self._kept = most_bytes, kept
        self._turns = nullcontext() if at_once is None else threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        atexit.register(self.close)

    def ask(self, request: bytes, memory: int | None = None) -> bytes:
        """The answer to a request.

        Args:
            memory: most bytes, where no processes are kept; None: as always.

        Raises:
            HelperLimitError: it takes more than it may.
            BusyError: the machine has no process for it, or has ended or stopped two.
        """
        with without_interpreter(), self._turns:
            try:
                return self._try(request, memory)
            except _LostError:
                with suppress(_LostError):
                    return self._try(request, memory)
        raise BusyError("this machine ended a process that the request needs; try again later")

    def start(self) -> None:
        """Start a process if none is idle; returns before it is ready, which takes a second."""
        with suppress(BusyError):
            self._give_back(self._take(self._memory))

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.end()

    def _try(self, request: bytes, memory: int | None) -> bytes:
        helper = self._take(memory or self._memory)
        try:
            answer = helper.ask(request, self._seconds, self._most_bytes)
        except BaseException:
            helper.end()
            raise
        self._give_back(helper)
        return answer

    def _take(self, memory: int) -> _Helper:
        with self._lock:
            while self._idle:
                helper = self._idle.pop()
                if helper.is_fit:
                    return helper
                helper.end()
        return _Helper(self._program, memory)

    def _give_back(self, helper: _Helper) -> None:
        with self._lock:
            if len(self._idle) < self._kept:
                self._idle.append(helper)
                return
        helper.end()


class _Helper:
    """One process. Raises `BusyError` if the system starts none."""

    def __init__(self, program: Path, memory: int) -> None:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._memory = memory
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROCESS), str(program), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # a Ctrl-C at the terminal is not for it
            )
        except OSError as error:
            raise BusyError(
                f"this machine starts no more processes now ({error.strerror}); try again later"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    @property
    def is_fit(self) -> bool:
        """It runs, and nobody has stopped it."""
        if self._process.poll() is not None:
            return False
        with suppress(OSError):
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] not in "Tt"
        return True

    def ask(self, request: bytes, seconds: int, most_bytes: int) -> bytes:
        """Raises `HelperLimitError`, and `_LostError` or `BusyError` if the machine is to blame."""
        end = time.monotonic() + WALL_SECONDS
        left = memoryview(REQUEST.pack(len(request), seconds) + request)
        answer, size = bytearray(), ANSWER.size
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        poll.register(self._stdin, select.POLLOUT)
        while len(answer) < size:
            wait_s = end - time.monotonic()
            ready = poll.poll(wait_s * 1000) if wait_s > 0 else []
            if not ready:
                waited = f"{WALL_SECONDS:g} s"
                raise BusyError(f"this machine was too busy to answer within {waited}; try later")
            files = {file for file, _ in ready}
            if left and self._stdin.fileno() in files:
                left = left[self._write(left) :]
                if not left:
                    poll.unregister(self._stdin)
            if self._stdout.fileno() in files:
                part = os.read(self._stdout.fileno(), _CHUNK)
                if not part:
                    raise self._why_it_ended(seconds)
                answer += part
                if size == ANSWER.size <= len(answer):
                    size += ANSWER.unpack_from(answer)[0]
                    if size > ANSWER.size + most_bytes:
                        raise HelperLimitError(f"makes more than {most_bytes} bytes")
        return bytes(answer[ANSWER.size :])

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._stdin.fileno(), data[:_CHUNK])
        except BrokenPipeError:  # its end shows why
            return len(data)

    def _why_it_ended(self, seconds: int) -> Exception:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return HelperLimitError(f"takes more than {seconds} s of a processor")
        if code == OUT_OF_MEMORY:
            return HelperLimitError(f"takes more than {self._memory >> 20} MiB of memory")
        if code >= 0 or -code in _OTHERS_DO:
            return _LostError(f"ended with exit code {code}")
        return HelperLimitError(f"ended the process that works on it (signal {-code})")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout):
            with suppress(OSError):  # what was not flushed
                stream.close()
