"""What the process that decodes an image may take, whatever the image does to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe.images import decoder

PIXELS = 1000
MOST = decoder._SPARE_BYTES + decoder._BYTES_A_PIXEL * PIXELS
TRIED = {
    "memory": (f"bytearray({MOST})", "MemoryError"),
    "files": ("open('made', 'wb').write(b'x' * (1 << 20))", "OSError: [Errno 27]"),
}


def inside(code: str, folder: Path) -> str:
    """What is said by a process with the decoder's limits."""
    before = f"import resource, sys; sys.path.insert(0, {str(Path(decoder.__file__).parent)!r})\n"
    before += f"import decoder; decoder._limit({PIXELS})\n"
    done = subprocess.run(
        [sys.executable, "-c", before + code], capture_output=True, text=True, cwd=folder
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("what", TRIED)
def test_what_is_beyond_is_refused_by_the_system(what: str, tmp_path: Path) -> None:
    code, error = TRIED[what]
    assert error in inside(code, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 0


def test_time_and_dumps_of_memory_have_limits(tmp_path: Path) -> None:
    code = "print(*(resource.getrlimit(x) for x in (resource.RLIMIT_CPU, resource.RLIMIT_CORE)))"
    assert inside(code, tmp_path) == "(10, 10) (0, 0)\n"


def test_the_limits_are_those_that_are_promised() -> None:
    assert (decoder._SPARE_BYTES, decoder._BYTES_A_PIXEL) == (768 << 20, 12)
