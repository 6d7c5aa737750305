"""Compile the C++ kernels: one compiler call for each source, then a link.

`compile_library` makes one library for given instruction-set flags. A source checkout calls it on
first use with the flags of this machine (kernels/cpu/build.py). `make wheel` calls it through
setup.py for each of `VARIANTS`, so that a wheel needs no compiler; `variant_for` says which of them
a CPU runs. setup.py loads this file by its path where torch is not installed: it imports the
standard library only.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
BUNDLED_DIR = SOURCE_DIR / "lib"
"""The folder of the compiled variants in a wheel, as NAME.so; a checkout has none."""
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp"),
    "-Wno-maybe-uninitialized",  # GCC's own AVX-512 header trips it
    # Tuned for Zen 2 and 3, GCC splits a fused multiply-add that adds to itself, but in some
    # loops only: the bits of a row would depend on how many rows a tile has.
    *("--param", "avoid-fma-max-bits=0"),
)
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 900


class BuildError(RuntimeError):
    """The library could not be built or loaded; the message says why."""


@dataclass(frozen=True)
class KernelBuild:
    """One library of a wheel: what it may use of a CPU.

    Attributes:
        name: of the file and in messages.
        flags: the compiler's.
        needs: flags of /proc/cpuinfo, all of which a CPU must have.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"])
_BF16 = _V4 | {"avx512_bf16"}
_VNNI = ("-march=x86-64-v4", "-mavx512vnni")

# The sources differ by these sets only, so a variant computes what a build with -march=native does.
# The most capable comes first.
VARIANTS = {
    "x86_64": (
        KernelBuild(
            "amx",
            (*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
            _BF16 | {"amx_tile", "amx_int8", "amx_bf16"},
        ),
        KernelBuild("avx512_bf16", (*_VNNI, "-mavx512bf16"), _BF16),
        KernelBuild("avx512_vnni", _VNNI, _V4),
        KernelBuild("avx_vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
        KernelBuild("avx2", ("-march=x86-64-v3",), _V3),
        KernelBuild("portable", ("-march=x86-64",)),
    ),
    "aarch64": (
        KernelBuild("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
        KernelBuild("portable", ("-march=armv8-a",)),
    ),
}
"""Libraries of a wheel, by `platform.machine()`."""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features that the CPU has and the operating system lets programs use, in Linux's
    names.

    Linux reads CPUID, and drops what the system does not save between threads. Empty where the
    file is missing.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return frozenset(found[0].partition(":")[2].split()) if found else frozenset()


def variant_for(machine: str, flags: frozenset[str]) -> KernelBuild | None:
    """The most capable variant that a CPU runs; None for machines that no wheel is made for."""
    return next((one for one in VARIANTS.get(machine, ()) if one.needs <= flags), None)


def compile_bundle(directory: Path) -> None:
    """Compile all variants of this machine's architecture to ``directory``/NAME.so, for a wheel.

    They are linked without an OpenMP runtime: torch's own, whose file name depends on torch's
    build, is global in a process that has imported torch.

    Raises:
        BuildError: no compiler, a failed compilation, an architecture without variants.
    """
    variants = VARIANTS.get(platform.machine())
    if not variants:
        raise BuildError(f"no wheel is made for {platform.machine()}; install from source")
    compiler = find_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    for variant in variants:
        library = directory / f"{variant.name}.so"
        compile_library(compiler, variant.flags, library, ("-fno-openmp", "-pthread", "-s"))


def sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def find_compiler() -> list[str]:
    """The command of CXX, or the first compiler on the path. Raises BuildError."""
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(f"no C++ compiler found (tried {', '.join(_COMPILERS)}; set CXX to name one)")


def run(command: Sequence[str]) -> str:
    """Return what a command prints. Raises BuildError, which quotes its first error."""
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


def compile_library(
    compiler: Sequence[str],
    target: Sequence[str],
    library: Path,
    link: Sequence[str] = (),
    on_file: Callable[[], object] = lambda: None,
) -> None:
    """Compile all sources for the instruction set of the flags ``target``; the file appears whole.

    Args:
        link: further flags of the last call.
        on_file: called in a thread of the pool whenever a source is compiled.

    Raises:
        BuildError: a compiler's call failed.
        OSError: the compiler cannot be run, or files cannot be written.
    """
    call = [*compiler, *FLAGS, *target]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:

        def compiled(source: Path) -> str:
            to = str(Path(scratch) / f"{source.stem}.o")
            run([*call, "-c", str(source), "-o", to])
            on_file()
            return to

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources()))
        built = Path(scratch) / library.name
        run([*call, *link, "-shared", *objects, "-o", str(built)])
        os.replace(built, library)
