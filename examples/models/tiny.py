"""A tiny random model of every MoE causal LM that the installed transformers knows.

Sizes are set by the field's usual configuration names; the few architectures whose configuration
needs something of its own say so in `SPECIFIC`. Nothing in the engine depends on this list.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

TINY: dict[str, Any] = {
    "vocab_size": 128, "unpadded_vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "moe_intermediate_size": 24, "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24, "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "share_expert_dim": 24, "moe_hidden_size": 48,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_top_k": 2, "moe_topk": 2, "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "num_expert_group": 2,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "sliding_window": 6, "attention_chunk_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "linear_num_heads": 4, "linear_head_dim": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "mamba_dt_rank": 4,
    "index_topk": 4, "index_n_heads": 8, "index_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 8, "kv_channels": 16,
    "o_lora_rank": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Values for every configuration that has the name; others are left out.

Eight indexer heads, because scores of fewer are often all zero: which of equal scores a sparse
indexer takes differs between one long pass and steps, in transformers itself.
"""

LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
"""Latent attention (MLA): rotary tables have the size of the rotary part, all heads have keys."""

OTHERS: dict[str, Any] = {
    "hidden_size": 16, "d_model": 16, "intermediate_size": 24, "encoder_ffn_dim": 24,
    "moe_intermediate_size": 8, "num_hidden_layers": 1, "depth": 1, "n_layers": 1,
    "encoder_layers": 1, "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2,
    "encoder_attention_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
    "image_size": 28, "out_hidden_size": 32, "text_hidden_size": 32, "output_dim": 32,
    "adapter_in_dim": 16, "adapter_input_size": 16, "adapter_out_dim": 32,
    "projector_hidden_size": 24, "projection_hidden_dim": 24, "projection_hidden_size": 16,
    "projection_intermediate_size": 24, "downsample_hidden_size": 8, "conv_output_size": 16,
    "merged_hidden_size": 96, "vision_hidden_size": 16, "vision_output_dim": 16,
    "projector_input_dim": 16, "projector_output_dim": 16, "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
}  # fmt: skip
"""The same for the parts of a multimodal model that are no text, and for what joins them."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

SPECIFIC: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2,
        },
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16,
        "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8, "shared_experts_intermediate_size": 24,
    },
    "deepseek_v4": {
        "compress_rates": {
            "compressed_sparse_attention": 4, "heavily_compressed_attention": 10,
        },
    },
    "inkling_text": {"rel_extent": 12, "log_scaling_n_floor": 8, "sliding_window_size": 6},
    "inkling2_text": {"rel_extent": 8, "log_scaling_n_floor": 16, "sliding_window_size": 6},
    "inkling2_loop_text": {
        "rel_extent": 8, "log_scaling_n_floor": 16, "sliding_window_size": 6,
        "num_hidden_layers": 5, "layer_types": ["hybrid_sliding", "hybrid"] * 2 + ["hybrid"],
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 2, "loop_layer_index_end": 4,
        "loop_num_passes": 3, "loop_gate_rank": 8,
    },
    "doge": {"is_moe": True, "num_experts": 16},
    "llama4_text": {"intermediate_size_mlp": 40, "moe_layers": [1, 3], "num_experts_per_tok": 1},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"n_groups": 2, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 12, "ple_layer_ids": [1, 3],
        "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 61,
    },
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    "zaya": {"num_experts_per_tok": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "glm4v_moe_text": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        },
    },
    "glm5_next_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "index_kpool": 2,
        "index_topk": 8, "qk_rope_head_dim": 0, "head_dim": 0, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "linear_num_heads": 4, "linear_head_dim": 8,
    },
    "muse_spark_audio": {"num_hidden_layers": 4, "patch_sizes": [16, 6, 5, 4]},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "qwen3_vl_moe_text": {"sliding_window": None},
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"swiglu_limits": [0, 0, 0, 0.5], "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 3]},
    "gemma4_text": {
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
        "enable_moe_block": True,
    },
}  # fmt: skip
"""What single architectures need on top of `TINY`."""


def moe_architectures() -> list[str]:
    """Model types whose causal LM has routed experts, judged by the source of its modeling file.

    Multimodal configurations are left out where their text part is a model type of its own.
    """
    names = set()
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        if "text_config" in config_class.sub_configs:
            continue
        source = inspect.getsource(sys.modules[model_class.__module__])
        if re.search(r"use_experts_implementation|class \w+(Experts|MoE|Moe|MOE)\b", source):
            names.add(config_class.model_type)
    return sorted(names)


def composite_architectures() -> list[str]:
    """Model types of multimodal configurations whose text part has routed experts."""
    names = []
    for model_type in CONFIG_MAPPING:
        if "text_config" not in CONFIG_MAPPING[model_type].sub_configs:
            continue
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # without values for a subconfiguration that it must have
            continue
        text = config.get_text_config(decoder=True).to_dict()
        reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if reads_images and any(name in text for name in EXPERT_COUNTS):
            names.append(model_type)
    return sorted(names)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of the architecture with small sizes and every kind of layer it has."""
    config = CONFIG_MAPPING[model_type]()
    if "text_config" in config.sub_configs:
        return CONFIG_MAPPING[model_type](**_composite_values(config))
    return CONFIG_MAPPING[model_type](**_text_values(config))


def _text_values(config: PreTrainedConfig) -> dict[str, Any]:
    default = config.to_dict()
    values = _small(default, TINY)
    if "kv_lora_rank" in default:
        values |= LATENT
    return values | SPECIFIC.get(config.model_type, {})


def _composite_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Of the text part as of a text model, small ones of all others; ids of images and sounds are
    behind the vocabulary."""
    values = _small({k: v for k, v in config.to_dict().items() if k not in TINY}, OTHERS)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            small = _text_values(part) if name == "text_config" else _composite_values(part)
            values[name] = small | {"model_type": part.model_type}
            if name != "text_config":
                values[name] = _small(part.to_dict(), OTHERS) | values[name]
    marks = [name for name in config.to_dict() if re.search(r"_token_(id|index)$", name)]
    places = (name for name in marks if name not in TINY)
    values |= {name: TINY["vocab_size"] + place for place, name in enumerate(places)}
    return values | SPECIFIC.get(config.model_type, {})


def _small(default: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Values for all names that are there; of lists by layer, each kind in turn."""
    values = {name: value for name, value in sizes.items() if name in default}
    num_layers = default.get("num_hidden_layers")
    for name, value in default.items():
        if isinstance(value, list) and len(value) == num_layers and name not in sizes:
            kinds = list(dict.fromkeys(value))
            values[name] = [kinds[i % len(kinds)] for i in range(sizes["num_hidden_layers"])]
    return values


def _class_of(config: PreTrainedConfig) -> Any:
    """transformers' class that generates text; None if there is none."""
    kinds: tuple[Any, ...] = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    for kind in (*kinds, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in kind:
            found = kind[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def tiny_model(
    model_type: str, seed: int = 0, *, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """The architecture's model in float32 with random weights that make all parts matter.

    Args:
        config: None: `tiny_config`.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type) if config is None else config
    model_class = _class_of(config)
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.normal_(std=0.1)
    return model
