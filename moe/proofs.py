"""Proofs of one load that later loads of the same model need not repeat.

A load tries each faster way beside transformers' forward, and goes it only if both agree. The same
code, weights, settings, libraries and processor agree again, so the verdict is kept: one JSON file
a load, named by a digest of all of these (`proof_key`). A load finds out anew what it builds
(descriptions, traces, modules); each verdict also names the thing that it is about, and counts for
no other (`outline`). What the key does not cover is not kept: several ranks and GPUs prove anew.

    with proofs_of(path, profile, ranks, device) as proofs:
        enabled = recall("packing", subject, bool, prove)   # anywhere below

Files that are damaged, of another user or of another version are as good as absent; a directory
that others may write to is not used. There are at most `MOST_FILES` of at most `MOST_BYTES`.

Tests: ``MOE_PROOF_CACHE=DIRECTORY`` keeps proofs there for a whole session, in all processes that
inherit it; ``MOE_PROOF_CACHE=`` (empty) keeps none, and so does the setting ``model.proof_cache:
false``. A test that replaces code at run time (a patched kernel, a patched probe) must switch it
off: the key knows files only. Weights up to `WHOLE_BYTES` a file are known by their content, so
the same tiny model in another temporary directory finds its proofs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from experts.files import read_small
from experts.safetensors_io import write_bytes
from kernels.cpu import choose_kernel
from moe.machine import ROOT, code_digest
from moe.settings import Profile
from moe.settings.profile import KEYS, value_of

VERSION = 1
MOST_FILES, MOST_BYTES = 512, 256 << 10
WHOLE_BYTES = 16 << 20
"""Files up to this size are known by their content, others by size, times, inode and samples."""
ENVIRONMENT = "MOE_PROOF_CACHE"
_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "greenlet", "triton")
_VARIABLES = (
    *(
        "OMP_",
        "GOMP_",
        "KMP_",
        "MKL_",
        "OPENBLAS_",
        "DNNL_",
        "ONEDNN_",
        "ATEN_",
        "TORCH",
        "PYTORCH",
    ),
    *("TRITON_", "CUDA_", "MOE_CPU_KERNEL", "LD_", "GLIBC_TUNABLES"),
)
"""How variables begin that change what libraries compute."""
_OTHER_SETTINGS = ("server.", "generation.", "model.proof_cache")
"""Settings that no proof depends on."""
_OF_THE_MOMENT = ("processor", "cpu MHz", "bogomips", "physical id", "core id", "apicid", "initial")
_SAMPLES, _SAMPLE_BYTES = 64, 4096

T = TypeVar("T")
_logger = logging.getLogger("moe")
_current: ContextVar[Proofs | None] = ContextVar("_current", default=None)


class Proofs:
    """The verdicts of one load.

    Args:
        key: of the load.
        file: where they are kept; None: nowhere.
    """

    def __init__(self, key: str = "", file: Path | None = None) -> None:
        self._key, self._file = key, file
        self._kept, self._since = ({}, "") if file is None else _read(file, key)
        self._used: dict[str, Any] = {}
        self._asked = Counter[str]()
        self._proven_now = False

    @property
    def status(self) -> str:
        """``proven now``, or ``proven on DATE`` if no verdict of this load is new."""
        return f"proven on {self._since}" if self._used and not self._proven_now else "proven now"

    def recall(
        self,
        name: str,
        subject: object,
        kind: type[T],
        prove: Callable[[], T],
        refusal: type[Exception] | None = None,
    ) -> T:
        """See `recall`."""
        label = f"{name} {digest_of(subject)}"
        self._asked[label] += 1  # a model and the layer that drafts for it may look the same
        label += f" {self._asked[label]}"
        adapter = TypeAdapter(kind)
        if label in self._kept:
            with suppress(ValidationError, TypeError, KeyError):
                found = self._kept[label]
                if "refused" in found and refusal is not None:
                    self._used[label] = found
                    raise refusal(str(found["refused"]))
                value = adapter.validate_python(found["proven"])
                self._used[label] = found
                return value
        self._proven_now = True
        try:
            value = prove()
        except Exception as error:
            if refusal is not None and type(error) is refusal:
                self._used[label] = {"refused": str(error)}
            raise
        self._used[label] = {"proven": adapter.dump_python(value, mode="json")}
        return value

    def keep(self) -> None:
        """Write what is new. What cannot be written is proven anew next time."""
        if self._file is None or not self._proven_now:
            return
        entry = {"version": VERSION, "key": self._key, "date": date.today().isoformat()}
        entry |= {"verdicts": self._used, "sum": digest_of(self._used)}
        content = json.dumps(entry).encode()
        if len(content) > MOST_BYTES:
            return
        try:
            write_bytes(self._file, content)
            _drop_old(self._file.parent)
        except OSError as error:
            _logger.info("proofs are not kept: %s", error)


def recall(
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
        prove: must have no other effect than its value.
        refusal: an error of just this class is a verdict, too.
    """
    proofs = _current.get()
    if proofs is None:
        return prove()
    return proofs.recall(name, subject, kind, prove, refusal)


