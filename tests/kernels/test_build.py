"""Building the CPU kernel: cached in private, safe to do twice at once, and optional."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu import build, compiler
from kernels.cpu.build import BuildError, load_library
from kernels.cpu.compiler import variant_for
from tests.launched import Launch

# Prints the backend, then one output of the experts and the reference's.
_PROBE = """
import logging, torch
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", force=True)
import kernels
from kernels import reference
experts = kernels.ExpertWeights(torch.ones(2, 4, 3), torch.ones(2, 3, 4), torch.tanh)
call = torch.ones(2, 3), torch.tensor([[0], [1]]), torch.ones(2, 1), experts
assert torch.allclose(kernels.experts_forward(*call), reference.experts_forward(*call))
kernels.experts_forward(*call)
print(kernels.backend_status())
"""


Probe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where the library of a process would be."""
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def probe(launch: Launch, cache: Path, tmp_path: Path) -> Probe:
    """The code and both outputs of a process that has chosen no kernel yet."""
    script = tmp_path / "probe.py"
    script.write_text(_PROBE)

    def run(**environment: str) -> tuple[int, str, str]:
        with launch(1, [script], XDG_CACHE_HOME=str(cache), **environment) as done:
            (code,) = done.codes()
            assert code is not None
            return code, done.out(), done.errors()

    return run


def test_without_a_working_compiler_the_reference_runs_and_says_so_once(probe: Probe) -> None:
    code, out, errors = probe(CXX="/bin/false")
    assert code == 0, errors
    assert "'name': 'reference'" in out
    assert "`/bin/false --version` exited with 1" in out
    assert errors.count("moe WARNING CPU experts run on the slow reference kernel") == 1


def test_a_forced_native_kernel_must_build(probe: Probe) -> None:
    code, _, errors = probe(CXX="/bin/false", MOE_CPU_KERNEL="native")
    assert code != 0
    assert "BuildError: `/bin/false --version` exited with 1" in errors


def test_a_forced_reference_builds_nothing(probe: Probe, cache: Path) -> None:
    _, out, _ = probe(MOE_CPU_KERNEL="reference")
    assert "'name': 'reference', 'reason': 'MOE_CPU_KERNEL=reference'" in out
    assert not list(cache.iterdir())


def test_an_unknown_kernel_is_refused(probe: Probe) -> None:
    _, _, errors = probe(MOE_CPU_KERNEL="fast")
    assert 'MOE_CPU_KERNEL must be "native" or "reference", got "fast"' in errors


# A compiler that takes its time and copies a library that is there: argv ends in "-o", where to.
_COPYING = """#!/bin/sh
[ "$1" = --version ] && exec echo copying
echo "$*" >> {log}
sleep 0.1
shift $(($# - 1))
exec cp {library} "$1"
"""


def test_of_processes_that_start_together_one_builds_into_a_private_directory(
    launch: Launch, cache: Path, tmp_path: Path
) -> None:
    log, copying, script = (tmp_path / name for name in ("log", "compiler", "script.py"))
    copying.write_text(_COPYING.format(log=log, library=load_library()._name))
    copying.chmod(0o700)
    script.write_text("from kernels.cpu.build import load_library; load_library()")
    with launch(2, [script], XDG_CACHE_HOME=str(cache), CXX=str(copying)) as both:
        assert both.codes() == [0, 0], both.everything()
        assert both.everything().count("compiling the CPU kernels for this machine, once") == 1
    assert (
        len(log.read_text().splitlines()) == len(compiler.sources()) + 1
    )  # each once, and together
    root = cache / "moe-inference"
    (directory,) = root.iterdir()
    assert [path.name for path in directory.iterdir()] == ["kernels.so"]
    for path in (root, directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_cache_that_others_could_write_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert build._private_directory(tmp_path) == tmp_path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_torch_and_the_kernel_share_one_openmp_runtime() -> None:
    load_library()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc/self/maps to read the loaded libraries from")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libomp"))}
    assert len(runtimes) == 1


def test_the_cache_is_not_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile_library", refuse)
    load_library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(AssertionError, match="compiled again"):
        load_library()


