"""A GGUF file as a model directory: what everything else of loading expects.

The directory is temporary. It has links to the file, or to all parts of a split one, and what its
keys say as ``config.json`` and as files of a tokenizer, which transformers makes.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from experts.files import HeaderError
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.gguf.config import gguf_config, rotary_tensors
from moe.loading.gguf.header import GgufTensor, package
from moe.loading.gguf.parts import parts_of, read_headers
from moe.loading.gguf.tokenizer import write_tokenizer
from moe.loading.remote.names import SPLIT

_made: set[Path] = set()


def temporary_folder(prefix: str) -> Path:
    """A new folder for this user alone, which is removed when the process ends.

    Raises `CheckpointError` where none can be made.
    """
    try:
        made = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise CheckpointError(
            f"a model needs a temporary folder for its headers, and none can be written ({error}); "
            "set TMPDIR to one that can"
        ) from error
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def gguf_directory(file: Path, *, tokenizer: bool = True) -> Path:
    """The model directory of a GGUF file, made once a process and removed at its end.

    Args:
        file: the first part of a split one.
        tokenizer: also make the files of its tokenizer, which takes seconds.

    Raises:
        CheckpointError: the file, or another part of it, is absent or damaged.
        UnsupportedModelError: its architecture is not known, or the package ``gguf`` is absent.
    """
    package()
    parts = [part.resolve() for part in parts_of(file)]
    try:
        seen = tuple((part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    return _directory(file.name, seen, tokenizer)


def is_made(directory: Path) -> bool:
    """Return whether `gguf_directory` made this directory, so that it is removed when the process
    ends."""
    return directory in _made


@lru_cache(maxsize=4)
def _directory(name: str, seen: tuple[tuple[Path, int, int], ...], tokenizer: bool) -> Path:
    metadata, tensors = read_headers([path for path, *_ in seen])
    try:
        config = gguf_config(metadata, tensors, _rotary_divisors(tensors))
    except HeaderError as error:
        raise CheckpointError(f"{seen[0][0]} {error}") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{seen[0][0]}: {error}") from error
    split = SPLIT.fullmatch(name)
    made = temporary_folder("moe-gguf-")
    stem = split[1] if split else name.removesuffix(".gguf")
    directory = made / (stem if stem.strip(".") else "model")  # a file may be called "...gguf"
    directory.mkdir()
    for index, (path, *_) in enumerate(seen):
        (directory / f"{index:05}.gguf").symlink_to(path)
    if tokenizer:
        write_tokenizer(directory, "00000.gguf", metadata)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _made.add(directory)
    return directory


def _rotary_divisors(tensors: Mapping[str, GgufTensor]) -> dict[str, list[float]]:
    """Read the tensors that a configuration needs; raises `HeaderError`."""
    return {
        name: np.fromfile(
            tensor.file, "<f4", (tensor.end - tensor.start) // 4, offset=tensor.start
        ).tolist()
        for name, tensor in rotary_tensors(tensors).items()
    }
