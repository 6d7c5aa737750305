"""A process that decodes one image: its file on standard input, pixels on standard output.

    python -I decoder.py MOST_PIXELS MOST_BYTES < photo.jpeg > pixels

It runs apart from the server, because decoders are large programs in C that read what strangers
send. It limits its own memory and time, writes no files, and knows three formats. The pixels are
RGB, one byte each, behind a line with width and height; what is wrong is one line on standard
error, and the exit status 3.
"""

from __future__ import annotations

import io
import resource
import sys
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP")
REFUSED = 3
_SECONDS = 10
_SPARE_BYTES = 768 << 20  # the interpreter, Pillow and its libraries
_BYTES_A_PIXEL = 20  # the decoder's rows, RGBA on white, RGB, and the copy that is written


def _limit(pixels: int) -> None:
    most = _SPARE_BYTES + _BYTES_A_PIXEL * pixels
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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


def main() -> int:
    pixels, size = map(int, sys.argv[1:3])
    from PIL import Image, ImageOps

    _limit(pixels)
    Image.MAX_IMAGE_PIXELS = None  # of our own limit Pillow would only warn up to twice as many
    data = sys.stdin.buffer.read(size + 1)
    try:
        found = Image.open(io.BytesIO(data), formats=FORMATS)
        if found.width * found.height > pixels:
            shape = f"{found.width} x {found.height}"
            print(f"it has {shape} pixels, more than {pixels}", file=sys.stderr)
            return REFUSED
        image = as_rgb(ImageOps.exif_transpose(found))
    except Exception as error:  # a decoder meets anything in what strangers send
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if type(error).__name__ == "UnidentifiedImageError":
            why = "it is no PNG, JPEG or WebP file"
        print(why, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(b"%d %d\n" % image.size)
    sys.stdout.buffer.write(image.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
