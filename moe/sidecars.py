"""The files beside the weights of a model directory, which go along into a store."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

from experts.blobs import write_bytes
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
