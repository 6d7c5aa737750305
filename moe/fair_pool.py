"""`FairPool`: a few threads for work that one caller must not be able to keep from others.

Callers take turns, each has a share of the threads, and heavy work another, so that short work
finds a thread whatever else there is. Threads end when nothing was asked of them for a while.

Heavy work of all pools runs Python in one thread at a time: each thread more that wants the
interpreter delays those of the engine. `without_interpreter` lets the next go on meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from moe.errors import BusyError

Result = TypeVar("Result")
_REST_S = 10.0
_NICENESS = 10
_INTERPRETER = threading.Lock()
_OWN = threading.local()


@contextmanager
def without_interpreter() -> Iterator[None]:
    """Let other heavy work run Python while this thread waits, or computes elsewhere."""
    if not getattr(_OWN, "has_interpreter", False):
        yield
        return
    _OWN.has_interpreter = False
    _INTERPRETER.release()
    try:
        yield
    finally:
        _INTERPRETER.acquire()
        _OWN.has_interpreter = True


@contextmanager
def _with_interpreter() -> Iterator[None]:
    with _INTERPRETER:
        _OWN.has_interpreter = True
        try:
            yield
        finally:
            _OWN.has_interpreter = False


class _Task(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]
    heavy: bool


class FairPool:
    """Runs work in threads.

    Where the machine is short of threads, it makes do with those that it has.

    Args:
        workers: most threads.
        name: of the threads.
        each: most threads of one caller.
        heavy: most threads with heavy work, of all callers together.
        nice: the threads give way to the rest of the process (Linux).
    """

    def __init__(
        self, workers: int, name: str, *, each: int, heavy: int = 0, nice: bool = False
    ) -> None:
        self._workers, self._name, self._each = workers, name, each
        self._heavy, self._nice = heavy or workers, nice
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, deque[_Task]] = {}  # in the order of turns
        self._running: Counter[Hashable] = Counter()
        self._num_threads = self._num_heavy = self._num_idle = 0

    def submit(
        self, caller: Hashable, work: Callable[[], Result], *, heavy: bool = False
    ) -> Future[Result]:
        """Queue work; cancelling its future takes it out of the queue again.

        Work of one caller starts in its order, but for light work that passes heavy one.

        Raises:
            BusyError: there is no thread, and the machine starts none now.
        """
        future: Future[Result] = Future()
        with self._changed:
            if not self._num_idle and self._num_threads < self._workers:
                self._start_thread()
            if not self._num_threads:
                raise BusyError("this machine starts no more threads now; try again later")
            self._waiting.setdefault(caller, deque()).append(_Task(future, work, heavy))
            self._changed.notify()
        future.add_done_callback(partial(self._forget, caller))
        return future

    def _start_thread(self) -> None:
        """Start a thread, if the machine has one; else those that run do the work."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        if starts(thread):
            self._num_threads += 1

    def _forget(self, caller: Hashable, done: Future[Any]) -> None:
        """Take cancelled work out of the queue."""
        if not done.cancelled():
            return
        with self._changed:
            tasks = self._waiting.get(caller, ())
            left = deque(task for task in tasks if task.future is not done)
            if left:
                self._waiting[caller] = left
            else:
                self._waiting.pop(caller, None)

    def _run(self) -> None:
        if self._nice:
            with suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (turn := self._await_turn()) is not None:
            caller, task = turn
            _work(task)
            with self._changed:
                self._num_heavy -= task.heavy
                self._running[caller] -= 1
                if not self._running[caller]:
                    del self._running[caller]
                self._changed.notify_all()

    def _await_turn(self) -> tuple[Hashable, _Task] | None:
        """The next work for this thread; None if it may end."""
        with self._changed:
            self._num_idle += 1
            turn = self._changed.wait_for(self._next, _REST_S)
            self._num_idle -= 1
            if turn is None:
                self._num_threads -= 1
                return None
            if self._waiting and not self._num_idle and self._num_threads < self._workers:
                self._start_thread()  # several came while this thread was waking
            return turn

    def _next(self) -> tuple[Hashable, _Task] | None:
        """Take the first work that may start, and put its caller behind the others."""
        for caller, tasks in self._waiting.items():
            if self._running[caller] >= self._each:
                continue
            for task in tasks:
                if task.heavy and self._num_heavy >= self._heavy:
                    continue
                del self._waiting[caller]
                tasks.remove(task)
                if tasks:
                    self._waiting[caller] = tasks
                self._running[caller] += 1
                self._num_heavy += task.heavy
                return caller, task
        return None


def starts(thread: threading.Thread) -> bool:
    """Start a thread; False if the system starts none (threads of a user or group, memory)."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not is_shortage(error):
            raise
        return False
    return True


def is_shortage(error: Exception) -> bool:
    """Return whether it says that the system starts no thread now."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def _work(task: _Task) -> None:
    if not task.future.set_running_or_notify_cancel():
        return
    try:
        with _with_interpreter() if task.heavy else nullcontext():
            result = task.work()
    except Exception as error:
        task.future.set_exception(error)
    except BaseException as error:  # a panic in Rust must not end this thread
        task.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        task.future.set_result(result)
