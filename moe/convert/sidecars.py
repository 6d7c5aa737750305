"""The files of a store beside its experts: what a model directory has, and the trunk."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

from torch import nn

from experts.blobs import Entry, FileRecord, write_bytes, write_file
from experts.manifest import MANIFEST_NAME
from experts.opening import contained

COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*")
"""Configuration, tokenizer, chat template, licence."""

NOT_COPIED = ("*.safetensors.index.json", MANIFEST_NAME)


def copy_files(source: Path, target: Path) -> None:
    """Copy them. Raises OSError; links out of the directory raise `HeaderError`."""
    found = {file.name for pattern in COPIED for file in source.glob(pattern) if file.is_file()}
    for name in sorted(found):
        if not any(fnmatch(name, pattern) for pattern in NOT_COPIED):
            content = contained(source, name).read_bytes()
            if name == "config.json":
                content = _without_quantization(content)
            write_bytes(target / name, content)


def _without_quantization(config: bytes) -> bytes:
    """config.json without what it says of the checkpoint's own quantisation."""
    content = json.loads(config)
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    if not any("quantization_config" in part for part in parts):
        return config
    for part in parts:
        part.pop("quantization_config", None)
    return json.dumps(content, indent=2).encode()


def write_trunk(network: nn.Module, path: Path) -> FileRecord:
    """Everything of a network but its experts, in one file; tied tensors once. Raises OSError."""
    state = network.state_dict()
    first: dict[object, str] = {}
    for name, tensor in state.items():
        first.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else name, name)
    names = sorted(first.values(), key=lambda name: -state[name].itemsize)
    entries = [Entry(name, state[name].dtype, tuple(state[name].shape)) for name in names]
    return write_file(path, entries, (state[name] for name in names))
