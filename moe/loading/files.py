"""Which files of a model directory hold its weights.

The index of a sharded checkpoint is no more to be trusted than the weights: its file names are
only opened through `experts.opening`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experts.header import HeaderError
from experts.opening import contained
from moe.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(path: Path, problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """The safetensors files to open, and the index's ``tensor -> file`` where there is one.

    ``model.safetensors`` alone, else what the index names, else every ``*.safetensors``: the order
    of `PreTrainedModel.from_pretrained`, but for the last.
    """
    try:
        present = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot list {path}: {error.strerror}") from error
    if SINGLE_NAME in present:
        return [SINGLE_NAME], {}
    if INDEX_NAME in present:
        weight_map = _read_index(path, problems)
        return sorted(set(weight_map.values())), weight_map
    names = [name for name in present if name.endswith(".safetensors")]
    if not names:
        raise CheckpointError(_no_weights(path, present))
    return names, {}


def _no_weights(path: Path, present: list[str]) -> str:
    pickles = [name for name in present if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{path} holds only pickle weights ({', '.join(pickles[:5])}), which can run code when "
            "opened and are never read here; re-save the model as safetensors "
            "(save_pretrained in transformers >= 5 does)"
        )
    return (
        f"no .safetensors file in {path}: expected {SINGLE_NAME} or {INDEX_NAME} with its shards "
        f"(found: {', '.join(present[:8]) or 'nothing'})"
    )


def _read_index(path: Path, problems: list[str]) -> dict[str, str]:
    index: Any = None
    try:
        index = json.loads(contained(path, INDEX_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, HeaderError) as error:
        problems.append(f"{INDEX_NAME}: cannot be read: {error}")
        return {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{INDEX_NAME}: has no weight_map (tensor name -> file name)")
        return {}
    for key, value in weight_map.items():
        if not isinstance(value, str):
            problems.append(f"{INDEX_NAME}: the file of tensor {key!r} is not a string")
    return {key: value for key, value in weight_map.items() if isinstance(value, str)}
