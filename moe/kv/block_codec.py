"""One block of keys and values as bytes: a file of `moe.kv.prefix_store`, and a part of what a
prefill server sends (`methods.prefill_apart`).

`encode_block` writes, in this order: `MAGIC`, the CRC-32 of all that follows and the length of the
layout (4 bytes each, little-endian), the 64 token ids (int64), the layout (JSON: of each layer its
key and bytes, form, heads, key size and value size), and each layer's rows. `decode_block` checks
all of it. Which model and which settings the bits belong to is for the caller to know.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from experts.safetensors_io import as_bytes
from kernels.cpu.kv import BLOCK
from moe.kv.layout import LayerKey, RowLayout, StoredBlock

MAGIC = b"MOEKV\x00\x00\x02"
"""The last byte is the version."""
_HEAD = len(MAGIC) + 4 + 4
_IDS = 8 * BLOCK


class BlockError(ValueError):
    """Bytes are no such block; the message says why, and follows the name of what has them."""


def encode_block(stored: StoredBlock, token_ids: Sequence[int]) -> list[bytes | memoryview]:
    """The parts of a block's bytes, to be written one after another.

    Args:
        token_ids: the 64 tokens.
    """
    assert len(token_ids) == BLOCK
    layers = zip(stored.layout.items(), stored.rows, strict=True)
    text = json.dumps([[key, rows.numel(), *own] for (key, own), rows in layers]).encode()
    parts: list[bytes | memoryview] = [np.asarray(token_ids, np.int64).tobytes(), text]
    parts += [as_bytes(rows) for rows in stored.rows]
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return [MAGIC + total.to_bytes(4, "little") + len(text).to_bytes(4, "little"), *parts]


def decode_block(content: bytes | memoryview, token_ids: Sequence[int]) -> StoredBlock:
    """Read what `encode_block` wrote. Raises `BlockError`.

    Args:
        token_ids: the tokens that it must be of.
    """
    content = memoryview(content)
    if content[: len(MAGIC)] != MAGIC:
        raise BlockError("is no block of this version")
    total, length = (int.from_bytes(content[at : at + 4], "little") for at in (8, 12))
    if zlib.crc32(content[_HEAD:]) != total or len(content) < _HEAD + _IDS:
        raise BlockError("is damaged")
    begin = _HEAD + _IDS
    if content[_HEAD:begin] != np.asarray(token_ids, np.int64).tobytes():
        raise BlockError("holds other tokens")
    try:
        layout, sizes = _layout(json.loads(bytes(content[begin : begin + length])))
        data = np.frombuffer(content, np.uint8, offset=begin + length)
        rows = torch.empty(len(data), dtype=torch.uint8)  # aligned, as kernels want it
        rows.numpy()[:] = data
        return StoredBlock(layout, list(rows.split_with_sizes(sizes)))
    except (ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise BlockError("has no layout") from error


def _layout(fields: Any) -> tuple[dict[LayerKey, RowLayout], list[int]]:
    layout: dict[LayerKey, RowLayout] = {}
    sizes = []
    for key, nbytes, form, *numbers in fields:
        name, number = key if isinstance(key, list) else ("", key)
        if not all(type(each) is int and each >= 0 for each in (number, nbytes, *numbers)):
            raise ValueError("a number is none")
        layer = (str(name), number) if name else number
        if layer in layout:
            raise ValueError("a layer is there twice")
        layout[layer] = RowLayout(str(form), *numbers)
        sizes.append(nbytes)
    return layout, sizes
