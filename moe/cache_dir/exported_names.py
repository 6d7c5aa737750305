"""Names that transformers exports, kept so that it need not look for them at each import.

Each ``import transformers`` reads all 1,700 files of its models to find what they export, a third
of a second of a start. `keep_names` puts a function before that one: it looks at the sizes and
times of these files only, and takes the names from `moe.cache_dir.files` if none has changed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE, FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"

Find = Callable[[str | os.PathLike[str]], dict[Any, Any]]


def keep_names() -> None:
    """Let transformers look into the kept names when it is imported, in this process."""
    if MODULE not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def recalling(find: Find, library: Path) -> Find:
    """``find`` of transformers, which recalls what it found in ``library/models``."""
    models = str(library / "models")

    def found(path: str | os.PathLike[str]) -> dict[Any, Any]:
        if os.fspath(path) != models:
            return find(path)
        from moe.cache_dir import (
            files,  # needs torch, which whoever needs transformers needs as well
        )

        directory = files.private_directory()
        if directory is None:
            return find(path)
        with suppress(OSError):  # a file that has gone: transformers will say so
            key = files.digest_of([str(library), _state(library)])
            file = directory / f"names-{files.digest_of(str(library))}.json"
            if (known := files.read(file, key)) is not None:
                return _from_lists(known.content["names"])
            names = find(path)
            lists = {"names": _to_lists(names)}
            if _from_lists(lists["names"]) == names:  # the form of another version may be richer
                files.write(file, key, lists)
            return names
        return find(path)

    return found


def _state(library: Path) -> str:
    """Return a text that changes when somebody changes a file that names come from."""
    digest = hashlib.blake2b(digest_size=16)
    rules = (library / "utils" / "import_utils.py").stat()
    digest.update(f"{sys.version} {rules.st_size} {rules.st_mtime_ns}".encode())
    for line in sorted(_files(str(library / "models"))):
        digest.update(line.encode())
    return digest.hexdigest()


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(entry.path)
            else:
                found = entry.stat()
                yield f"{entry.path} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}\n"


def _to_lists(names: Any) -> Any:
    """The same as JSON: packages and modules by name, and by the backends that they need."""
    if isinstance(names, dict):
        return [
            [sorted(key) if isinstance(key, frozenset) else key, _to_lists(value)]
            for key, value in names.items()
        ]
    return {"names": sorted(names)} if isinstance(names, set) else {"names": []}


def _from_lists(lists: Any) -> Any:
    if isinstance(lists, dict):
        return set(lists["names"])
    return {
        key if isinstance(key, str) else frozenset(key): _from_lists(value) for key, value in lists
    }


class _Finder(MetaPathFinder):
    """Finds one module, once, where everybody finds it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapping(spec.loader)
        return spec


class _Wrapping(Loader):
    """Runs a module by its own loader, and puts `recalling` into it."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        find = getattr(module, FUNCTION, None)
        if find is not None and module.__file__ is not None:
            setattr(module, FUNCTION, recalling(find, Path(module.__file__).parents[1]))
