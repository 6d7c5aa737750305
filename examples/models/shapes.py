"""Shapes of the MoE models that people run, as configurations without weights.

`SHAPES` has them by their names on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

CLASS = "the defaults of its class in transformers, which are this model's"
CARD = "published figures, not compared with config.json"


@dataclass(frozen=True)
class Shape:
    """The published shape of a model.

    Attributes:
        model_type: of its configuration in transformers.
        billions: parameters, as its card says.
        source: of the figures.
        sizes: what differs from the defaults of its configuration.
        bits: of a weight of an expert as it is published.
    """

    model_type: str
    billions: float
    source: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    bits: int = 16

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration, in bfloat16."""
        config = AutoConfig.for_model(self.model_type, **self.sizes)
        config.dtype = "bfloat16"
        return config


def _every(layers: int, step: int, one: str, others: str) -> list[str]:
    """Each ``step``-th layer is ``one``."""
    return [others if (at + 1) % step else one for at in range(layers)]


_QWEN3 = {
    "vocab_size": 151_936, "max_position_embeddings": 262_144, "num_experts": 128,
    "num_experts_per_tok": 8, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
_GRANITE_ATTENTION = (5, 15, 25, 35)
_LFM2_ATTENTION = (2, 6, 10, 14, 18, 21)

SHAPES: dict[str, Shape] = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Shape(
        "qwen3_moe", 30.5, CARD,
        _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                  "num_attention_heads": 32, "moe_intermediate_size": 768},
    ),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": Shape(
        "qwen3_moe", 235, CARD,
        _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
                  "num_attention_heads": 64, "moe_intermediate_size": 1536},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Shape(
        "qwen3_next", 80, CARD,
        {"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48,
         "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
         "num_experts_per_tok": 10, "max_position_embeddings": 262_144},
    ),
    "Qwen/Qwen3.6-35B-A3B": Shape(
        "qwen3_5_moe_text", 35, CLASS, {"max_position_embeddings": 262_144}
    ),
    "Qwen/Qwen3.8-Flash-Next": Shape(
        "qwen4_exp_text", 176,
        "its card: 48 layers, 512 experts, 10 a token, 32 heads for 2, attention in 12 layers, "
        "125 B beside an n-gram table of 320,001,536 rows of 160; the widths are those that give "
        "125 B",
        {"hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 640,
         "shared_expert_intermediate_size": 640, "num_experts": 512, "num_experts_per_tok": 10,
         "max_position_embeddings": 262_144, "ple_layer_ids": [1], "eos_token_id": 248_046,
         "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128,
         "indexer_budget": 2048, "indexer_compress_ratio": 4,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                             "partial_rotary_factor": 0.25}},
    ),
    "openai/gpt-oss-20b": Shape(
        "gpt_oss", 21, CARD, {"num_hidden_layers": 24, "num_local_experts": 32}, bits=4
    ),
    "openai/gpt-oss-120b": Shape("gpt_oss", 117, CLASS, bits=4),
    "zai-org/GLM-4.5-Air": Shape("glm4_moe", 106, CARD, {"head_dim": 128}),
    "zai-org/GLM-4.7": Shape(
        "glm4_moe", 355, CARD,
        {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92,
         "moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3,
         "use_qk_norm": True, "max_position_embeddings": 202_752, "head_dim": 128},
    ),
    "zai-org/GLM-5": Shape("glm_moe_dsa", 744, CLASS),
    "deepseek-ai/DeepSeek-V3": Shape("deepseek_v3", 671, CLASS, bits=8),
    "deepseek-ai/DeepSeek-V3.2": Shape("deepseek_v32", 671, CLASS, bits=8),
    "deepseek-ai/DeepSeek-V4-Flash": Shape("deepseek_v4", 284, CLASS, bits=4),
    "moonshotai/Kimi-K2-Instruct": Shape(
        "deepseek_v3", 1026, CARD,
        {"vocab_size": 163_840, "n_routed_experts": 384, "num_attention_heads": 64,
         "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
         "max_position_embeddings": 131_072},
        bits=8,
    ),
    "MiniMaxAI/MiniMax-M2": Shape("minimax_m2", 230, CLASS, bits=8),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Shape("llama4_text", 108, CLASS),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Shape(
        "mixtral", 46.7, CARD, {"max_position_embeddings": 32_768, "sliding_window": None}
    ),
    "allenai/OLMoE-1B-7B-0924": Shape("olmoe", 6.9, CARD, {"intermediate_size": 1024}),
    "ibm-granite/granite-4.0-h-small": Shape(
        "granitemoehybrid", 32, CARD,
        {"vocab_size": 100_352, "hidden_size": 4096, "intermediate_size": 768,
         "shared_intermediate_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10,
         "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
         "max_position_embeddings": 131_072, "tie_word_embeddings": True,
         "layer_types": [
             "attention" if at in _GRANITE_ATTENTION else "mamba" for at in range(40)
         ]},
    ),
    "LiquidAI/LFM2-8B-A1B": Shape(
        "lfm2_moe", 8.3, CARD,
        {"num_hidden_layers": 24,
         "layer_types": [
             "full_attention" if at in _LFM2_ATTENTION else "conv" for at in range(24)
         ]},
    ),
    "google/gemma-4-26B-A4B-it": Shape(
        "gemma4_text", 25.2, CARD,
        {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
         "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
         "sliding_window": 1024, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
         "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
         "max_position_embeddings": 262_144,
         "layer_types": _every(30, 6, "full_attention", "sliding_attention")},
    ),
}  # fmt: skip
"""By the name on the hub."""
