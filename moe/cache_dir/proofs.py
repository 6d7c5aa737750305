"""Proofs of one load that later loads of the same model need not repeat.

A load tries each faster way beside transformers' forward, and goes it only if both agree. The same
code, weights, settings, libraries, processor and GPU agree again, so the verdict is kept: one JSON
file a load, named by a digest of all of these (`proof_key`). A load finds out anew what it builds
(descriptions, traces, modules); each verdict also names the thing that it is about, and counts for
no other (`outline`).

    with proofs_of(path, profile, ranks, device) as proofs:
        enabled = current_proofs().recall("packing", subject, bool, prove)   # anywhere below

`moe.cache_dir.files` writes the file, and reads it only if it is whole and this user's. The setting
``model.proof_cache: false`` and the variable ``MOE_PROOF_CACHE=`` (empty) keep nothing. A test that
replaces code at run time (a patched kernel, a patched probe) must switch it off: the key knows
files only. Weights up to `WHOLE_BYTES` a file are known by their content, so the same tiny model in
another temporary directory finds its proofs.

Ranks load by themselves before they are joined, so each recalls what a rank of a world of this size
has proven. A GPU records and compiles its steps in each process, and proves what it recorded there;
it recalls the rest (packing, cuts, footprints).
"""

from __future__ import annotations

import hashlib
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from moe.cache_dir.files import (
    digest_of,
    hardware,
    private_directory,
    read,
    surroundings,
    write,
)
from moe.settings import Profile
from moe.settings.profile import KEYS, value_of

