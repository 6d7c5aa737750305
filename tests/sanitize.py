"""Run the property tests of the C++ kernels with a sanitizer built into the kernels.

    python -m tests.sanitize address|thread [ARGS of pytest]

``address`` finds reads and writes outside of an array, uses after a release, and undefined
behaviour (AddressSanitizer and UndefinedBehaviorSanitizer); ``thread`` finds races between the
threads that read files, exchange rows and run steps. GCC's OpenMP runtime is not built for
ThreadSanitizer, so there each test has one thread of OpenMP.

The instrumented library is compiled to build/sanitize/ (minutes, once a change). A finding ends the
process; its report names the line of the kernel. Before the tests, a library with a planted fault
of each kind is loaded in the same way, and must end its process.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kernels.kernel_cases import AMX_TARGETS, TARGETS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "sanitize"
_FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer",
    "thread": "-fsanitize=thread",
}
_RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:report_signal_unsafe=0",
}
_PLANTED = {
    "address": {
        "AddressSanitizer": "int* volatile one = new int(1); delete one; volatile int read = *one;",
        "signed integer overflow": "volatile int most = 2147483647; most = most + 1;",
    },
    "thread": {
        "ThreadSanitizer: data race": """
            static int shared;
            const auto count = [] { for (int i = 0; i < 100000; ++i) ++shared; };
            std::thread one(count), two(count);
            one.join(), two.join();""",
    },
}
"""What a report says, and code that must bring it about."""
_KERNELS = [
    *(
        f"tests/kernels/test_{name}.py"
        for name in ("activation", "checksum", "file_codes", "kv", "layouts")
    ),
    *(f"tests/kernels/test_{name}.py" for name in ("native", "native_attention", "native_planes")),
    *(f"tests/kernels/test_{name}.py" for name in ("post_norm", "quantized", "recurrence")),
    *(f"tests/kernels/test_{name}.py" for name in ("stages", "sums", "waves")),
    "tests/moe/decode/test_step.py",
]
_THREADS = [
    *("tests/offload/test_arriving.py", "tests/offload/test_learning.py"),
    *("tests/offload/test_transfer_native.py", "tests/experts/test_reading.py"),
    "tests/experts/test_dispatch_native.py",
]
_TESTS = {"address": [*_KERNELS, *_THREADS], "thread": _THREADS}


def main(kind: str, arguments: list[str]) -> int:
    compiler = os.environ.get("CXX", "g++")
    folder = FOLDER / kind
    folder.mkdir(parents=True, exist_ok=True)
    # The last -O counts: at -O3 the instrumented kernels compile for a quarter of an hour.
    wrapper = folder / "c++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {_FLAGS[kind]} -O1 -g1\n')
    wrapper.chmod(0o755)
    runtimes = [*_RUNTIMES[kind], "libstdc++.so"]  # the last, else exceptions are not intercepted
    found = [_output([*shlex.split(compiler), f"-print-file-name={name}"]) for name in runtimes]
    environment = os.environ | {
        **_OPTIONS,
        "CXX": str(wrapper),
        "XDG_CACHE_HOME": str(folder),
        "OMP_NUM_THREADS": "1" if kind == "thread" else "2",
    }
    targets = AMX_TARGETS if kind == "address" else TARGETS
    for target in (target for target in targets if "x86" not in target):
        build = f"from kernels.cpu.build import _built; print(_built({target.split()}))"
        subprocess.run([sys.executable, "-c", build], cwd=ROOT, env=environment, check=True)
    # Other instruction sets would be compiled in the middle of a test. -s: a finding ends the
    # process, and with it what pytest holds back.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"]
    command += ["-k", "not x86", *(arguments or _TESTS[kind])]
    preloaded = environment | {"LD_PRELOAD": ":".join(found)}
    for says, code in _PLANTED[kind].items():
        if not _finds(says, code, wrapper, preloaded):
            sys.exit(f"the sanitizer does not work here: a planted fault brought no {says!r}")
    return subprocess.run(command, cwd=ROOT, env=preloaded).returncode


def _finds(says: str, code: str, compiler: Path, preloaded: dict[str, str]) -> bool:
    """Whether a fault in a library that Python loads ends the process with this report."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "planted.cpp", Path(folder) / "planted.so"
        source.write_text(f'#include <thread>\nextern "C" void planted() {{ {code} }}\n')
        build = [str(compiler), "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(build, check=True)
        load = f"import ctypes; ctypes.CDLL({str(library)!r}).planted()"
        command = [sys.executable, "-c", load]
        done = subprocess.run(command, env=preloaded, capture_output=True, text=True)
        return done.returncode != 0 and says in done.stderr


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in _FLAGS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
