"""Short work finds a thread, whatever one caller has queued."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from moe.errors import BusyError
from moe.fair_pool import FairPool, _Task, _work, starts, without_interpreter


class Blocked:
    """Work that waits to be let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.most = self.now = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.begun.release()
        assert self.go_on.wait(30)
        with self._lock:
            self.now -= 1


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    work = Blocked()
    yield work
    work.go_on.set()


def test_a_caller_has_its_share_of_the_threads(blocked: Blocked) -> None:
    pool = FairPool(4, "test", each=2)
    futures = [pool.submit("a", blocked) for _ in range(20)]
    assert blocked.begun.acquire(timeout=10)
    assert blocked.begun.acquire(timeout=10)
    assert [pool.submit("b", partial(int, n)).result(10) for n in range(5)] == [*range(5)]
    blocked.go_on.set()
    for future in futures:
        future.result(10)
    assert blocked.most == 2


def test_heavy_work_of_many_callers_leaves_threads_for_light_work(blocked: Blocked) -> None:
    pool = FairPool(4, "test", each=2, heavy=2)

    def waiting() -> None:
        with without_interpreter():
            blocked()

    futures = [pool.submit(caller, waiting, heavy=True) for caller in range(20)]
    assert pool.submit("other", lambda: 1).result(10) == 1
    assert pool.submit(3, lambda: 2).result(10) == 2  # it passes the heavy work of its caller
    blocked.go_on.set()
    for future in futures:
        future.result(10)
    assert blocked.most == 2


def test_callers_take_turns(blocked: Blocked) -> None:
    pool, order = FairPool(1, "test", each=1), list[str]()
    pool.submit("first", blocked)
    assert blocked.begun.acquire(timeout=10)
    futures = [pool.submit("a", partial(order.append, f"a{n}")) for n in range(3)]
    futures += [pool.submit("b", partial(order.append, f"b{n}")) for n in range(3)]
    blocked.go_on.set()
    for future in futures:
        future.result(10)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_what_is_cancelled_in_the_queue_never_runs(blocked: Blocked) -> None:
    pool, ran = FairPool(1, "test", each=1), list[int]()
    pool.submit("a", blocked)
    assert blocked.begun.acquire(timeout=10)
    futures: list[Future[None]] = [pool.submit("a", lambda: ran.append(1)) for _ in range(50)]
    assert all(future.cancel() for future in futures)
    blocked.go_on.set()
    pool.submit("a", lambda: None).result(10)
    assert not ran


def test_what_is_cancelled_on_its_way_to_a_thread_does_not_run() -> None:
    future, ran = Future[None](), list[int]()
    future.cancel()
    _work(_Task(future, lambda: ran.append(1), heavy=False))
    assert not ran


def test_a_panic_is_an_exception_and_ends_no_thread() -> None:
    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("at the disco")

    pool = FairPool(1, "test", each=1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Panic: at the disco"):
            pool.submit("a", panic).result(10)
    assert pool.submit("a", lambda: 5).result(10) == 5


class Shortage:
    """While `on`, the system starts no threads, as where a user has too many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.refused = False, 0
        start = threading.Thread.start

        def starting(thread: threading.Thread) -> None:
            if self.on:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starting)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    return Shortage(monkeypatch)


def test_b14_a_shortage_of_threads_is_over_when_it_is_over(shortage: Shortage) -> None:
    pool, ran = FairPool(2, "test", each=2), list[int]()
    shortage.on = True
    for _ in range(5):  # more than there may be threads
        with pytest.raises(BusyError, match="starts no more threads now; try again later"):
            pool.submit("a", lambda: ran.append(1))
    shortage.on = False
    assert pool.submit("a", lambda: 5).result(10) == 5
    assert not ran, "what was refused is not run later"


def test_b14_threads_that_run_do_the_work_where_no_others_start(
    blocked: Blocked, shortage: Shortage
) -> None:
    pool = FairPool(2, "test", each=2)
    pool.submit("a", blocked)
    assert blocked.begun.acquire(timeout=10)
    shortage.on = True
    waiting = [pool.submit("a", partial(int, n)) for n in range(4)]
    assert shortage.refused == 4
    shortage.on = False
    assert pool.submit("b", lambda: 7).result(10) == 7, "a second thread, for all"
    assert [future.result(10) for future in waiting] == [0, 1, 2, 3]


def test_other_faults_of_a_start_are_no_shortage() -> None:
    thread = threading.Thread(target=int)
    assert starts(thread)
    with pytest.raises(RuntimeError, match="threads can only be started once"):
        starts(thread)


def test_heavy_work_of_all_pools_runs_python_in_one_thread_at_a_time(blocked: Blocked) -> None:
    """Until it waits or computes elsewhere; light work does not ask."""
    texts, bodies = FairPool(2, "texts", each=2), FairPool(2, "bodies", each=2)
    waits, back = threading.Event(), threading.Event()

    def waiting() -> None:
        blocked()
        with without_interpreter():
            waits.set()
            assert back.wait(10)

    first = texts.submit("a", waiting, heavy=True)
    assert blocked.begun.acquire(timeout=10)
    second = bodies.submit("b", blocked, heavy=True)
    assert bodies.submit("b", lambda: 1).result(10) == 1
    assert not blocked.begun.acquire(timeout=0.05)
    blocked.go_on.set()
    assert waits.wait(10)
    assert second.result(10) is None
    assert blocked.most == 1
    back.set()
    assert first.result(10) is None
    with without_interpreter():  # of a thread that has none to give
        assert texts.submit("a", lambda: 1, heavy=True).result(10) == 1
