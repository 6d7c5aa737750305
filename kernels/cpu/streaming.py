"""Files read in the background by a compiled library (see reading.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, get_num_threads

from kernels.cpu.experts import LayerCall
from kernels.cpu.interface import NUMBER, POINTER, SIZE, check_done, declare, integers
from kernels.cpu.records import Record
from kernels.reference import AnyExperts

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


class ReadJob(Record, struct="files::Job"):
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


# ---- A layer whose experts come while it is computed, by a compiled library (see arriving.cpp).
#
# Shape legend as in kernels/reference.py.

_DONE, _FAILED, _LATER = 1, 2, 3


class _ArrivingCallRecord(Record, struct="ArrivingCall"):
    _fields_ = (
        *((name, POINTER) for name in ("forward", "layer", "activation")),
        *((name, POINTER) for name in ("hidden", "ids", "weights", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "slots", "width")),
        ("coming", POINTER),
        ("count", ctypes.c_int64),
        ("reader", POINTER),
        *((name, ctypes.c_double) for name in ("patience", "waited")),
        *((name, ctypes.c_int64) for name in ("begun", "waves")),
        ("threads", NUMBER),
    )


class LayerBuffers(NamedTuple):
    """Addresses and sizes of what a layer is called with: float32, int64, float32; ``out`` is
    ``(T, H)`` float32, to be filled."""

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
    """One call of a layer, which fills the rows' ``out`` if it comes to the end.

    Args:
        how: what runs the layer, of ``experts``.
        coming: all experts of the ids, ascending, with their slots among ``experts``, and what
            brings them where they are not there yet.
        reads: whoever serves these.
        patience: seconds that `run` waits for one of them.
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
        self._experts, self._call = experts, library.moe_forward_arriving
        self._record = _ArrivingCallRecord(
            *(how.forward, how.layer, how.activation),
            *rows[:-1],
            *(ctypes.addressof(told), len(coming), None if reads is None else reads.reader),
            *(patience, 0.0, 0, 0, get_num_threads()),
        )

    def run(self) -> int | None:
        """Compute; None at the end, else which of the experts has failed or is late. When it has
        come, this goes on from there."""
        said = self._call(ctypes.addressof(self._record))
        if said in (_FAILED, _LATER):
            return int(self._record.begun)
        check_done(said, self._experts)
        return None

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return float(self._record.waited)

    @property
    def waves(self) -> int:
        """Runs of experts that were there together."""
        return int(self._record.waves)


def declare_arriving(library: ctypes.CDLL) -> None:
    """Tell ctypes of the function."""
    declare(library, {"moe_forward_arriving": (NUMBER, (POINTER,))})
