"""Find or build the library of compiled C++ kernels.

A wheel has one library for each kind of CPU (kernels/cpu/compiler.py); `load_library` loads the one
for this CPU. A source checkout has none: `load_library` compiles plain C++ (no torch headers, no
build system, one to four minutes of CPU time in all) to `moe-inference/<key>/kernels.so` in
$XDG_CACHE_HOME or ~/.cache. The key hashes what the machine code depends on: sources, flags,
compiler, CPU, torch. Processes that start together wait for the one that compiles. A build runs in
a temporary directory and is renamed into place when complete, under a file lock that ends with the
process, so a killed build leaves neither a lock nor half a library. Each build deletes the
libraries that were unused for longest; processes that run them keep their file open.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kernels.cpu import compiler
from kernels.cpu.compiler import BuildError
from kernels.cpu.interface import check_layouts, compiled_layouts

_KEPT = 12  # three versions of the four that tests build
_SAY_EACH_S = 10.0
_NATIVE = ("-march=native",)
_logger = logging.getLogger("moe")


def load_library(target: Sequence[str] | None = None) -> ctypes.CDLL:
    """The compiled kernels for this machine: the wheel's, or built on the first call and cached.

    Args:
        target: compiler flags that choose the instruction set, to build for; None takes the
            wheel's library, or builds for this machine where there is none.

    Raises:
        BuildError: no compiler, a failed compilation, an unsafe cache directory, a library that
            does not load.
        LayoutError: the library's structs differ from Python's records.
    """
    bundled = bundled_library() if target is None else None
    try:
        path = bundled or _built(_NATIVE if target is None else target)
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot build or load the CPU kernels: {error}") from error
    check_layouts(compiled_layouts(loaded))
    return loaded


def bundled_library() -> Path | None:
    """The wheel's library for this CPU; None in a source checkout."""
    variant = compiler.variant_for(platform.machine(), compiler.cpu_flags())
    path = variant and compiler.BUNDLED_DIR / f"{variant.name}.so"
    return path if path and path.exists() else None


def is_built() -> bool:
    """Return whether `load_library` has nothing to compile on this machine, or no compiler to do
    it."""
    if bundled_library():
        return True
    try:
        command = compiler.find_compiler()
        return (_cache_root() / _key(command, _NATIVE) / "kernels.so").exists()
    except BuildError:
        return True


def _built(target: Sequence[str]) -> Path:
    command = compiler.find_compiler()
    directory = _private_directory(_cache_root())
    directory = _private_directory(directory / _key(command, target))
    library = directory / "kernels.so"
    if not library.exists():
        with _alone(directory):
            if not library.exists():
                say = _Progress(len(compiler.sources()))
                compiler.compile_library(command, target, library, on_file=say.on_file)
                _prune(directory.parent)
    with suppress(OSError):  # a read-only cache
        os.utime(directory)
    return library


class _Progress:
    """Says that the kernels are compiled, at once and then each ten seconds.

    Args:
        files: to compile.
    """

    def __init__(self, files: int) -> None:
        self._files, self._done, self._said = files, 0, time.monotonic()
        self._lock = threading.Lock()
        _logger.warning(
            "compiling the CPU kernels for this machine, once: %d files, a few minutes "
            "(a wheel has them compiled)",
            files,
        )

    def on_file(self) -> None:
        """A file is compiled."""
        with self._lock:
            self._done += 1
            if time.monotonic() - self._said >= _SAY_EACH_S:
                self._said = time.monotonic()
                _logger.warning("compiled %d of %d files", self._done, self._files)


def _key(command: list[str], target: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(compiler.SOURCE_DIR.glob("*.h")) + compiler.sources():
        digest.update(path.read_bytes())
    version = compiler.run([*command, "--version"])
    # Machines that have different instruction sets may share the cache directory.
    cpu = (platform.machine(), platform.processor(), *sorted(compiler.cpu_flags()))
    facts = (*command, *compiler.FLAGS, *target, version, *cpu, torch.__version__)
    digest.update("\n".join(facts).encode())
    return digest.hexdigest()[:20]


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moe-inference"


def _private_directory(path: Path) -> Path:
    """Make `path`, private to this user, because code is loaded from it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"cannot make the kernel cache {path} ({error.strerror}); set XDG_CACHE_HOME to a "
            "directory that can be written"
        ) from error
    if path.stat().st_uid != os.getuid():
        raise BuildError(f"the kernel cache {path} belongs to another user; set XDG_CACHE_HOME")
    if stat.S_IMODE(path.stat().st_mode) != 0o700:
        path.chmod(0o700)
    return path


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; without effect where the file system has no locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _prune(root: Path) -> None:
    """Keep the libraries used last: each version of sources, compiler or torch adds another."""
    with suppress(OSError):  # another process may delete the same
        found = [library.parent for library in root.glob("*/kernels.so")]
        for directory in sorted(found, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(directory, ignore_errors=True)