WHOLE_BYTES = 16 << 20
"""Files up to this size are known by their content, others by size, times, inode and samples."""
_OTHER_SETTINGS = ("server.", "generation.", "model.proof_cache")
"""Settings that no proof depends on."""
_OF_A_RANK = ("memory.device_gib",)
"""Settings that a rank takes from what memory happens to be free, as one process does unsaid."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096

_CPU = torch.device("cpu")

T = TypeVar("T")


class Proofs:
    """The verdicts of one load.

    Args:
        key: of the load.
        file: where they are kept; None: nowhere.
    """

    def __init__(self, key: str = "", file: Path | None = None) -> None:
        self._key, self._file = key, file
        found = None if file is None else read(file, key)
        self._known, self._since = ({}, "") if found is None else (found.content, found.date)
        self._recalled, self._proven = dict[str, Any](), dict[str, Any]()
        self._asked = Counter[str]()

    @property
    def status(self) -> str:
        """``proven now``, or ``proven on DATE`` if no verdict of this load is new."""
        old = self._recalled and not self._proven
        return f"proven on {self._since}" if old else "proven now"

    def recall(
        self,
        name: str,
        subject: object,
        kind: type[T],
        prove: Callable[[], T],
        refusal: type[Exception] | None = None,
    ) -> T:
        """Return what ``prove`` gives, from an earlier load of the same model or now.

        Args:
            name: of the proof.
            subject: what it is about, as data (`outline`); another one is proven anew.
            kind: of the value; pydantic takes it to JSON and back.
            prove: must have no other effect than its value. What it raises is not kept.
            refusal: but an error of just this class is a verdict, too.
        """
        if self._file is None:
            return prove()
        label = f"{name} {digest_of(subject)}"
        self._asked[label] += 1  # a model and the layer that drafts for it may look the same
        label += f" {self._asked[label]}"
        adapter = TypeAdapter(kind)
        if label in self._known:
            with suppress(ValidationError, TypeError, KeyError):
                found = self._known[label]
                if "refused" in found and refusal is not None:
                    self._recalled[label] = found
                    raise refusal(str(found["refused"]))
                value = adapter.validate_python(found["proven"])
                self._recalled[label] = found
                return value
        self._proven[label] = {}
        try:
            value = prove()
        except Exception as error:
            if refusal is not None and type(error) is refusal:
                self._proven[label] = {"refused": str(error)}
            raise
        self._proven[label] = {"proven": adapter.dump_python(value, mode="json")}
        return value

    def keep(self) -> None:
        """Write what is new. What cannot be written is proven anew next time."""
        if self._file is not None and self._proven:
            proven = {label: verdict for label, verdict in self._proven.items() if verdict}
            write(self._file, self._key, self._known | proven)


_current: ContextVar[Proofs | None] = ContextVar("_current", default=None)


def current_proofs() -> Proofs:
    """Return those of the load around the caller, or some that keep nothing."""
    return _current.get() or Proofs()


@contextmanager
def proofs_of(
    path: Path, profile: Profile, ranks: int = 1, device: torch.device = _CPU
) -> Iterator[Proofs]:
    """The proofs of a load or plan; they are kept if it succeeds.

    Args:
        path: the model's directory.
        ranks: that share the experts.
    """
    proofs, directory = Proofs(), private_directory() if profile.model.proof_cache else None
    if directory is not None:
        key = proof_key(path, profile, ranks, device)
        proofs = Proofs(key, directory / f"{key}.json")
    token = _current.set(proofs)
    try:
        yield proofs
        proofs.keep()
    finally:
        _current.reset(token)


def proof_key(path: Path, profile: Profile, ranks: int = 1, device: torch.device = _CPU) -> str:
    """A digest of all that verdicts about a model depend on."""
    other = _OTHER_SETTINGS if ranks == 1 else (*_OTHER_SETTINGS, *_OF_A_RANK)
    files = [file for file in sorted(path.iterdir()) if "hot-set" not in file.name]
    settings = [key for key in KEYS.leaves if not key.startswith(other)]
    facts = {
        **surroundings(),
        "settings": [[key, repr(value_of(profile, key))] for key in settings],
        "files": [[file.name, _identity(file)] for file in files],
        "architecture": [*_architecture(path)],
        "ranks": ranks,
        "device": hardware(device),
    }
    return digest_of(facts)


def outline(part: object) -> object:
    """Return the parts of a description or trace, as data: kinds, sizes and numbers, not
    weights."""
    if part is None or isinstance(part, str | int | float | bool):
        return part
    if isinstance(part, Tensor):
        return [str(part.dtype), *part.shape, *part.stride()]
    if isinstance(part, nn.Module):
        return [type(part).__name__, part.extra_repr()]
    if is_dataclass(part):
        names = [field.name for field in fields(part)]
        return [type(part).__name__, *([name, outline(getattr(part, name))] for name in names)]
    if isinstance(part, Mapping):
        return [[outline(key), outline(value)] for key, value in part.items()]
    if isinstance(part, set | frozenset):
        return sorted(str(outline(item)) for item in part)
    if isinstance(part, Sequence):
        return [outline(item) for item in part]
    return getattr(part, "__qualname__", None) or type(part).__name__


def _identity(file: Path) -> object:
    """Return facts that change when a byte of a file does. Linux sets the time of a change
    (``ctime``) itself: nobody can write to a file and leave it as it was."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        return [found.st_mode, found.st_ino, found.st_mtime_ns]
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        if found.st_size <= WHOLE_BYTES:
            digest.update(stream.read())
            return digest.hexdigest()
        for index in range(_SAMPLES):
            stream.seek(found.st_size * index // _SAMPLES)
            digest.update(stream.read(_SAMPLE_BYTES))
    times = found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino
    return [found.st_size, *times, digest.hexdigest()]


def _architecture(path: Path) -> Iterator[str]:
    """Digests of transformers' code for the model: somebody may have edited it in place."""
    found = find_spec("transformers")
    locations = None if found is None else found.submodule_search_locations
    if not locations:
        return
    config = (path / "config.json").read_text(encoding="utf-8", errors="replace")
    kinds = {text.partition('"')[0] for text in config.split('"model_type": "')[1:]}
    folders = [Path(locations[0], "models", kind.replace("-", "_")) for kind in sorted(kinds)]
    for folder in (Path(locations[0]), Path(locations[0], "integrations"), *folders):
        for file in sorted(folder.glob("*.py")):
            yield f"{file.name} {hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()}"