@contextmanager
def proofs_of(path: Path, profile: Profile, ranks: int, device: torch.device) -> Iterator[Proofs]:
    """The proofs of a load; they are kept if it succeeds.

    Args:
        path: the model's directory.
    """
    proofs = Proofs()
    if profile.model.proof_cache and ranks == 1 and device.type == "cpu":
        directory = proof_directory()
        if directory is not None and (usable := _private(directory)):
            key = proof_key(path, profile)
            proofs = Proofs(key, usable / f"{key}.json")
    token = _current.set(proofs)
    try:
        yield proofs
        proofs.keep()
    finally:
        _current.reset(token)


def proof_directory() -> Path | None:
    """Where proofs are kept; None: nowhere."""
    stated = os.environ.get(ENVIRONMENT)
    if stated is not None:
        return Path(stated).expanduser() if stated else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "moe-inference" / "proofs"


def forget() -> int:
    """Remove all kept proofs; returns how many there were."""
    directory = proof_directory()
    files = [] if directory is None or not directory.is_dir() else [*directory.glob("*.json")]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def proof_key(path: Path, profile: Profile) -> str:
    """A digest of all that verdicts about a model depend on."""
    kernel, why = choose_kernel()
    files = [file for file in sorted(path.iterdir()) if "hot-set" not in file.name]
    settings = [key for key in KEYS.leaves if not key.startswith(_OTHER_SETTINGS)]
    facts = {
        "version": VERSION,
        "code": code_digest(),
        "libraries": [sys.version, *((name, _version(name)) for name in _LIBRARIES)],
        "torch": [
            torch.version.git_version,
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()),
        ],
        "processor": [platform.machine(), *_processor(ROOT), len(os.sched_getaffinity(0))],
        "environment": sorted(
            item for item in os.environ.items() if item[0].startswith(_VARIABLES)
        ),
        "settings": [[key, repr(value_of(profile, key))] for key in settings],
        "kernels": [why, None if kernel is None else _identity(Path(kernel.library._name))],
        "files": [[file.name, _identity(file)] for file in files],
        "architecture": [*_architecture(path)],
    }
    return digest_of(facts)


def digest_of(data: object) -> str:
    """A digest of what can be written as JSON."""
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def outline(part: object) -> object:
    """What a description or trace consists of, as data: kinds, sizes and numbers, not weights."""
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


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor(root: Path) -> list[str]:
    """The lines of /proc/cpuinfo about the first processor that are the same at each start."""
    try:
        first = (root / "proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if not line.startswith(_OF_THE_MOMENT)]


def _identity(file: Path) -> object:
    """What changes when a byte of a file does. Linux sets the time of a change (``ctime``) itself:
    nobody can write to a file and leave it as it was."""
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


def _private(directory: Path) -> Path | None:
    """The directory, made with mode 0700; None if it cannot be trusted or made."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        _logger.info("proofs are not kept: %s", error)
        return None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        _logger.warning(
            "proofs are not kept: %s must belong to this user alone (chmod 700)", directory
        )
        return None
    return directory


def _read(file: Path, key: str) -> tuple[dict[str, Any], str]:
    """The verdicts in a file, and their date; none if it is not whole, ours and of this key."""
    try:
        if file.stat().st_uid != os.geteuid():
            return {}, ""
        entry = json.loads(read_small(file, MOST_BYTES))
        verdicts, since = entry["verdicts"], date.fromisoformat(entry["date"])
        whole = entry["sum"] == digest_of(verdicts) and isinstance(verdicts, dict)
        if whole and (entry["version"], entry["key"]) == (VERSION, key):
            return verdicts, since.isoformat()
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return {}, ""


def _drop_old(directory: Path) -> None:
    """Keep the newest `MOST_FILES`."""
    files = sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MOST_FILES:]:
        file.unlink(missing_ok=True)
