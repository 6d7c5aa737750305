"""The routers of the laboratory: configuration and auxiliary losses of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True)
class Variant:
    """One router.

    Attributes:
        config: what differs from `BASE`.
        switch: weight of the Switch balance loss of each layer.
        bias: how the selection bias moves; ``dual`` shrinks its steps as 1 / t.
        bias_rate: of its steps; for ``dual`` the curvature.
        locality, chunk: weights of BlockFFN's losses.
        big_share: of tokens and layers that may have the big block.
    """

    config: dict[str, Any] = field(default_factory=dict)
    switch: float = 0.0
    bias: Literal["sign", "error", "dual"] | None = None
    bias_rate: float = 0.0
    locality: float = 0.0
    chunk: float = 0.0
    big_share: float | None = None


AUX = 0.01
BIASED = {"router": "sigmoid", "selection_bias": True}
RELU = {"router": "relu"}

VARIANTS: dict[str, Variant] = {
    "unbalanced": Variant(),
    "softmax": Variant(switch=AUX),
    "softmax-plain": Variant({"norm_topk_prob": False}, switch=AUX),
    "groups": Variant({"n_group": 4, "topk_group": 1}, switch=AUX),
    "sigmoid": Variant({"router": "sigmoid"}, switch=AUX),
    "bias": Variant(BIASED, bias="sign", bias_rate=1e-2),
    "bias-error": Variant(BIASED, bias="error", bias_rate=3e-2),
    "bias-dual": Variant(BIASED, bias="dual", bias_rate=2.0),
    "sinkhorn": Variant({"sinkhorn_share": 0.01}),
    "sinkhorn-often": Variant({"sinkhorn_share": 0.2}),
    "relu": Variant(RELU),
    "relu-local": Variant(RELU, locality=2e-3, chunk=0.02),
    "relu-local-weak": Variant(RELU, locality=5e-4, chunk=5e-3),
    "pre-attention": Variant({"router": "sigmoid", "router_reads": "block"}, switch=AUX),
    "pre-gated": Variant({"router_reads": "model"}, switch=AUX),
    "similarity": Variant({"neighbours": "similarity"}, switch=AUX),
    "attention": Variant({"neighbours": "attention"}, switch=AUX),
    "sizes": Variant({"router": "sizes", "num_experts": 9}, big_share=0.25),
}
