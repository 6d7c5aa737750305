"""Experts that come from disk, by the compiled library: background reads, and layers run meanwhile.

`NativeReads` is a pool of threads that serves `ReadJob`s, urgent ones first, without Python's lock
(kernels/cpu/reading.cpp). `ArrivingCall` runs a layer's experts as their reads end
(kernels/cpu/arriving.cpp).

Shape legend as in kernels/reference.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, get_num_threads

from kernels.cpu.experts import LayerCall
from kernels.cpu.interface import (
    NUMBER,
    POINTER,
    SIZE,
    Record,
    check_done,
    declare,
    doubles,
    integers,
    numbers,
    pointers,
    sizes,
)
from kernels.reference import AnyExperts

TRUNCATED, CHANGED, CLOSED, CANCELLED = -1, -2, -3, -4
"""Errors of a read, besides the positive errno values."""

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


class ReadJob(Record, struct="files::Job"):
    """One read of several pieces, queued in `NativeReads`.

    Attributes:
        failed: index of the piece that failed.
        error: 0, an errno, or one of the errors above.
        refused: a file opened with O_DIRECT did not read with it.
        done: no thread touches the job's memory any more.
    """

    _fields_ = (
        *pointers("piece"),
        *sizes("waiting", "taken", "failed"),
        *numbers("urgent", "reading", "error", "refused", "done"),
    )

    def __init__(self, pieces: int, numbers: Sequence[int], urgent: bool) -> None:
        """Make a job of ``pieces`` pieces.

        Args:
            numbers: of each piece: file descriptor; the same opened with O_DIRECT, or -1; offset;
                bytes; size of the file, or -1 to skip the check for changes; mtime in ns; number of
                views; then address and bytes of each view.
        """
        self._numbers = integers(numbers)
        super().__init__(ctypes.addressof(self._numbers), pieces, urgent=urgent)


class NativeReads:
    """A pool of reading threads, empty until `start`.

    Attributes:
        reader: address of the C++ reader.

    Args:
        most: bytes in flight from which on no further read begins.
    """

    def __init__(self, library: ctypes.CDLL, most: int) -> None:
        declare(library, _SIGNATURES)
        self._waiting = library.moe_read_wait, library.moe_reader_close
        # Calls that never wait keep Python's lock: releasing it would take longer.
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        declare(quick, _SIGNATURES)
        self._quick, self.reader = quick, library.moe_reader(most)

    def start(self, threads: int) -> None:
        """Start threads, in addition to those that run."""
        self._quick.moe_reader_start(self.reader, threads)

    def begin(self, job: ReadJob) -> None:
        """Queue a job, which the caller keeps until it is done; urgent jobs go first."""
        self._quick.moe_read(self.reader, ctypes.addressof(job))

    def wait(self, job: ReadJob, seconds: float) -> bool:
        """Wait up to ``seconds``; returns whether the job is done."""
        return bool(self._waiting[0](self.reader, ctypes.addressof(job), seconds))

    def cancel(self, job: ReadJob) -> bool:
        """Cancel a job that has not begun; returns whether that was so."""
        return bool(self._quick.moe_read_cancel(self.reader, ctypes.addressof(job)))

    def hasten(self, job: ReadJob) -> None:
        """Make a queued job urgent."""
        self._quick.moe_read_hasten(self.reader, ctypes.addressof(job))

    @property
    def throughput(self) -> float:
        """Recent bytes per second of busy time; 0 before the first read."""
        return float(self._quick.moe_read_throughput(self.reader))

    def close(self, seconds: float) -> bool:
        """Fail queued jobs, and wait up to ``seconds``; returns whether all threads ended."""
        return bool(self._waiting[1](self.reader, seconds))


_DONE, _FAILED, _LATER = 1, 2, 3


class _ArrivingCallRecord(Record, struct="ArrivingCall"):
    _fields_ = (
        *pointers("forward", "layer", "activation", "hidden", "ids", "weights", "out"),
        *sizes("tokens", "slots", "width"),
        *pointers("coming"),
        *sizes("count"),
        *pointers("reader"),
        *doubles("patience", "waited"),
        *sizes("begun", "calls"),
        *numbers("threads"),
    )


class LayerBuffers(NamedTuple):
    """Addresses and sizes of a layer's arguments: float32 rows, int64 ids, float32 weights, and
    ``out`` ``(T, H)`` float32, which the call fills. ``kept`` keeps the tensors alive."""

    hidden_TH: int
    ids_TK: int
    weights_TK: int
    out_TH: int
    tokens: int
    slots: int
    width: int
    kept: object

    @classmethod
    def of(
        cls, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, out_TH: Tensor
    ) -> LayerBuffers:
        hidden_TH, ids_TK, weights_TK = (x.contiguous() for x in (hidden_TH, ids_TK, weights_TK))
        return cls(
            hidden_TH.data_ptr(),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            out_TH.data_ptr(),
            tokens=ids_TK.shape[0],
            slots=ids_TK.shape[1],
            width=hidden_TH.shape[1],
            kept=(hidden_TH, ids_TK, weights_TK, out_TH),
        )


class ArrivingCall:
    """One call of a layer whose experts may still be on their way from disk.

    Args:
        how: how compiled callers run ``experts``.
        coming: ``(expert, slot, job)`` of all experts among the ids, ascending: the slot is its
            index among ``experts``; the job reads it, None if it is in memory.
        reads: serves the jobs.
        patience: seconds that `run` waits for one expert.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        how: LayerCall,
        experts: AnyExperts,
        rows: LayerBuffers,
        coming: Sequence[tuple[int, int, ReadJob | None]],
        reads: NativeReads | None,
        patience: float,
    ) -> None:
        numbers: list[int] = []
        for expert, slot, job in coming:
            numbers += (expert, slot, 0 if job is None else ctypes.addressof(job))
        told = integers(numbers)
        self._kept: Any = how.kept, rows.kept, coming, told
        declare(library, {"moe_forward_arriving": (NUMBER, (POINTER,))})
        self._experts, self._call = experts, library.moe_forward_arriving
        self._record = _ArrivingCallRecord(
            *(how.forward, how.layer, how.activation),
            *rows[:-1],
            *(ctypes.addressof(told), len(coming), None if reads is None else reads.reader),
            *(patience, 0.0, 0, 0, get_num_threads()),
        )

    def run(self) -> int | None:
        """Run the experts in order; returns None when all have run and ``out`` is filled.

        Otherwise returns the index in ``coming`` of the expert that failed or is late. Call again
        once it is in memory: the call continues with that expert.
        """
        said = self._call(ctypes.addressof(self._record))
        if said in (_FAILED, _LATER):
            return int(self._record.begun)
        check_done(said, self._experts)
        return None

    @property
    def waited(self) -> float:
        """Seconds spent waiting for reads so far."""
        return float(self._record.waited)

    @property
    def calls(self) -> int:
        """C++ calls so far, each for the experts that were in memory together."""
        return int(self._record.calls)
