"""DeepSpeed's asynchronous file reads (libaio), made safe for a server.

DeepSpeed ignores the result of a completion: a failed read leaves the buffer as it was, and a file
that ends early ends the process. So we never read past the end, and put a random mark at the end of
each block of the buffer: if the mark is still there, a plain read finds out why. https://github.com/deepspeedai/DeepSpeed/tree/master/csrc/aio
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.util
import os
import resource
import weakref
from pathlib import Path
from typing import Any

import torch

from offload.readers.direct_io import (
    ALIGNMENT,
    DirectFiles,
    DirectReads,
    Status,
    Views,
    remaining,
    round_down,
    round_up,
    scatter,
)

BLOCK_BYTES = 256 << 10
PART_BYTES = 1 << 20
BUFFER_BYTES = PART_BYTES + 2 * ALIGNMENT
MARK_BYTES = 16


class DeepSpeedReads:
    """A `ReadBackend`: one DeepSpeed handle and one locked buffer for each thread."""

    def __init__(self, module: Any, files: DirectFiles) -> None:
        self._files, self._direct = files, DirectReads(files)
        self._handle = module.aio_handle(
            BLOCK_BYTES, BUFFER_BYTES // BLOCK_BYTES + 1, False, False, 1
        )
        locked = self._handle.new_cpu_locked_tensor(BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))
        self._buffer, self._bytes = locked, memoryview(locked.numpy())
        weakref.finalize(self, self._handle.free_cpu_locked_tensor, locked)

    def read(self, fd: int, offset: int, views: Views, status: Status = None) -> int:
        done = 0
        while rest := remaining(views, done):
            got = self._read_part(fd, offset + done, _first(rest, PART_BYTES))
            if got == 0:
                break
            done += got
        return done

    def _read_part(self, fd: int, offset: int, views: Views) -> int:
        start, end = round_down(offset), round_up(offset + sum(map(len, views)))
        if end > os.fstat(fd).st_size or self._files.get(fd) is None:
            return self._direct.read(fd, offset, views)
        mark = os.urandom(MARK_BYTES)
        size = end - start
        ends = [min(at + BLOCK_BYTES, size) for at in range(0, size, BLOCK_BYTES)]
        for block in ends:
            self._bytes[block - MARK_BYTES : block] = mark
        path = f"/proc/self/fd/{fd}"  # the file that was checked, even if it was renamed
        read = self._handle.pread(self._buffer[:size], path, False, False, start)
        if read != 1 or any(self._bytes[block - MARK_BYTES : block] == mark for block in ends):
            return self._direct.read(fd, offset, views)
        return scatter(self._bytes[offset - start : size], views)


def _first(views: Views, most: int) -> list[memoryview]:
    """The views' first ``most`` bytes."""
    taken = []
    for view in views:
        taken.append(view[:most])
        most -= len(taken[-1])
        if most == 0:
            break
    return taken


def load_deepspeed(threads: int, build: bool) -> tuple[Any, str]:
    """DeepSpeed's compiled module, or None and why there is none.

    Checks first for what would end the process inside DeepSpeed.

    Args:
        threads: how many will read.
        build: compile it if needed, which takes minutes.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None, "DeepSpeed is not installed"
    if why := _no_libaio() or _no_locked_memory(threads * BUFFER_BYTES):
        return None, why
    if not build and not _is_built():
        return None, "DeepSpeed's reads are not compiled (asking for them by name does it)"
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
        if not builder.is_compatible():
            return None, "DeepSpeed cannot be built against libaio (are its headers installed?)"
        return builder.load(verbose=False), ""
    except Exception as error:  # no compiler, a wrong version, ...: another reader serves
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None, f"DeepSpeed's reads cannot be built: {line[:200]}"


def _is_built() -> bool:
    # The import may write a warning to stderr, so it stays behind the check for DeepSpeed.
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    installed = importlib.util.find_spec("deepspeed.ops.aio.async_io_op") is not None
    return installed or any(Path(root).glob("**/async_io/async_io.so"))


def _no_libaio() -> str:
    name = ctypes.util.find_library("aio")
    if name is None:
        return "libaio is not installed, which DeepSpeed's reads need"
    library, context = ctypes.CDLL(name), ctypes.c_void_p()
    if code := library.io_setup(1, ctypes.byref(context)):
        return f"the kernel refuses asynchronous reads: {os.strerror(-code)}"
    library.io_destroy(context)
    return ""


def _no_locked_memory(needed: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    return f"`ulimit -l` allows {limit} bytes, DeepSpeed's reads need {needed}"
