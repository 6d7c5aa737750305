"""Readers: bytes, order, faults, and what is left behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import NativeKernels, choose_kernel
from offload.errors import OffloadError
from offload.readers import ThreadedReader, direct_io
from offload.readers.direct_io import BufferedReads, DirectFiles, DirectReads
from offload.readers.native import NativeReader
from offload.readers.pieces import PIECE_BYTES, cut
from offload.transfer import Read, Reader
from tests.open_files import num_open

SIZE = 3 * PIECE_BYTES + 5000
CONTENT = torch.arange(SIZE, dtype=torch.int32).mul(2654435761 % 251).to(torch.uint8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "experts.bin"
    path.write_bytes(CONTENT.numpy().tobytes())
    return path


@pytest.fixture(scope="module")
def fd(file: Path) -> Iterator[int]:
    fd = os.open(file, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(
    scope="module",
    params=["direct", "buffered", "no O_DIRECT", "compiled", "compiled, no O_DIRECT"],
)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    files = DirectFiles()
    if request.param.endswith("no O_DIRECT"):
        files.get = lambda *_: None  # type: ignore[method-assign]
    if request.param.startswith("compiled"):
        compiled = NativeReader("r", native(), files, threads=3)
        yield compiled
        compiled.close()
        return
    make = BufferedReads if request.param == "buffered" else lambda: DirectReads(files)
    reader = ThreadedReader("r", make, files.close, threads=3)
    yield reader
    reader.close()


def native() -> NativeKernels:
    kernels, why_not = choose_kernel()
    return kernels or pytest.skip(why_not)


def place(nbytes: int, misaligned: int = 0) -> Tensor:
    room = torch.zeros(nbytes + 8192, dtype=torch.uint8)
    return room[-room.data_ptr() % 4096 + misaligned :][:nbytes]


@given(st.data())
def test_every_read_brings_its_bytes(
    reader: Reader, file: Path, fd: int, data: st.DataObject
) -> None:
    blocks = st.integers(0, SIZE // 4096 - 1).map(lambda block: block * 4096)
    reads: list[Read] = []
    for _ in range(data.draw(st.integers(0, 5))):
        after = reads[-1].offset + len(reads[-1].place) if reads else 0
        offset = data.draw(st.sampled_from([min(after, SIZE)]) | blocks | st.integers(0, SIZE))
        size = data.draw(st.sampled_from([4096, 12288, 2 * PIECE_BYTES]) | st.integers(0, 9000))
        room = place(min(size, SIZE - offset), data.draw(st.sampled_from([0, 0, 64])))
        reads.append(Read(fd, file, offset, room))
    transfer = reader.submit(reads, urgent=data.draw(st.booleans()))
    assert transfer.wait() >= 0
    assert transfer.done
    assert transfer.failed is None
    for read in reads:
        torch.testing.assert_close(
            read.place, CONTENT[read.offset : read.offset + len(read.place)], rtol=0, atol=0
        )


def test_neighbours_become_one_request_and_long_reads_are_cut(file: Path) -> None:
    reads = [Read(3, file, 4096, place(1000)), Read(3, file, 5096, place(24))]
    reads += [Read(3, file, 8192, place(2 * PIECE_BYTES + 1)), Read(4, file, 0, place(1))]
    found = [(p.fd, p.offset, [len(view) for view in p.views]) for p in cut(reads)]
    assert found == [
        (3, 4096, [1000, 24]),
        (3, 8192, [PIECE_BYTES]),
        (3, 8192 + PIECE_BYTES, [PIECE_BYTES]),
        (3, 8192 + 2 * PIECE_BYTES, [1]),
        (4, 0, [1]),
    ]


class Gate:
    """A way that stops at the door until it is opened, and tells who came in which order."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.order: list[int] = []
        self.failures: dict[int, Exception] = {}

    def read(
        self,
        fd: int,
        offset: int,
        views: Sequence[memoryview],
        status: os.stat_result | None = None,
    ) -> int:
        self.order.append(offset)
        self.entered.release()
        assert self.open.wait(60)
        if offset in self.failures:
            raise self.failures[offset]
        return sum(map(len, views))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def at(offset: int, nbytes: int = 1) -> list[Read]:
    return [Read(-1, Path("store/experts.bin"), offset, place(nbytes))]


