"""Decodes one image, as the program of helper processes (`moe.helper_process`).

Decoders are large programs in C that read what strangers send, so they run apart from the server.
This one knows three formats.
"""

from __future__ import annotations

import io
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP")
REFUSED = b"!"
"""Beginning of an answer that says why there are no pixels."""


def prepare() -> None:
    """Import Pillow."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # of our own limit it would only warn up to twice as many


def as_rgb(image: Any) -> Any:
    """An image of Pillow as RGB: 16 bits of grey as their upper 8, what is transparent on white.

    Pillow's own conversion cuts every number above 255 off, and shows what alpha hides.
    """
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = image.convert("I")
    if image.mode == "I":
        image = image.point(lambda grey: grey / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        front = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", front.size, "white"), front)
    return image.convert("RGB")


def answer(request: bytes) -> bytes:
    """The most pixels, a line break and an image's file to width, height, a line break and pixels.

    The pixels are RGB, one byte each.
    """
    from PIL import Image, ImageOps

    most, _, data = request.partition(b"\n")
    try:
        found = Image.open(io.BytesIO(data), formats=FORMATS)
        if found.width * found.height > int(most):
            shape = f"{found.width} x {found.height}"
            return REFUSED + f"it has {shape} pixels, more than {int(most)}".encode()
        image = as_rgb(ImageOps.exif_transpose(found))
    except MemoryError:
        raise
    except Exception as error:  # a decoder meets anything in what strangers send
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if type(error).__name__ == "UnidentifiedImageError":
            why = "it is no PNG, JPEG or WebP file"
        return REFUSED + why.encode()
    return b"%d %d\n" % image.size + image.tobytes()
