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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "moe_intermediate_size": 24, "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24, "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
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
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "mamba_dt_rank": 4,
    "index_topk": 4, "index_n_heads": 8, "index_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Values for every configuration that has the name; others are left out.

Eight indexer heads, because scores of fewer are often all zero: which of equal scores a sparse
indexer takes differs between one long pass and steps, in transformers itself.
"""

LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
"""Latent attention (MLA): rotary tables have the size of the rotary part, all heads have keys."""

SPECIFIC: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"n_groups": 2, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
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


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of the architecture with small sizes and every kind of layer it has."""
    default = CONFIG_MAPPING[model_type]().to_dict()
    values = {name: value for name, value in TINY.items() if name in default}
    if "kv_lora_rank" in default:
        values |= LATENT
    num_layers = default.get("num_hidden_layers")
    for name, value in default.items():
        if isinstance(value, list) and len(value) == num_layers:
            kinds = list(dict.fromkeys(value))
            values[name] = [kinds[i % len(kinds)] for i in range(TINY["num_hidden_layers"])]
    return CONFIG_MAPPING[model_type](**values | SPECIFIC.get(model_type, {}))


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """The architecture's causal LM in float32 with random weights that make all parts matter."""
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.normal_(std=0.1)
    return model
