"""Python threads that read from two queues, the urgent one first.

A transfer waits in its queue as a whole and is read piece by piece, by as many threads as are free.
Prefetches occupy at most half of the threads, so an urgent read always finds one. No more threads
are awake than keep the disk busy, because they compete with the step loop for the CPU. And a
wake-up costs the step loop about as much as the rest of a request, so it wakes one thread only,
which wakes the next when it has taken a piece.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Lock, Thread

from offload.readers.direct_io import ReadBackend
from offload.readers.pieces import ReadPiece, cancelled, closed, cut, explain, timed_out
from offload.transfer import Read

THREADS = 4
"""They saturate the disks we measured, with requests of 128 KiB and more."""
PATIENCE_S = 60.0
"""A transfer that takes longer has failed."""
IN_FLIGHT_BYTES = 4 << 20
"""Once this much is being read, nothing more is begun: no disk we measured gained from it."""
REMEMBERED_S = 1.0
"""Seconds of reading after which what was read before counts half in the throughput."""


class ThreadedReader:
    """See `offload.transfer.Reader`.

    Args:
        name: how it reads, in words.
        make_backend: makes each thread's backend.
        on_close: called when the threads have ended.
        reason: why it was chosen.
        bytes_per_second: measured when it was chosen; 0 for unknown.
        threads: how many.
        patience_s: `ThreadedTransfer.wait` gives up after this long.
    """

    def __init__(
        self,
        name: str,
        make_backend: Callable[[], ReadBackend],
        on_close: Callable[[], object] = lambda: None,
        reason: str = "",
        bytes_per_second: float = 0.0,
        *,
        threads: int = THREADS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name, self.patience_s = name, patience_s
        self.reason, self.bytes_per_second = reason, bytes_per_second
        self._measured, self._on_close = Throughput(), on_close
        self._changed = Condition()
        self._urgent: deque[ThreadedTransfer] = deque()
        self._prefetch: deque[ThreadedTransfer] = deque()
        self._prefetching = 0  # threads that read a prefetch
        self._idle, self._woken = 0, False  # threads that wait for work; one of them is on its way
        self._closed = False
        self._threads = [
            Thread(target=self._serve, args=(make_backend(),), name=f"moe-read-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def throughput(self) -> float:
        return self._measured.bytes_per_second or self.bytes_per_second

    def submit(self, reads: Sequence[Read], *, urgent: bool, what: str = "") -> ThreadedTransfer:
        transfer = ThreadedTransfer(self, cut(reads), what, urgent)
        with self._changed:
            if self._closed:
                transfer.fail(closed(what))
            elif transfer.waiting:
                self._queue_of(transfer).append(transfer)
                self._wake()
            else:
                transfer.finish()
        return transfer

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for transfer in (*self._urgent, *self._prefetch):
                transfer.waiting.clear()
                transfer.fail(closed(transfer.what))
            self._urgent.clear()
            self._prefetch.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + self.patience_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._on_close()

    def cancel(self, transfer: ThreadedTransfer) -> bool:
        with self._changed:
            if transfer.begun or transfer.done:
                return False
            self._queue_of(transfer).remove(transfer)
            transfer.fail(cancelled(transfer.what))
            return True

    def hasten(self, transfer: ThreadedTransfer) -> None:
        with self._changed:
            queued, transfer.urgent = transfer in self._prefetch, True
            if queued:
                self._prefetch.remove(transfer)
                self._urgent.append(transfer)
                self._wake()

    def _serve(self, backend: ReadBackend) -> None:
        """A thread's loop."""
        with self._changed:
            taken = self._take()
        while taken is not None:
            transfer, piece, urgent = taken
            failure: Exception | None = None
            try:
                got = backend.read(piece.fd, piece.offset, piece.views, piece.status)
                piece.check_unchanged()
                if got < piece.nbytes:
                    raise piece.truncated()
            except Exception as error:  # if the thread died, its transfer would never end
                failure = explain(error, piece, transfer.what)
            with self._changed:
                self._prefetching -= not urgent
                transfer.reading -= 1
                self._measured.end(piece.nbytes)
                if failure is not None:  # do not read the rest
                    transfer.failed = transfer.failed or failure
                    if transfer.waiting:
                        self._queue_of(transfer).remove(transfer)
                        transfer.waiting.clear()
                if not transfer.waiting and not transfer.reading:
                    transfer.finish()
                taken = self._take()

    def _take(self) -> tuple[ThreadedTransfer, ReadPiece, bool] | None:
        """The next piece, with the lock held; None when the reader is closed."""
        while (queue := self._next_queue()) is None:
            if self._closed:
                return None
            self._idle += 1
            self._changed.wait()
            self._idle, self._woken = self._idle - 1, False
        transfer, urgent = queue[0], queue is self._urgent
        piece = transfer.waiting.popleft()
        if not transfer.waiting:
            queue.popleft()
        transfer.reading += 1
        transfer.begun = True
        self._measured.begin(piece.nbytes)
        self._prefetching += not urgent
        self._wake()
        return transfer, piece, urgent

    def _queue_of(self, transfer: ThreadedTransfer) -> deque[ThreadedTransfer]:
        """The queue that holds a transfer while pieces of it wait."""
        return self._urgent if transfer.urgent else self._prefetch

    def _next_queue(self) -> deque[ThreadedTransfer] | None:
        """The queue that a thread should serve now, if any."""
        if self._measured.in_flight >= IN_FLIGHT_BYTES:
            return None
        if self._urgent:
            return self._urgent
        room = self._prefetching < max(1, len(self._threads) // 2)
        return self._prefetch if room and self._prefetch else None

    def _wake(self) -> None:
        if self._idle and not self._woken and self._next_queue() is not None:
            self._woken = True
            self._changed.notify()


class ThreadedTransfer:
    """See `offload.transfer.Transfer`. Its fields change only under the reader's lock.

    Attributes:
        urgent: a layer waits for it.
        begun: some of it has been read, or is being read.
        waiting: pieces that no thread has taken yet.
        reading: how many pieces are being read.
    """

    def __init__(
        self, reader: ThreadedReader, pieces: Sequence[ReadPiece], what: str, urgent: bool
    ) -> None:
        self.what, self.urgent, self.done = what, urgent, False
        self.waiting = deque(pieces)
        self.reading, self.begun = 0, False
        self.failed: Exception | None = None
        self._reader = reader
        self._ended = Lock()  # held until then: an Event takes ten times as long
        self._ended.acquire()

    def fail(self, failure: Exception) -> None:
        self.failed = failure
        if not self.reading:
            self.finish()

    def finish(self) -> None:
        self.done = True
        self._ended.release()

    def wait(self) -> float:
        start = time.perf_counter()
        if not self.done:
            self.hasten()
            if not self._ended.acquire(timeout=self._reader.patience_s):
                raise timed_out(self.what, self._reader.patience_s)
            self._ended.release()
        if self.failed is not None:
            raise self.failed
        return time.perf_counter() - start

    def cancel(self) -> bool:
        return self._reader.cancel(self)

    def hasten(self) -> None:
        if not self.urgent:
            self._reader.hasten(self)


class Throughput:
    """Bytes in flight, and recent bytes per second of busy time; used under the reader's lock."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._since = self._busy_seconds = 0.0
        self._bytes = 0

    @property
    def bytes_per_second(self) -> float:
        """0 before the first read has ended."""
        return self._bytes / self._busy_seconds if self._bytes else 0.0

    def begin(self, nbytes: int) -> None:
        if self.in_flight == 0:
            self._since = time.perf_counter()
        self.in_flight += nbytes

    def end(self, nbytes: int) -> None:
        now = time.perf_counter()
        self.in_flight -= nbytes
        self._busy_seconds += now - self._since
        self._bytes += nbytes
        self._since = now
        if self._busy_seconds > 2 * REMEMBERED_S:
            self._busy_seconds, self._bytes = self._busy_seconds / 2, self._bytes // 2
