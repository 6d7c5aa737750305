"""Large temporaries of the CPU keep their memory: `keep_blocks` gives torch an allocator that does.

The C library maps every large block anew and unmaps it when it is freed, and the system clears each
page again. blocks.cpp keeps blocks of 1 MiB and more instead, as many bytes as the model's plan has
for activations. Smaller blocks, and everything else about torch's memory, stay as they are.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock

import torch

from kernels.cpu.build import BuildError, build_library

_SOURCE = Path(__file__).with_name("blocks.cpp")
_bounds: dict[int, int] = {}
_lock = RLock()  # an owner may be collected, in the same thread, while it is held


@dataclass(frozen=True)
class BlockCounts:
    """What the allocator holds and has done since the process began.

    Attributes:
        bound_bytes: most bytes of blocks in use and kept ones together, as far as keeping goes.
        used_bytes: of blocks that tensors have now.
        kept_bytes: of blocks that wait for a tensor.
        hits: blocks given out again.
        misses: blocks that had to be asked of the system.
    """

    bound_bytes: int
    used_bytes: int
    kept_bytes: int
    hits: int
    misses: int


def keep_blocks(owner: object, nbytes: int) -> str | None:
    """Keep up to so many more bytes of large blocks for as long as `owner` lives.

    What lasts, such as weights, is to be made before or in `fresh_pages`: blocks in use count too.

    Args:
        nbytes: most bytes of blocks in use and kept ones; those of several owners add up.

    Returns:
        None, or why nothing is kept: no compiler, a system other than Linux.
    """
    key = id(owner)
    with _lock:
        library, reason = _installed()
        if library is None:
            return reason
        _bounds[key] = _bounds.get(key, 0) + nbytes
        library.moe_memory_bound(sum(_bounds.values()))
    weakref.finalize(owner, _let_go, key).atexit = False
    return None


@contextmanager
def fresh_pages() -> Iterator[None]:
    """For tensors that last, made in this thread meanwhile: they take no block and count as none.

    They take memory only where they are written to.
    """
    library = _library_in_use()
    if library is None:
        yield
        return
    before = library.moe_memory_fresh(1)
    try:
        yield
    finally:
        library.moe_memory_fresh(before)


def block_counts() -> BlockCounts:
    """All zero where nothing has been kept yet."""
    library = _library_in_use()
    figures = (ctypes.c_int64 * 5)()
    if library is not None:
        library.moe_memory_counts(figures)
    return BlockCounts(*figures)


def _let_go(key: int) -> None:
    library = _library_in_use()
    assert library is not None
    with _lock:
        _bounds.pop(key, None)
        library.moe_memory_bound(sum(_bounds.values()))


def _library_in_use() -> ctypes.CDLL | None:
    return _installed()[0] if _installed.cache_info().currsize else None


@cache
def _installed() -> tuple[ctypes.CDLL | None, str]:
    """The allocator, at work from the first call on; or None and why not."""
    if sys.platform != "linux":
        return None, f"it is made for Linux, and this is {sys.platform}"
    try:
        library = build_library("memory", (_SOURCE,), _flags())
    except BuildError as error:
        return None, str(error)
    library.moe_memory_bound.argtypes = [ctypes.c_int64]
    library.moe_memory_bound.restype = None
    library.moe_memory_counts.restype = None
    library.moe_memory_install.restype = None
    library.moe_memory_install()
    return library, "at work"


def _flags() -> tuple[str, ...]:
    """What C++ that is to work with this torch must be compiled and linked with."""
    root = Path(torch.__file__).parent
    libraries = root / "lib"
    return (
        *("-std=c++20", "-O2", "-fPIC", "-shared", f"-I{root / 'include'}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10"),
    )
