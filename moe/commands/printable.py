"""Texts that others had a say in, as a terminal may have them.

Control characters could move the cursor, hide lines, set a title or make a terminal answer as if
its user had typed: models, their files and hubs may write them.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Escape each control character but tab and line feed as Python does: ``\\x1b``."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)