def test_urgent_reads_go_first_and_a_hastened_prefetch_with_them(gate: Gate) -> None:
    reader = ThreadedReader("gate", lambda: gate, threads=1)
    first = reader.submit(at(0), urgent=False)
    gate.entered.acquire()
    prefetches = [reader.submit(at(offset), urgent=False) for offset in (1, 2, 3)]
    urgent = [reader.submit(at(offset), urgent=True) for offset in (10, 11)]
    prefetches[2].hasten()
    first.hasten()  # under way: nothing to do
    assert prefetches[0].cancel()
    assert not first.cancel()
    gate.open.set()
    for transfer in (first, *urgent, prefetches[1], prefetches[2]):
        transfer.wait()
    reader.close()
    assert gate.order == [0, 10, 11, 3, 2]
    assert prefetches[0].done
    with pytest.raises(OffloadError, match="cancelled"):
        prefetches[0].wait()
    assert not urgent[0].cancel()


def test_prefetches_leave_threads_to_urgent_reads(gate: Gate) -> None:
    reader = ThreadedReader("gate", lambda: gate, threads=4)
    for offset in range(4):
        reader.submit(at(offset), urgent=False)
    for _ in range(2):
        gate.entered.acquire()
    for offset in (10, 11, 12):  # for two threads
        reader.submit(at(offset), urgent=True)
    for _ in range(2):
        gate.entered.acquire()
    assert sorted(gate.order) == [0, 1, 10, 11]
    gate.open.set()
    reader.close()


def test_no_more_is_begun_than_keeps_a_disk_busy(gate: Gate) -> None:
    reader = ThreadedReader("gate", lambda: gate, threads=4)
    transfers = [reader.submit(at(0, 3 * PIECE_BYTES), urgent=True)]
    gate.entered.acquire()
    transfers.append(reader.submit(at(1), urgent=True))
    assert not gate.entered.acquire(timeout=0.05)
    gate.open.set()
    for transfer in transfers:
        transfer.wait()
    assert gate.order == [0, PIECE_BYTES, 2 * PIECE_BYTES, 1]
    assert reader.throughput > 0
    reader.close()


def test_a_disk_error_fails_its_transfer_only_and_says_where(gate: Gate) -> None:
    reader = ThreadedReader("gate", lambda: gate, threads=2)
    gate.failures = {PIECE_BYTES: OSError(errno.EIO, os.strerror(errno.EIO))}
    gate.open.set()
    bad = reader.submit(at(0, 8 * PIECE_BYTES), urgent=True, what="expert 5 of layer 3")
    good = reader.submit(at(9 * PIECE_BYTES), urgent=False)
    with pytest.raises(
        OffloadError,
        match=rf"cannot read {PIECE_BYTES} bytes at byte {PIECE_BYTES} of store/experts.bin "
        r"\(expert 5 of layer 3\): Input/output error; check the disk",
    ):
        bad.wait()
    assert bad.done
    good.wait()
    assert reader.submit(at(1), urgent=True).wait() >= 0  # the threads live on
    reader.close()


def test_a_read_that_hangs_is_given_up_and_its_place_stays_taken(gate: Gate) -> None:
    reader = ThreadedReader("gate", lambda: gate, threads=1, patience_s=0.05)
    transfer = reader.submit(at(0), urgent=True, what="expert 1 of layer 0")
    with pytest.raises(OffloadError, match=r"expert 1 of layer 0 took longer than 0.05 s"):
        transfer.wait()
    assert not transfer.done
    gate.open.set()
    reader.patience_s = 60
    transfer.wait()  # late, but there
    reader.close()


