"""What a test file has replaced in the product and not put back: later tests of the process see it.

Two threads that undo each other's patch do this, or a patch without an end. `tests/conftest.py`
looks behind each file, so that this file fails, not one that comes later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

import torch

ROOMS = {"moe", "routing", "experts", "offload", "kernels"}
Attribute = tuple[ModuleType | type, str, object]


class Originals:
    """The functions, classes, methods and constants of the product's modules as they were when each
    module was first seen: now, or by `put_back`."""

    def __init__(self) -> None:
        self._seen, self._attributes = set[str](), list[Attribute]()
        self._dtype = torch.get_default_dtype()
        self._look()

    def put_back(self) -> list[str]:
        """Put the originals back; the names of those that had been replaced."""
        found = []
        for owner, key, value in self._attributes:
            if vars(owner).get(key) is not value:
                found.append(f"{owner.__name__}.{key}")
                setattr(owner, key, value)
        if torch.get_default_dtype() != self._dtype:
            found.append("torch.get_default_dtype()")
            torch.set_default_dtype(self._dtype)
        self._look()
        return found

    def _look(self) -> None:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ROOMS and name not in self._seen:
                self._seen.add(name)
                self._attributes += _attributes(sys.modules[name])


def _attributes(module: ModuleType) -> Iterator[Attribute]:
    for key, value in [*vars(module).items()]:
        if isinstance(value, (FunctionType, type)) or key.isupper():
            yield module, key, value
        if isinstance(value, type) and value.__module__ == module.__name__:
            for name, own in vars(value).items():
                if isinstance(own, (FunctionType, property, classmethod, staticmethod)):
                    yield value, name, own
