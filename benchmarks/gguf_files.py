"""GGUF files for llama.cpp, written with the ``gguf`` package: the same weights, or the same sizes.

A checkpoint is quantised by llama.cpp's own rules (Q8_0, Q4_0). A Qwen3-MoE that is too large to be
drawn in floats first gets random blocks, a matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from examples.models.gguf_files import stays_whole, write_keys, write_model


def write_gguf(checkpoint: Path, kind: str, out: Path) -> None:
    """The checkpoint in a folder as a GGUF file; norms and routers stay in float32."""
    unfinished = out.with_suffix(".unfinished")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    write_model(model, unfinished, lambda _: kind)
    unfinished.rename(out)


def write_random_gguf(config: Any, kind: str, out: Path) -> None:
    """A file of this shape with random blocks, one matrix of one layer in memory at a time."""
    quantized = gguf.GGMLQuantizationType[kind]
    unfinished = out.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "qwen3moe")
    write_keys(writer, config)
    writer.add_tokenizer_model("no_vocab")
    shapes = dict(_shapes(config))
    rng = np.random.default_rng(30)
    sample = rng.normal(size=(1021, 1024)).astype(np.float32)  # rows of all widths begin elsewhere
    # With small embeddings attention drowns the token, and all tokens go to the same experts.
    embeddings, blocks = (gguf.quants.quantize(by * sample, quantized) for by in (1.0, 0.02))
    for name, shape in shapes.items():
        if stays_whole(name, shape):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            packed = gguf.quants.quant_shape_to_byte_shape(shape, quantized)
            nbytes = int(np.prod(packed))
            writer.add_tensor_info(name, packed, np.dtype(np.uint8), nbytes, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        if not stays_whole(name, shape):
            packed = gguf.quants.quant_shape_to_byte_shape(shape, quantized)
            source = embeddings if name.startswith("token_embd") else blocks
            writer.write_tensor_data(np.resize(source, packed))
        elif len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, dtype=np.float32))
        else:
            writer.write_tensor_data(rng.normal(scale=0.02, size=shape).astype(np.float32))
    writer.close()
    unfinished.rename(out)


def _shapes(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor under llama.cpp's names, and its shape."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    inner, experts = config.moe_intermediate_size, config.num_experts
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "ffn_norm": (hidden,),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": (experts, inner, hidden),
        "ffn_up_exps": (experts, inner, hidden),
        "ffn_down_exps": (experts, hidden, inner),
    }
    for index in range(config.num_hidden_layers):
        yield from ((f"blk.{index}.{name}.weight", shape) for name, shape in layer.items())