def test_closing_fails_what_has_not_begun_and_ends_the_threads(gate: Gate) -> None:
    given_back: list[bool] = []
    reader = ThreadedReader("gate", lambda: gate, lambda: given_back.append(True), threads=2)
    begun = reader.submit(at(0), urgent=True)
    gate.entered.acquire()
    waiting = [reader.submit(at(offset), urgent=False) for offset in range(1, 9)]
    closing = threading.Thread(target=reader.close)
    closing.start()
    with pytest.raises(OffloadError, match="closed"):
        waiting[-1].wait()
    gate.open.set()
    closing.join(60)
    begun.wait()
    assert all(transfer.done for transfer in waiting)
    assert given_back == [True]
    assert not any(thread.is_alive() for thread in reader._threads)
    with pytest.raises(OffloadError, match="closed"):
        reader.submit(at(0), urgent=True).wait()
    reader.close()


def test_a_truncated_file_is_an_error(reader: Reader, file: Path, fd: int) -> None:
    transfer = reader.submit([Read(fd, file, SIZE - 100, place(101))], urgent=True, what="expert 7")
    with pytest.raises(
        OffloadError, match=rf"truncated: {SIZE} bytes, needed up to byte {SIZE + 1}"
    ):
        transfer.wait()


def test_a_file_written_under_us_is_an_error(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY)
    status = os.fstat(fd)
    read = Read(fd, path, 0, place(4096), status)
    reader.submit([read], urgent=True).wait()
    os.utime(path, ns=(0, 1))
    with pytest.raises(OffloadError, match="was changed while it was in use"):
        reader.submit([read], urgent=True).wait()
    os.close(fd)


def test_a_file_replaced_under_us_is_read_as_it_was(reader: Reader, tmp_path: Path) -> None:
    path, other = tmp_path / "experts.bin", tmp_path / "other.bin"
    path.write_bytes(b"a" * 8192)
    other.write_bytes(b"b" * 8192)
    fd = os.open(path, os.O_RDONLY)
    os.replace(other, path)
    room = place(4096)
    reader.submit([Read(fd, path, 4096, room, os.fstat(fd))], urgent=True).wait()
    assert bytes(room.numpy()) == b"a" * 4096
    os.close(fd)


def test_a_refusal_of_o_direct_is_not_an_error(
    file: Path, fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = DirectFiles()
    direct, preadv = files.get(fd), os.preadv

    def refuse(number: int, views: list[memoryview], offset: int) -> int:
        if number == direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(number, views, offset)

    monkeypatch.setattr(direct_io.os, "preadv", refuse)
    room = place(8192)
    assert direct is not None
    assert DirectReads(files).read(fd, 4096, [memoryview(room.numpy())]) == 8192  # type: ignore[arg-type]
    assert room.equal(CONTENT[4096:12288])
    assert files.get(fd) is None
    assert "no O_DIRECT here (Invalid argument)" in caplog.text
    files.close()


@pytest.mark.parametrize("misaligned", [0, 64])
def test_short_reads_are_continued(
    fd: int, misaligned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def short(number: int, views: list[memoryview], offset: int) -> int:
        return preadv(number, [views[0][: max(4096, len(views[0]) // 8192 * 4096)]], offset)

    monkeypatch.setattr(direct_io.os, "preadv", short)
    files, room = DirectFiles(), place(200_000, misaligned)
    assert DirectReads(files).read(fd, 4096, [memoryview(room.numpy())]) == 200_000  # type: ignore[arg-type]
    assert room.equal(CONTENT[4096:204_096])
    files.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_stays_open(file: Path, fd: int, compiled: bool) -> None:
    files = DirectFiles()
    threaded = ThreadedReader("direct", lambda: DirectReads(files), files.close)
    reader: Reader = NativeReader("direct", native(), files) if compiled else threaded
    reader.submit([Read(fd, file, 0, place(4096))], urgent=True).wait()
    assert num_open(file) == 2
    reader.close()
    threaded.close()
    assert num_open(file) == 1
