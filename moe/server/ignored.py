"""Fields of a request that are taken without effect: named in its answer, and once in the log.

An `Ignored` is the context in which a body is validated. Without one (``server.unknown_fields:
refuse``) whatever is not honoured is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders

HEADER = "x-moe-ignored"
_MOST_NAMED = 32
_MOST_LOGGED = 256
"""Names in the log, of all requests: clients may make up as many as they like."""
_LONGEST = 64
_logged = set[str]()
_logger = logging.getLogger("moe.server")


class Ignored:
    """The names of fields of one request that have no effect, in the order in which they came."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def add(self, *names: str) -> None:
        """Note fields by the names that clients know, such as ``tools.defer_loading``."""
        for name in names:
            if len(self._names) < _MOST_NAMED:
                self._names.setdefault(_printable(name))

    def name_in(self, headers: MutableHeaders, route: str) -> None:
        """Name the fields in the headers of an answer, and in the log those that are new there."""
        if not self._names:
            return
        headers[HEADER] = ", ".join(self._names)
        self.log(route)

    def log(self, where: str) -> None:
        """Name those fields in the log that it has not named yet, and that have names of fields."""
        new = [name for name in self._names if name not in _logged and "?" not in name]
        new = new[: max(0, _MOST_LOGGED - len(_logged))]
        if new:
            _logged.update(new)
            _logger.warning(
                "%s: taken without effect: %s (server.unknown_fields: refuse refuses it)",
                where,
                ", ".join(new),
            )


def nameable(fields: Iterable[tuple[str, object]]) -> list[str]:
    """The names of those fields that ask for something: null counts as left out."""
    return [name for name, value in fields if value is not None]


def _printable(name: str) -> str:
    """A name that a header and a line of the log can have; clients make them up."""
    return re.sub(r"[^\w.\-]", "?", name, flags=re.ASCII)[:_LONGEST]
