"""A GGUF file as a model directory: what everything else of loading expects.

The directory is temporary. It has links to the file, or to all parts of a split one, and what its
keys say as ``config.json`` and as files of a tokenizer, which transformers makes.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from experts.safetensors_io import HeaderError
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.checkpoint import listing
from moe.loading.gguf.config import gguf_config, rotary_tensors
from moe.loading.gguf.header import GgufFile, GgufTensor, open_gguf, package
from moe.loading.gguf.tokenizer import write_tokenizer

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_made: set[Path] = set()


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
    parts = [part.resolve() for part in _parts(file)]
    try:
        seen = tuple((part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    return _directory(file.name, seen, tokenizer)


def is_made(directory: Path) -> bool:
    """Whether `gguf_directory` made this directory, so that it is removed when the process ends."""
    return directory in _made


def _parts(file: Path) -> list[Path]:
    """All parts of a split file, of which `file` is the first."""
    split = SPLIT.fullmatch(file.name)
    if split is None:
        return [file]
    stem, number, count = split[1], int(split[2]), int(split[3])
    if number != 1:
        raise CheckpointError(f"{file} is part {number} of {count}; name the first part")
    parts = [file.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(listing(f"parts of {file} are missing", missing))
    return parts


@lru_cache(maxsize=4)
def _directory(name: str, seen: tuple[tuple[Path, int, int], ...], tokenizer: bool) -> Path:
    metadata, tensors = _headers([path for path, *_ in seen])
    try:
        config = gguf_config(metadata, tensors, _rotary_divisors(tensors))
    except HeaderError as error:
        raise CheckpointError(f"{seen[0][0]} {error}") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{seen[0][0]}: {error}") from error
    split = SPLIT.fullmatch(name)
    made = Path(tempfile.mkdtemp(prefix="moe-gguf-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
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
    """What a configuration needs of the data of tensors; raises `HeaderError`."""
    return {
        name: np.fromfile(
            tensor.file, "<f4", (tensor.end - tensor.start) // 4, offset=tensor.start
        ).tolist()
        for name, tensor in rotary_tensors(tensors).items()
    }


def _headers(paths: list[Path]) -> tuple[dict[str, object], dict[str, GgufTensor]]:
    """The first part's keys, and the tensors of all."""
    files = open_all(paths)
    for file in files:
        os.close(file.fd)
    first = files[0].metadata
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    stated = first.get("split.count", 1), first.get("split.tensors.count", len(tensors))
    if stated not in ((len(files), len(tensors)), (0, len(tensors))):
        raise CheckpointError(
            f"{paths[0]} is one of {stated[0]} parts with {stated[1]} tensors, and {len(files)} "
            f"with {len(tensors)} are here; give it the names of parts (-00001-of-0000N.gguf) again"
        )
    return first, tensors


def open_all(paths: list[Path]) -> list[GgufFile]:
    """The files, open. Raises `CheckpointError` listing what is wrong with all of them."""
    files: list[GgufFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            files.append(open_gguf(path))
        except HeaderError as error:
            problems.append(f"{path}: {error}")
            continue
        for name in files[-1].tensors.keys() & {n for f in files[:-1] for n in f.tensors}:
            problems.append(f"{path}: tensor {name!r} is also in another part")
    if problems:
        for file in files:
            os.close(file.fd)
        raise CheckpointError(listing("cannot use these GGUF files", problems))
    return files
