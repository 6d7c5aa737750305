"""GGUF files for llama.cpp, written with the ``gguf`` package: the same weights, or the same sizes.

A checkpoint of Qwen3-MoE is quantised by llama.cpp's own rules (Q8_0, Q4_0). A model that is too
large to be drawn in floats first gets random blocks, a matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
"""Tensors of a layer: llama.cpp's names and transformers'."""


def write_gguf(checkpoint: Path, kind: str, out: Path) -> None:
    """The Qwen3-MoE checkpoint in a folder as a GGUF file; norms and routers stay in float32."""
    import gguf
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint)
    quantized = gguf.GGMLQuantizationType[kind]
    unfinished = out.with_suffix(".unfinished")
    writer = _writer(config, unfinished)
    for name, tensor in _tensors(checkpoint, config):
        array = tensor.float().numpy()
        if _stays_whole(name, array.shape):
            writer.add_tensor(name, array)
        else:
            data = gguf.quants.quantize(array, quantized)
            writer.add_tensor(name, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)


def write_random_gguf(config: Any, kind: str, out: Path) -> None:
    """A file of this shape with random blocks, one matrix of one layer in memory at a time."""
    import gguf

    quantized = gguf.GGMLQuantizationType[kind]
    unfinished = out.with_suffix(".unfinished")
    writer = _writer(config, unfinished)
    shapes = dict(_shapes(config))
    rng = np.random.default_rng(30)
    sample = rng.normal(size=(1021, 1024)).astype(np.float32)  # rows of all widths begin elsewhere
    # With small embeddings attention drowns the token, and all tokens go to the same experts.
    embeddings, blocks = (gguf.quants.quantize(by * sample, quantized) for by in (1.0, 0.02))
    for name, shape in shapes.items():
        if _stays_whole(name, shape):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            packed = gguf.quants.quant_shape_to_byte_shape(shape, quantized)
            nbytes = int(np.prod(packed))
            writer.add_tensor_info(name, packed, np.dtype(np.uint8), nbytes, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        if not _stays_whole(name, shape):
            packed = gguf.quants.quant_shape_to_byte_shape(shape, quantized)
            source = embeddings if name.startswith("token_embd") else blocks
            writer.write_tensor_data(np.resize(source, packed))
        elif len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, dtype=np.float32))
        else:
            writer.write_tensor_data(rng.normal(scale=0.02, size=shape).astype(np.float32))
    writer.close()
    unfinished.rename(out)


def _stays_whole(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or "ffn_gate_inp" in name


def _writer(config: Any, out: Path) -> Any:
    import gguf

    writer = gguf.GGUFWriter(out, "qwen3moe")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    return writer


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


def _tensors(checkpoint: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under llama.cpp's names, experts of a layer in one."""
    from safetensors import safe_open

    where: dict[str, Any] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        handle = safe_open(file, framework="pt")
        where |= dict.fromkeys(handle.keys(), handle)

    def read(name: str) -> Tensor:
        tensor: Tensor = where[name].get_tensor(name)
        return tensor

    yield "token_embd.weight", read("model.embed_tokens.weight")
    yield "output_norm.weight", read("model.norm.weight")
    yield "output.weight", read("lm_head.weight")
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        for ours, theirs in NAMES.items():
            yield f"blk.{layer}.{ours}.weight", read(f"{at}{theirs}.weight")
        for part in ("gate", "up", "down"):
            experts = [
                read(f"{at}mlp.experts.{expert}.{part}_proj.weight")
                for expert in range(config.num_experts)
            ]
            yield f"blk.{layer}.ffn_{part}_exps.weight", torch.stack(experts)
