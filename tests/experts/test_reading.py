"""Every byte comes, whether the page cache has it, the disk, or a file system without O_DIRECT."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.safetensors_io import BLOCK, FileReader, OpenFile, as_bytes, fresh_bytes
from tests.open_files import num_open

SIZE = 40 * BLOCK + 123


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenFile]:
    path = tmp_path_factory.mktemp("reading") / "bytes"
    path.write_bytes(os.urandom(SIZE))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    yield OpenFile(path, fd, os.fstat(fd), {})
    os.close(fd)


@given(
    start=st.integers(0, SIZE) | st.integers(0, 40).map(lambda block: block * BLOCK),
    size=st.integers(0, SIZE) | st.integers(0, 50).map(lambda block: block * BLOCK),
    shift=st.sampled_from([0, 0, 0, 1, 512]),
    cached=st.lists(st.integers(0, 40), max_size=4),
    direct=st.booleans(),
)
def test_any_range(
    file: OpenFile, start: int, size: int, shift: int, cached: list[int], direct: bool
) -> None:
    content = file.path.read_bytes()
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for block in cached:
        os.pread(file.fd, 1, block * BLOCK)
    memory = fresh_bytes(4 << 20)[shift : shift + size]
    with pytest.MonkeyPatch.context() as patch, FileReader(file) as reader:
        if not direct:
            patch.setattr(reader, "_direct", None)
        got = reader.read(as_bytes(memory), start)
    assert got == max(0, min(size, SIZE - start))
    assert bytes(as_bytes(memory)[:got]) == content[start : start + got]


def test_no_descriptor_stays_open(file: OpenFile) -> None:
    before = num_open(file.path)
    with FileReader(file) as reader:
        reader.read(memoryview(bytearray(10)), 0)
    assert num_open(file.path) == before


@pytest.mark.parametrize("nbytes", [1, 100, (2 << 20) - 1, 2 << 20, (5 << 20) + 7])
def test_fresh_memory_is_writable_and_of_the_size_asked_for(nbytes: int) -> None:
    memory = fresh_bytes(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.untyped_storage().nbytes() == nbytes
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes
    assert nbytes < 2 << 20 or memory.data_ptr() % BLOCK == 0
