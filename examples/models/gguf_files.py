"""GGUF files of small models in memory, as llama.cpp's own converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from examples.models.gguf_rules import ARCHITECTURES, gguf_keys, gguf_tensors

SPLITS_OF_TEXT = {"gpt_oss": "gpt-4o", "mixtral": "llama-bpe"}
"""What the pre-tokenizer is called; the others' is qwen2."""

Kind = Callable[[str], str]
"""The type of a matrix of this name."""


def write_model(
    model: PreTrainedModel,
    out: Path,
    kind: Kind = lambda _: "F32",
    vocabulary: Any = None,
    parts: int = 1,
    split: str = "",
) -> None:
    """The model as a GGUF file, or (`parts` > 1) as a split one, of which `out` is the stem.

    Args:
        kind: of matrices; vectors and routers stay in float32, as llama.cpp's do.
        vocabulary: parsed tokenizer.json of a byte-level BPE, if any.
        split: llama.cpp's name of how its text is split.
    """
    name = model.config.model_type
    tensors = gguf_tensors(model)
    each = -(-len(tensors) // parts)
    most = each if parts > 1 else 0
    writer = gguf.GGUFWriter(out, ARCHITECTURES[name], split_max_tensors=most)
    write_keys(writer, model.config)
    if vocabulary is not None:
        _write_tokenizer(writer, vocabulary, split or SPLITS_OF_TEXT.get(name, "qwen2"))
    else:
        writer.add_tokenizer_model("no_vocab")
    for tensor, value in tensors.items():
        array = value.detach().float().contiguous().numpy()
        if stays_whole(tensor, array.shape):
            writer.add_tensor(tensor, array)
        else:
            type_ = gguf.GGMLQuantizationType[kind(tensor)]
            writer.add_tensor(tensor, blocks(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stays_whole(name: str, shape: tuple[int, ...]) -> bool:
    """As llama.cpp's converter and its quantiser leave small tensors in float32."""
    return len(shape) == 1 or any(
        part in name for part in ("ffn_gate_inp", "ssm_", "conv", "_norm")
    )


def blocks(array: NDArray[np.float32], kind: Any) -> NDArray[Any]:
    """Blocks of a type; random ones, around 0, where the package cannot quantise to it."""
    try:
        quantized: NDArray[Any] = gguf.quants.quantize(array, kind)
        return quantized
    except RuntimeError:  # the package cannot write this type
        return random_blocks(array.shape, kind, array.size)


def random_blocks(shape: tuple[int, ...], kind: Any, seed: int) -> NDArray[np.uint8]:
    """Blocks of weights around 0 that are about .03 in size, of a type with superblocks."""
    own, rng = RANDOM[kind.name], np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    packed = gguf.quant_shape_to_byte_shape(shape, kind)
    drawn = rng.integers(0, 256, (int(np.prod(packed)) // size, size), dtype=np.uint8)
    scales = rng.uniform(0.7 * own.scale, 1.3 * own.scale, len(drawn))
    for start, factor in own.halves:
        drawn[:, start : start + 2] = (factor * scales).astype(np.float16)[:, None].view(np.uint8)
    for to, source in own.minima:  # those of each group are its scale, times the middle code
        drawn[:, to] = drawn[:, source]
    for at in own.nibbles:
        drawn[:, at] = (drawn[:, at] & 15) * 17
    return drawn.reshape(packed)


@dataclass(frozen=True)
class RandomBlocks:
    """How random bytes become blocks of a type.

    Attributes:
        scale: what makes the weights .03 large.
        halves: where float16 scales are, and by how much more than that.
        minima: bytes of minima, and of the scales that they copy.
        nibbles: bytes that have a scale and the same minimum.
    """

    scale: float
    halves: tuple[tuple[int, float], ...] = ((0, 1.0),)
    minima: tuple[tuple[slice, slice], ...] = ()
    nibbles: tuple[slice, ...] = ()


_MINIMA = ((slice(8, 12), slice(4, 8)),)
RANDOM = {
    "Q2_K": RandomBlocks(3e-3, ((80, 1.0), (82, 1.5)), (), (slice(0, 16),)),
    "Q3_K": RandomBlocks(7e-4, ((108, 1.0),)),
    "Q4_K": RandomBlocks(2e-4, ((0, 1.0), (2, 7.5)), _MINIMA, (slice(12, 16),)),
    "Q5_K": RandomBlocks(1e-4, ((0, 1.0), (2, 15.5)), _MINIMA, (slice(12, 16),)),
    "Q6_K": RandomBlocks(2e-5, ((208, 1.0),)),
    "IQ4_NL": RandomBlocks(5e-4),
    "IQ4_XS": RandomBlocks(3e-5),
}
"""Types that the package decodes and cannot write."""


def write_keys(writer: Any, config: Any) -> None:
    """Return what llama.cpp must know of a model beside its tensors and its tokenizer."""
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in gguf_keys(config).items():
        kinds[type(value)](f"{ARCHITECTURES[config.model_type]}.{key}", value)


def _write_tokenizer(writer: Any, vocabulary: Any, split: str) -> None:
    tokens: dict[str, int] = dict(vocabulary["model"]["vocab"])
    special = {entry["id"] for entry in vocabulary["added_tokens"]}
    tokens |= {entry["content"]: entry["id"] for entry in vocabulary["added_tokens"]}
    ordered = sorted(tokens, key=lambda token: tokens[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(ordered)
    writer.add_token_types([3 if tokens[token] in special else 1 for token in ordered])
    merges = vocabulary["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
