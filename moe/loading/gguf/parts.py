"""The files of one GGUF model, alone or split into parts: found, opened and checked together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from experts.files import HeaderError
from moe.errors import CheckpointError, UnsupportedModelError, listing
from moe.loading.gguf.header import GgufFile, GgufTensor, open_gguf
from moe.loading.remote.names import SPLIT


def parts_of(file: Path) -> list[Path]:
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


def read_headers(paths: list[Path]) -> tuple[dict[str, object], dict[str, GgufTensor]]:
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


def check_experts(name: object, tensors: Iterable[str]) -> None:
    """Raise `UnsupportedModelError` if no layer has a router.

    Args:
        name: ``general.architecture`` of the file.
        tensors: names of its tensors, with or without their layer's.
    """
    if not any(tensor.endswith("ffn_gate_inp.weight") for tensor in tensors):
        raise UnsupportedModelError(
            "none of its layers has experts (tensors ffn_gate_inp and ffn_down_exps), and dense "
            f"models of architecture {name} are not supported"
        )
