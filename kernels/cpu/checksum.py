"""CRC-32 of bytes in memory: zlib's, but several times as fast where the CPU has PCLMULQDQ.

It takes addresses: a view of an expert's part costs as much as the checksum of 100 kB.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import cache

from kernels.cpu import choose_kernel
from kernels.cpu.interface import NUMBER, POINTER, SIZE, declare

_STEP, _LEAST = 16, 64  # bytes that the compiled function takes


def crc32(address: int, nbytes: int, before: int = 0) -> int:
    """The CRC-32 of bytes behind others whose CRC-32 is ``before``, as `zlib.crc32` has it.

    Args:
        address: of the first byte; the caller keeps them alive.
    """
    compiled, whole = _compiled(), nbytes - nbytes % _STEP
    if compiled is None or whole < _LEAST:
        whole = 0
    else:
        before = compiled(address, whole, before)
    if whole == nbytes:
        return before
    return zlib.crc32((ctypes.c_char * (nbytes - whole)).from_address(address + whole), before)


@cache
def _compiled() -> Callable[[int, int, int], int] | None:
    native, _ = choose_kernel()
    if native is None:
        return None
    library = native.library
    signature = {
        "moe_crc32": (ctypes.c_uint32, (POINTER, SIZE, ctypes.c_uint32)),
        "moe_has_crc32": (NUMBER, ()),
    }
    declare(library, signature)
    return library.moe_crc32 if library.moe_has_crc32() else None
