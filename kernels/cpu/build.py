"""Compile the C++ kernels once and keep the library in the user's cache.

`load_library` compiles plain C++ (no torch headers, no build system; one compiler call for each
source, on all cores, a minute of CPU time in all) to `moe-inference/<key>/kernels.so` in
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
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kernels.cpu.interface import check_layouts, compiled_layouts

_SOURCE_DIR = Path(__file__).parent
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp"),
    "-Wno-maybe-uninitialized",  # GCC's own AVX-512 header trips it
    # Tuned for Zen 2 and 3, GCC splits a fused multiply-add that adds to itself, but in some
    # loops only: the bits of a row would depend on how many rows a tile has.
    *("--param", "avoid-fma-max-bits=0"),
)
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 300
_KEPT = 8


class BuildError(RuntimeError):
    """The library could not be built or loaded; the message says why."""


def load_library(target: Sequence[str] = ("-march=native",)) -> ctypes.CDLL:
    """The compiled kernels for this machine, built on the first call and cached on disk.

    Args:
        target: compiler flags that choose the instruction set.

    Raises:
        BuildError: no compiler, a failed compilation, an unsafe cache directory, a library that
            does not load.
        LayoutError: the library's structs differ from Python's records.
    """
    compiler = _compiler()
    try:
        directory = _private_directory(_cache_root())
        directory = _private_directory(directory / _key(compiler, target))
        library = directory / "kernels.so"
        if not library.exists():
            with _alone(directory):
                if not library.exists():
                    _compile(compiler, target, library)
                    _prune(directory.parent)
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"cannot build or load the CPU kernels: {error}") from error
    check_layouts(compiled_layouts(loaded))
    with suppress(OSError):  # a read-only cache
        os.utime(directory)
    return loaded


def _sources() -> list[Path]:
    return sorted(_SOURCE_DIR.glob("*.cpp"))


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(f"no C++ compiler found (tried {', '.join(_COMPILERS)}; set CXX to name one)")


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"`{shlex.join(command)}` took over {_TIMEOUT_S} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise BuildError(f"`{shlex.join(command)}` exited with {done.returncode}: {reason}")
    return done.stdout


def _key(compiler: list[str], target: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCE_DIR.glob("*.h")) + _sources():
        digest.update(path.read_bytes())
    facts = (*compiler, *_FLAGS, *target, _run([*compiler, "--version"]), _cpu(), torch.__version__)
    digest.update("\n".join(facts).encode())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """Identifies the instruction set, as machines may share the cache directory."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return "\n".join([platform.machine(), platform.processor(), *flags[:1]])


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


def _compile(compiler: list[str], target: Sequence[str], library: Path) -> None:
    call = [*compiler, *_FLAGS, *target]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:

        def compiled(source: Path) -> str:
            to = str(Path(scratch) / f"{source.stem}.o")
            _run([*call, "-c", str(source), "-o", to])
            return to

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, _sources()))
        built = Path(scratch) / library.name
        _run([*call, *objects, "-o", str(built)])
        os.replace(built, library)
