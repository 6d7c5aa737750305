"""The compiled CRC-32 is zlib's."""

from __future__ import annotations

import random
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.checksum import crc32

BYTES = random.Random(0).randbytes(3000)


@given(start=st.integers(0, 99), length=st.integers(0, 2900), before=st.integers(0, 2**32 - 1))
def test_it_is_that_of_zlib(start: int, length: int, before: int) -> None:
    part = np.frombuffer(BYTES, np.uint8)[start : start + length]
    assert crc32(part.ctypes.data, length, before) == zlib.crc32(part.tobytes(), before)


@given(parts=st.lists(st.binary(max_size=300), max_size=5))
def test_parts_follow_one_another(parts: list[bytes]) -> None:
    found = 0
    for part in parts:
        found = crc32(np.frombuffer(part, np.uint8).ctypes.data, len(part), found)
    assert found == zlib.crc32(b"".join(parts))
