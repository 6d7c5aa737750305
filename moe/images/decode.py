"""Images as clients send them: checked, and decoded in a process of their own (`decoder`)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.errors import RequestError
from moe.extras import install_line, is_installed
from moe.helpers import HelperLimitError, Helpers
from moe.images.decoder import REFUSED, as_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 << 20
"""Most bytes of the file of one image."""
MAX_IMAGES = 64
"""Most images of a prompt."""
_SPARE_BYTES = 768 << 20  # the interpreter, Pillow and its libraries
_BYTES_A_PIXEL = 20  # the decoder's rows, RGBA on white, RGB, and the copies that are written
DECODERS = Helpers(
    Path(__file__).with_name("decoder.py"),
    memory=_SPARE_BYTES,
    seconds=10,
    most_bytes=2**32,
    at_once=2,  # each may take a gigabyte
)
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg|webp);base64,", re.IGNORECASE)


@dataclass(frozen=True)
class Picture:
    """A decoded image: RGB, and the digest of its pixels and size."""

    image: Image
    digest: bytes


def decode(sources: Sequence[object], most_pixels: int) -> list[Picture]:
    """Decode the images of a prompt.

    Args:
        sources: of each the bytes of a PNG, JPEG or WebP file, a data URL with such, or an image of
            Pillow.
        most_pixels: of all images together.

    Raises:
        RequestError: there are too many, or one is too large, damaged or something else.
        BusyError: the machine has no process for it.
    """
    if not is_installed("images"):
        raise RequestError(f"images need Pillow, which is not installed: {install_line('images')}")
    if len(sources) > MAX_IMAGES:
        raise RequestError(f"a prompt may have {MAX_IMAGES} images, and has {len(sources)}")
    pictures = []
    for number, source in enumerate(sources):
        picture = _decode(source, most_pixels, f"image {number} of the prompt")
        most_pixels -= picture.image.width * picture.image.height
        pictures.append(picture)
    return pictures


def _decode(source: object, most_pixels: int, what: str) -> Picture:
    from PIL import Image

    if isinstance(source, Image.Image):
        if source.width * source.height > most_pixels:
            shape = f"{source.width} x {source.height}"
            raise RequestError(f"{what} has {shape} pixels, more than {most_pixels}")
        image: Any = as_rgb(source)
    else:
        data = _bytes_of(source, what)
        size, pixels = _run(data, most_pixels, what)
        image = Image.frombytes("RGB", size, pixels)
    digest = hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=16)
    return Picture(image, digest.digest())


def _bytes_of(source: object, what: str) -> bytes:
    if isinstance(source, str):
        start = _DATA_URL.match(source)
        if start is None:
            raise RequestError(
                f"{what} must be a data URL (data:image/png;base64,..., or jpeg or webp), got "
                f"{source!r:.60}; no files are opened, and links only by a server with "
                "server.allow_image_urls: send the image itself"
            )
        if len(source) > MAX_BYTES * 4 // 3 + 1024:
            raise RequestError(f"{what} may have {MAX_BYTES} bytes; send a smaller one")
        try:
            source = base64.b64decode(source[start.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{what}: its data URL is not valid base64: {error}") from error
    if not isinstance(source, bytes | bytearray):
        raise RequestError(
            f"{what} must be the bytes of a PNG, JPEG or WebP file, got {type(source).__name__}"
        )
    if len(source) > MAX_BYTES:
        raise RequestError(f"{what} may have {MAX_BYTES} bytes, and has {len(source)}")
    return bytes(source)


def _run(data: bytes, most_pixels: int, what: str) -> tuple[tuple[int, int], bytes]:
    """Width and height, and the pixels, from the decoder's process."""
    most_pixels = max(most_pixels, 0)
    try:
        answer = DECODERS.ask(
            b"%d\n" % most_pixels + data, memory=_SPARE_BYTES + _BYTES_A_PIXEL * most_pixels
        )
    except HelperLimitError as error:
        raise RequestError(f"{what} cannot be read: its decoder {error}") from error
    if answer.startswith(REFUSED):
        raise RequestError(f"{what} cannot be read: {answer[len(REFUSED) :].decode()}")
    head, _, pixels = answer.partition(b"\n")
    width, height = map(int, head.split())
    return (width, height), pixels