def test_a_build_drops_the_libraries_not_used_for_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_library()._name

    def copy(command: object, target: object, library: Path, **_: object) -> None:
        shutil.copy(built, library)

    monkeypatch.setattr(compiler, "compile_library", copy)
    monkeypatch.setattr(build, "_KEPT", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "moe-inference"
    for age in range(5):
        (root / f"old{age}").mkdir(parents=True)
        (root / f"old{age}" / "kernels.so").touch()
        os.utime(root / f"old{age}", (1000 - age, 1000 - age))
    (root / "hot-sets").mkdir()
    used = Path(load_library()._name).parent
    assert set(root.iterdir()) == {used, root / "old0", root / "old1", root / "hot-sets"}
    os.utime(used, (0, 0))
    load_library()
    assert used.stat().st_mtime > 1000


def test_a_cache_that_is_only_read_serves_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load_library()

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "chmod", refuse)
    load_library()


def test_another_compiler_command_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for command in ("c++", "c++ -fno-unroll-loops"):
        monkeypatch.setenv("CXX", command)
        keys.add(build._key(compiler.find_compiler(), ()))
    assert len(keys) == 2


def test_compiler_errors_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"exited with 1: .*error.*no-such-cpu"):
        load_library(("-march=no-such-cpu",))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"cannot build or load .*no-such-compiler"):
        load_library()


def test_a_file_in_place_of_the_cache_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moe-inference").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"cannot make the kernel cache .* set XDG_CACHE_HOME"):
        load_library()


# Flags of /proc/cpuinfo, each line beside those above it.
_HASWELL = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
_ALDER_LAKE = f"{_HASWELL} avx_vnni"
_SKYLAKE_X = f"{_HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
_ICE_LAKE = f"{_SKYLAKE_X} avx512_vnni"
_ZEN_4 = f"{_ICE_LAKE} avx512_bf16"
_SAPPHIRE_RAPIDS = f"{_ZEN_4} amx_tile amx_int8 amx_bf16"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("sse2", "portable"),
        (_HASWELL.replace("fma", ""), "portable"),
        (_HASWELL, "avx2"),
        (_ALDER_LAKE, "avx_vnni"),
        (_SKYLAKE_X, "avx2"),
        (_ICE_LAKE, "avx512_vnni"),
        (_ZEN_4, "avx512_bf16"),
        (_SAPPHIRE_RAPIDS, "amx"),
        (_SAPPHIRE_RAPIDS.replace("amx_int8", ""), "avx512_bf16"),
    ],
)
def test_a_cpu_gets_the_most_capable_library_that_it_runs(flags: str, name: str) -> None:
    found = variant_for("x86_64", frozenset(flags.split()))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("features", "name"),
    [("fp asimd crc32", "portable"), ("fp asimd crc32 asimddp", "dotprod")],
)
def test_an_arm_gets_dot_products_where_it_has_them(features: str, name: str) -> None:
    found = variant_for("aarch64", frozenset(features.split()))
    assert found is not None
    assert found.name == name


def test_a_machine_that_no_wheel_is_made_for_gets_none() -> None:
    assert variant_for("riscv64", frozenset({"avx2"})) is None


@pytest.mark.parametrize("text", ["", "processor: 0\nflags\t\t: fpu avx2\nflags : other\n"])
def test_flags_are_those_of_the_first_cpu(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert compiler.cpu_flags(tmp_path / "cpuinfo") == ({"fpu", "avx2"} if text else set())
    assert not compiler.cpu_flags(tmp_path / "missing")


def test_the_library_of_a_wheel_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_library()._name
    monkeypatch.setattr(compiler, "BUNDLED_DIR", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match="no-such-compiler"):
        load_library()
    variant = variant_for(platform.machine(), compiler.cpu_flags())
    assert variant is not None
    shutil.copy(built, tmp_path / f"{variant.name}.so")
    assert load_library()._name == str(tmp_path / f"{variant.name}.so")
    with pytest.raises(BuildError, match="no-such-compiler"):
        load_library(("-march=native",))  # asked for by name: built


def test_compiling_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_SAY_EACH_S", 0.0)
    progress = build._Progress(2)
    progress.on_file()
    progress.on_file()
    first, *rest = [record.getMessage() for record in caplog.records]
    assert "once: 2 files, a few minutes (a wheel has them compiled)" in first
    assert rest == ["compiled 1 of 2 files", "compiled 2 of 2 files"]
