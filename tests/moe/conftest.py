"""What tests of models have in common."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from experts.layer_file import layer_entries
from experts.manifest import read_manifest, write_manifest
from experts.safetensors_io import write_file
from moe.commands.convert.convert import convert
from moe.settings import ModelSettings


@pytest.fixture(scope="session")
def store(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a store of 8 bits; tests share it and leave it as it is."""
    out = tmp_path_factory.mktemp("stores") / "store"
    return convert(tiny_checkpoint("qwen3_moe"), out, ModelSettings(expert_bits=8, group_size=32))


@pytest.fixture(scope="session")
def mixed_store(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts of 2, 3, 4 and 8 bits in turn; to be left as it is."""
    out = Path(shutil.copytree(store, tmp_path_factory.mktemp("stores") / "mixed"))
    manifest, files, layers = read_manifest(out), {}, []
    for index, layer in enumerate(manifest.layers):
        bits = tuple((2, 3, 4, 8)[(index + expert) % 4] for expert in range(layer.experts))
        record = layer.model_copy(update={"bits": bits})
        entries = layer_entries(index, record, 8, manifest.group_size)
        found = load_file(out / layer.file)
        tensors = [found[entry.name] for entry in entries]
        files[layer.file] = write_file(out / layer.file, entries, tensors)
        layers.append(record)
    update = {"layers": tuple(layers), "files": manifest.files | files}
    write_manifest(out, manifest.model_copy(update=update))
    return out
