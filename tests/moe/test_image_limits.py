"""What the process that decodes an image may take, whatever the image does to it."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from moe.errors import RequestError
from moe.helpers import HelperLimitError
from moe.images import decode, decoder


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_a_decoder_has_the_limits_that_are_promised() -> None:
    """`tests/moe/test_helpers.py` shows that helper processes keep to theirs."""
    own = decode.DECODERS
    assert (own._seconds, own._kept, own._turns._value) == (10, 0, 2)  # type: ignore[union-attr]
    assert decode._SPARE_BYTES == 768 << 20
    assert decode._BYTES_A_PIXEL <= 32


def test_a_decoder_may_take_what_the_pixels_need_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def ask(request: bytes, memory: int) -> bytes:
        asked.append((request, memory))
        raise HelperLimitError("takes more than 9 MiB of memory")

    monkeypatch.setattr(decode.DECODERS, "ask", ask)
    with pytest.raises(RequestError, match="cannot be read: its decoder takes more than 9 MiB"):
        decode.decode([b"file"], 1000)
    assert asked == [(b"1000\nfile", decode._SPARE_BYTES + 1000 * decode._BYTES_A_PIXEL)]


def test_memory_that_runs_out_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def transpose(image: Image.Image) -> Image.Image:
        raise MemoryError

    assert decoder.answer(b"6\n" + png(3, 2)).startswith(b"3 2\n")
    monkeypatch.setattr("PIL.ImageOps.exif_transpose", transpose)
    with pytest.raises(MemoryError):
        decoder.answer(b"6\n" + png(3, 2))


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
