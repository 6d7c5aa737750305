"""Arguments that are not quite JSON: what models write as their templates do.

`from_notation` reads the notation of `BracedBody`: bare keys, strings between two quotes that are
no JSON's and without escapes, and numbers and words as JSON or Python has them.
"""

from __future__ import annotations

import json
import re
from typing import Any

PYTHON = {"True": True, "False": False, "None": None}
"""Words as a template's `string` filter writes them."""


def loads(text: str) -> Any:
    """The value of JSON text; None where it is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def from_notation(text: str, quote: str) -> Any:
    """The value of a text; None where it is damaged."""
    marks = re.escape(quote)
    word = re.compile(
        rf"{marks}(?P<string>.*?){marks}|(?P<mark>[{{}}\[\],:])|(?:(?!{marks})[^{{}}\[\],:])+",
        re.DOTALL,
    )
    words = list(word.finditer(text))
    if sum(found.end() - found.start() for found in words) < len(text):
        return None
    made = []
    for found, following in zip(words, [*words[1:], None], strict=True):
        string, mark, bare = found["string"], found["mark"], found[0].strip()
        if string is not None:
            made.append(json.dumps(string))
        elif mark is not None:
            made.append(mark)
        elif bare:
            is_key = following is not None and following["mark"] == ":"
            made.append(_word(bare, is_key=is_key))
    return loads("".join(made))


def _word(bare: str, *, is_key: bool) -> str:
    """A word without quotes as JSON."""
    if bare in PYTHON and not is_key:
        return json.dumps(PYTHON[bare])
    value = loads(bare)
    known = isinstance(value, str) or (not is_key and (value is not None or bare == "null"))
    return bare if known else json.dumps(bare)
