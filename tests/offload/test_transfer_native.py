"""The compiled reader's queues: order, taking back, giving up, and what is said of failures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offload.errors import OffloadError
from offload.readers.direct_io import DirectFiles
from offload.readers.native import NativeReader, NativeTransfer
from offload.readers.pieces import PIECE_BYTES
from offload.transfer import Read
from tests.offload.test_transfer import native, place

PAGE, MOST = 4096, 6


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each page has bytes of its own; read by page `job` onwards, they say which job it was."""
    path = tmp_path_factory.mktemp("reads") / "pages.bin"
    pages = [bytes([job + 1]) * PAGE * MOST for job in range(MOST)]
    path.write_bytes(b"".join(pages) + bytes(2 * PIECE_BYTES))
    return path


Asleep = Callable[[], tuple[NativeReader, int]]


@pytest.fixture(scope="module")
def asleep(file: Path) -> Iterator[Asleep]:
    """Makes readers whose threads are not started, and opens the file."""
    made: list[tuple[NativeReader, int]] = []

    def make() -> tuple[NativeReader, int]:
        reader = NativeReader("asleep", native(), DirectFiles(), threads=0)
        made.append((reader, os.open(file, os.O_RDONLY)))
        return made[-1]

    yield make
    for reader, fd in made:
        reader.close()
        os.close(fd)


def ask(
    reader: NativeReader, fd: int, file: Path, job: int, rows: Tensor, urgent: bool
) -> NativeTransfer:
    room = rows.view(-1)
    read = Read(fd, file, job * MOST * PAGE, room)
    return reader.submit([read], urgent=urgent, what=f"job {job}")


@given(kinds=st.permutations([*product((True, False), (True, False, None))]))
def test_urgent_reads_go_first_and_a_hastened_prefetch_with_them(
    kinds: list[tuple[bool, bool | None]],
    file: Path,
    asleep: Asleep,
) -> None:
    """Whoever is served later writes over all of a place but the pages of those before: so each
    page says who was served when. Of a kind: urgent or not; hastened later or not, or cancelled."""
    urgent = [at for at, (now, then) in enumerate(kinds) if now and then is not None]
    hastened = [at for at, (now, then) in enumerate(kinds) if not now and then]
    usual = [at for at, (now, then) in enumerate(kinds) if not now and then is False]
    order = [*urgent, *hastened, *usual]
    (reader, fd), rows = asleep(), place(MOST * PAGE).view(MOST, PAGE)
    jobs = []
    for at, (now, _) in enumerate(kinds):
        first = order.index(at) if at in order else 0
        jobs.append(ask(reader, fd, file, at, rows[first:], now))
    for job, (_, then) in zip(jobs, kinds, strict=True):
        if then is None:
            assert job.cancel()
        elif then:
            job.hasten()
    assert [job.done for job in jobs] == [then is None for _, then in kinds]
    reader.reads.start(1)
    for at in order:
        assert jobs[at].wait() >= 0
        assert not jobs[at].cancel()
    assert rows[: len(order), 0].tolist() == [at + 1 for at in order]
    for at, job in enumerate(jobs):
        if at not in order:
            with pytest.raises(OffloadError, match=f"the read of job {at} was cancelled"):
                job.wait()


@given(seed=st.integers(0, 2**31))
def test_requests_come_while_threads_serve_others(seed: int, file: Path, asleep: Asleep) -> None:
    """Whatever the order, each ends well or says why not; ThreadSanitizer sees each lock here."""
    random, (reader, fd) = Random(seed), asleep()
    reader.reads.start(3)
    jobs: list[tuple[int, Tensor, NativeTransfer]] = []
    for _ in range(4):
        asked = [(random.randrange(MOST), place(PAGE).view(1, PAGE)) for _ in range(16)]
        for at, rows in asked:
            jobs.append((at, rows, ask(reader, fd, file, at, rows, random.random() < 0.3)))
        deed = random.randrange(3)
        for _, _, job in reversed(jobs[-16:]):  # and nothing else, which would take the same lock
            if deed == 0:
                job.hasten()
            elif deed == 1:
                job.cancel()
            else:
                assert reader.throughput >= 0
    for at, rows, job in jobs[: random.randrange(len(jobs))]:
        ended(at, rows, job)
    reader.close()
    for at, rows, job in jobs:
        assert job.done
        ended(at, rows, job)


def ended(at: int, rows: Tensor, job: NativeTransfer) -> None:
    """Wait for a job: its page is there, or untouched if it was not begun."""
    with suppress(OffloadError):
        job.wait()
    if job.failed is None:
        assert rows[0, 0] == at + 1
    else:
        assert re.search("was cancelled|was closed", str(job.failed))
        assert not rows.any()


def test_long_reads_are_cut_and_threads_share_them(file: Path, asleep: Asleep) -> None:
    (reader, fd), size = asleep(), file.stat().st_size - 100
    room = place(size)
    job = reader.submit([Read(fd, file, 100, room)], urgent=False)
    reader.reads.start(3)
    job.wait()
    assert bytes(room.numpy()) == file.read_bytes()[100:]
    assert reader.throughput > 0


def test_a_read_that_hangs_is_given_up_and_its_place_stays_taken(
    file: Path, asleep: Asleep
) -> None:
    (reader, fd), rows = asleep(), place(PAGE).view(1, PAGE)
    reader.patience_s = 0.01
    job = ask(reader, fd, file, 0, rows, True)
    with pytest.raises(OffloadError, match=r"reading job 0 took longer than 0.01 s"):
        job.wait()
    assert not job.done
    assert job.failed is None
    reader.reads.start(1)
    reader.patience_s = 60
    job.wait()  # late, but there
    assert rows[0, 0] == 1


def test_closing_fails_what_has_not_begun(file: Path, asleep: Asleep) -> None:
    (reader, fd), rows = asleep(), torch.zeros(1, PAGE, dtype=torch.uint8)
    before = ask(reader, fd, file, 0, rows, False)
    reader.close()
    for job in (before, ask(reader, fd, file, 1, rows, True)):
        assert job.done
        with pytest.raises(OffloadError, match=r"cannot read job \d: the reader was closed"):
            job.wait()


def test_a_systems_error_fails_its_transfer_only_and_says_where(
    file: Path, tmp_path: Path, asleep: Asleep
) -> None:
    (reader, fd), path = asleep(), tmp_path / "only written"
    broken, rows = os.open(path, os.O_WRONLY | os.O_CREAT), place(PAGE).view(1, PAGE)
    reader.files.get = lambda *_: None  # type: ignore[method-assign]
    bad = reader.submit([Read(broken, path, 0, place(2 * PIECE_BYTES))], urgent=True, what="it")
    good = ask(reader, fd, file, 2, rows, False)
    reader.reads.start(2)
    text = f"cannot read {PIECE_BYTES} bytes at byte 0 of {path} (it): Bad file descriptor; check"
    with pytest.raises(OffloadError, match=re.escape(text)):
        bad.wait()
    assert isinstance(bad.failed, OffloadError)
    good.wait()
    assert rows[0, 0] == 3
    os.close(broken)
