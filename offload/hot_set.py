"""Save the most valuable experts at the end of a run, for the next run to load first.

They are kept in a small file beside the store, or in the user's cache if the store is read-only.
The file is only a hint: a failure to read or write it is a warning.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from experts.files import read_small
from experts.safetensors_io import digest_of, write_bytes

FILE_NAME = "hot-set.json"
_logger = logging.getLogger("moe")

HotSet = list[tuple[int, int]]
"""(layer, expert), most valuable first."""


def hot_set_file(directory: Path) -> Path:
    """Return the file of a store's hot set."""
    directory = directory.resolve()
    if os.access(directory, os.W_OK):
        return directory / FILE_NAME
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = digest_of(os.fsencode(directory)).hexdigest()
    return cache / "moe-inference" / "hot-sets" / f"{name}.json"


def save_hot_set(file: Path, hot_set: HotSet) -> None:
    """Logs a warning if the file cannot be written."""
    try:
        if file.name != FILE_NAME:  # never create the store's own directory
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(file, json.dumps(hot_set, separators=(",", ":")).encode())
    except OSError as error:
        _logger.warning("the hot set was not saved to %s: %s", file, error.strerror)


def load_hot_set(file: Path, experts: Sequence[int]) -> HotSet:
    """The saved hot set; empty if there is none that fits layers of this many experts each."""
    try:
        content = json.loads(read_small(file))
        pairs = [(layer, expert) for layer, expert in content]
        fits = all(
            type(layer) is type(expert) is int
            and 0 <= layer < len(experts)
            and 0 <= expert < experts[layer]
            for layer, expert in pairs
        )
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError):
        fits = False
    if not fits:
        _logger.warning("%s is no hot set of this model; it is not used", file)
        return []
    return list(dict.fromkeys(pairs))
