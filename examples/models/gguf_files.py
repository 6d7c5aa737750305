"""GGUF files of small models in memory, as llama.cpp's own converter lays them out.

Names and layouts are written down here, not taken from the ``gguf`` package's table, so that what
reads such files is tested against them: stacked experts, gate and up apart, queries and keys of
Mixtral in pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

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
ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
OWN_NAMES = {
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "qwen2_moe": {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    },
}
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
) -> None:
    """The model as a GGUF file, or (`parts` > 1) as a split one, of which `out` is the stem.

    Args:
        kind: of matrices; vectors and routers stay in float32, as llama.cpp's do.
        vocabulary: parsed tokenizer.json of a byte-level BPE, if any.
    """
    name = model.config.model_type
    tensors = dict(_tensors(model))
    each = -(-len(tensors) // parts)
    most = each if parts > 1 else 0
    writer = gguf.GGUFWriter(out, ARCHITECTURES[name], split_max_tensors=most)
    write_keys(writer, model.config)
    if vocabulary is not None:
        _write_tokenizer(writer, vocabulary, SPLITS_OF_TEXT.get(name, "qwen2"))
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
    return len(shape) == 1 or "ffn_gate_inp" in name


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


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    state, config = model.state_dict(), model.config
    names = NAMES | OWN_NAMES.get(config.model_type, {})
    if config.model_type == "gpt_oss":
        del names["ffn_norm"]
    found = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        own, block = f"model.layers.{layer}.", f"blk.{layer}."
        for theirs, ours in names.items():
            for leaf in ("weight", "bias"):
                if (value := state.get(f"{own}{ours}.{leaf}")) is not None:
                    found[f"{block}{theirs}.{leaf}"] = value
        if config.model_type == "mixtral":
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            for theirs, count in heads.items():
                halves = found[f"{block}{theirs}.weight"].unflatten(0, (count, 2, -1))
                found[f"{block}{theirs}.weight"] = halves.transpose(1, 2).flatten(0, 2)
        if config.model_type == "qwen2_moe":
            found[f"{block}ffn_gate_inp_shexp.weight"] = found[
                f"{block}ffn_gate_inp_shexp.weight"
            ].squeeze(0)
        if (sinks := state.get(f"{own}self_attn.sinks")) is not None:
            found[f"{block}attn_sinks.weight"] = sinks
        if (bias := state.get(f"{own}mlp.e_score_correction_bias")) is not None:
            found[f"{block}exp_probs_b.bias"] = bias
        found |= _experts(state, f"{own}mlp.experts.", f"{block}ffn_")
    return found


def _experts(state: dict[str, Tensor], own: str, block: str) -> dict[str, Tensor]:
    both, down = state[f"{own}gate_up_proj"], state[f"{own}down_proj"]
    if f"{own}gate_up_proj_bias" not in state:
        gate, up = both.chunk(2, dim=1)
        parts = {"gate": gate, "up": up, "down": down}
        return {f"{block}{part}_exps.weight": value for part, value in parts.items()}
    bias = state[f"{own}gate_up_proj_bias"]
    return {
        f"{block}gate_exps.weight": both[..., ::2].mT,
        f"{block}up_exps.weight": both[..., 1::2].mT,
        f"{block}down_exps.weight": down.mT,
        f"{block}gate_exps.bias": bias[:, ::2],
        f"{block}up_exps.bias": bias[:, 1::2],
        f"{block}down_exps.bias": state[f"{own}down_proj_bias"],
    }


def write_keys(writer: Any, config: Any) -> None:
    """What llama.cpp must know of a model beside its tensors and its tokenizer."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(
        config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
    )
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "minimax_m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


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
