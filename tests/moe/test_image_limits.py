"""What the process that decodes an image may take, whatever the image does to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe.errors import RequestError
from moe.images import decode, decoder

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
    assert decoder._SPARE_BYTES == 768 << 20
    assert decoder._BYTES_A_PIXEL <= 32


def test_the_decoder_takes_its_limits_before_it_reads_a_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Limited(Exception):
        pass

    def limit(pixels: int) -> None:
        raise Limited(pixels)

    monkeypatch.setattr(decoder, "_limit", limit)
    monkeypatch.setattr(sys, "argv", ["decoder.py", "7", "9"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(Limited, match="7"):
        decoder.main()


def test_images_of_a_prompt_are_counted_and_measured_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "_run", lambda *_: pytest.fail("decoded"))
    with pytest.raises(RequestError, match="a prompt may have 64 images, and has 65"):
        decode.decode([b""] * 65, 10)
    url = "data:image/png;base64," + "A" * (decode.MAX_BYTES * 4 // 3 + 1025)
    with pytest.raises(RequestError, match="image 0 of the prompt may have 33554432 bytes; send"):
        decode.decode([url], 10)
    monkeypatch.setattr(decode, "is_installed", lambda _: False)
    with pytest.raises(RequestError, match="images need Pillow, which is not installed"):
        decode.decode([b""], 10)


def test_a_decoder_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert decode._SECONDS == 30.0
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(decode, "_DECODER", slow)
    monkeypatch.setattr(decode, "_SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"took more than 0\.2 s to decode"):
        decode.decode([b"x"], 10)
