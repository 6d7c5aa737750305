"""Files read in the background by a compiled library (see reading.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kernels.cpu.calls import NUMBER, POINTER, SIZE, declare, integers

TRUNCATED, CHANGED, CLOSED, CANCELLED = -1, -2, -3, -4
"""Why a read failed, beside the system's own numbers."""

_SECONDS = ctypes.c_double
_SIGNATURES = {
    "moe_reader": (POINTER, (SIZE,)),
    "moe_reader_start": (None, (POINTER, NUMBER)),
    "moe_reader_close": (NUMBER, (POINTER, _SECONDS)),
    "moe_read": (None, (POINTER, POINTER)),
    "moe_read_wait": (NUMBER, (POINTER, POINTER, _SECONDS)),
    "moe_read_cancel": (NUMBER, (POINTER, POINTER)),
    "moe_read_hasten": (None, (POINTER, POINTER)),
    "moe_read_throughput": (_SECONDS, (POINTER,)),
}


class ReadJob(ctypes.Structure):
    """`Job` of reading.cpp.

    Attributes:
        failed: number of the piece that could not be read, where ``error`` says why.
        error: 0, the system's number, or one of the above.
        refused: a file that had taken O_DIRECT did not read with it.
        done: nobody touches its places any more.
    """

    _fields_ = (
        ("piece", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("waiting", "taken", "failed")),
        *((name, ctypes.c_int32) for name in ("urgent", "reading", "error", "refused", "done")),
    )

    def __init__(self, pieces: int, numbers: Sequence[int], urgent: bool) -> None:
        """Of so many pieces, each as file, the same with O_DIRECT or -1, offset, bytes, size of the
        file or -1, when it was changed in ns, how many views, and of each view address and bytes.
        """
        self._numbers = integers(numbers)
        super().__init__(ctypes.addressof(self._numbers), pieces, urgent=urgent)


class NativeReads:
    """Threads that read, as soon as they are started.

    Attributes:
        reader: its address.

    Args:
        most: bytes; once so many are being read, no more is begun.
    """

    def __init__(self, library: ctypes.CDLL, most: int) -> None:
        declare(library, _SIGNATURES)
        self._waiting = library.moe_read_wait, library.moe_reader_close
        # Those that never wait: letting others have Python's lock would take longer.
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        declare(quick, _SIGNATURES)
        self._quick, self.reader = quick, library.moe_reader(most)

    def start(self, threads: int) -> None:
        """So many, or so many more."""
        self._quick.moe_reader_start(self.reader, threads)

    def begin(self, job: ReadJob) -> None:
        """As soon as possible, urgent ones first; it is kept until it is done."""
        self._quick.moe_read(self.reader, ctypes.addressof(job))

    def wait(self, job: ReadJob, seconds: float) -> bool:
        """Whether it is done, after so long at most."""
        return bool(self._waiting[0](self.reader, ctypes.addressof(job), seconds))

    def cancel(self, job: ReadJob) -> bool:
        """Whether it had not begun, and now never will."""
        return bool(self._quick.moe_read_cancel(self.reader, ctypes.addressof(job)))

    def hasten(self, job: ReadJob) -> None:
        """From now on it is an urgent one."""
        self._quick.moe_read_hasten(self.reader, ctypes.addressof(job))

    @property
    def throughput(self) -> float:
        """Bytes a second while anything is read, of late; 0 before anything has been."""
        return float(self._quick.moe_read_throughput(self.reader))

    def close(self, seconds: float) -> bool:
        """What has not begun fails; whether all that had has ended, after so long at most."""
        return bool(self._waiting[1](self.reader, seconds))
