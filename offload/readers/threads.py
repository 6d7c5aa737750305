"""Threads that serve two queues, the urgent one first.

A transfer waits in a queue as a whole and is read piece by piece, by as many threads as are free.
Prefetches get half of the threads at most: whoever waits for bytes always finds a thread. No more
threads are woken than keep a disk busy, one by the other: a wake-up costs the step loop about as
much time as the rest of asking, and awake they compete with it. So all that a layer asks for wakes
one thread, which wakes the next when it has taken something.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Condition, Thread

from offload.readers.direct_io import Way
from offload.readers.jobs import Job, Meter, Piece, cancelled, closed, cut, explain
from offload.transfer import Read

THREADS = 4
"""They fill the disks that were measured, with requests of 128 KiB and more."""
PATIENCE_S = 60.0
"""A transfer that takes longer has failed."""
IN_FLIGHT_BYTES = 4 << 20
"""Once so much is being read, nothing more is begun: no disk that was measured got faster by it."""


class ThreadedReader:
    """See `offload.transfer.Reader`.

    Args:
        name: what it is, in words.
        make_way: makes each thread's own way of reading.
        threads: how many.
        patience_s: `wait` gives up after this long.

    Attributes:
        reason: why it was chosen.
        bytes_per_second: what it read of the model's own files when it was tried; 0 before.
    """

    def __init__(
        self,
        name: str,
        make_way: Callable[[], Way],
        threads: int = THREADS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name, self.patience_s = name, patience_s
        self.reason, self.bytes_per_second = "", 0.0
        self._meter = Meter()
        self._closing = ExitStack()
        self._changed = Condition()
        self._urgent: deque[Job] = deque()
        self._prefetch: deque[Job] = deque()
        self._prefetching = 0
        self._idle, self._woken = 0, False  # threads that wait for work; one of them is on its way
        self._closed = False
        self._threads = [
            Thread(target=self._serve, args=(make_way(),), name=f"moe-read-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def throughput(self) -> float:
        """Bytes a second while anything is read, of late; as measured at the start before."""
        return self._meter.throughput or self.bytes_per_second

    def submit(self, reads: Sequence[Read], *, urgent: bool, what: str = "") -> Job:
        job = Job(self, cut(reads), what, urgent)
        with self._changed:
            if self._closed:
                job.fail(closed(what))
            elif job.waiting:
                self._queue_of(job).append(job)
                self._wake()
            else:
                job.finish()
        return job

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for job in (*self._urgent, *self._prefetch):
                job.waiting.clear()
                job.fail(closed(job.what))
            self._urgent.clear()
            self._prefetch.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + self.patience_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._closing.close()

    def on_close(self, give_back: Callable[[], object]) -> None:
        """Have this called when the threads have ended."""
        self._closing.callback(give_back)

    def cancel(self, job: Job) -> bool:
        with self._changed:
            if job.begun or job.done:
                return False
            self._queue_of(job).remove(job)
            job.fail(cancelled(job.what))
            return True

    def hasten(self, job: Job) -> None:
        with self._changed:
            waits, job.urgent = job in self._prefetch, True
            if waits:
                self._prefetch.remove(job)
                self._urgent.append(job)
                self._wake()

    def _serve(self, way: Way) -> None:
        with self._changed:
            taken = self._take()
        while taken is not None:
            job, piece, urgent = taken
            failure: Exception | None = None
            try:
                read_whole(way, piece)
            except Exception as error:  # a thread that dies would leave its job waiting for ever
                failure = explain(error, piece, job.what)
            with self._changed:
                self._prefetching -= not urgent
                job.reading -= 1
                self._meter.end(piece.nbytes)
                if failure is not None:
                    self._drop(job, failure)
                if not job.waiting and not job.reading:
                    job.finish()
                taken = self._take()

    def _take(self) -> tuple[Job, Piece, bool] | None:
        """The next piece, with the lock held; None when the reader is closed."""
        while (queue := self._next_queue()) is None:
            if self._closed:
                return None
            self._idle += 1
            self._changed.wait()
            self._idle, self._woken = self._idle - 1, False
        job, urgent = queue[0], queue is self._urgent
        piece = job.waiting.popleft()
        if not job.waiting:
            queue.popleft()
        job.begin()
        self._meter.begin(piece.nbytes)
        self._prefetching += not urgent
        self._wake()
        return job, piece, urgent

    def _queue_of(self, job: Job) -> deque[Job]:
        """Where it is as long as pieces of it wait."""
        return self._urgent if job.urgent else self._prefetch

    def _next_queue(self) -> deque[Job] | None:
        """The one that a thread should serve now, if any."""
        if self._meter.in_flight >= IN_FLIGHT_BYTES:
            return None
        if self._urgent:
            return self._urgent
        room = self._prefetching < max(1, len(self._threads) // 2)
        return self._prefetch if room and self._prefetch else None

    def _wake(self) -> None:
        if self._idle and not self._woken and self._next_queue() is not None:
            self._woken = True
            self._changed.notify()

    def _drop(self, job: Job, failure: Exception) -> None:
        """The rest of a job that has failed is not worth reading."""
        job.failed = job.failed or failure
        if job.waiting:
            self._queue_of(job).remove(job)
            job.waiting.clear()


def read_whole(way: Way, piece: Piece) -> None:
    """Fill the piece's views. Raises OSError or `OffloadError`."""
    got = way.read(piece.fd, piece.offset, piece.views, piece.status)
    piece.check_unchanged()
    if got < piece.nbytes:
        raise piece.truncated()
