"""ggml's types of tensors, by the optional package ``gguf``, imported when first needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.errors import UnsupportedModelError

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that torch has, too."""


def package() -> Any:
    """The ``gguf`` package; raises `UnsupportedModelError` where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModelError(
            "reading GGUF files wants the package gguf, which is not installed: "
            "pip install 'moe-inference[gguf]'"
        ) from error
    return gguf


def kind_name(kind: int) -> str:
    """What ggml calls a type."""
    return str(package().GGMLQuantizationType(kind).name)


def decode(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    """The numbers that blocks of a type stand for. Raises `RuntimeError` for some types."""
    gguf = package()
    with np.errstate(all="ignore"):  # what is not finite is found later, by name
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
    return np.ascontiguousarray(values, np.float32)
