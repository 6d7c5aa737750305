"""The laboratory's model: transformers' own parts around a router that is a choice.

Experts dispatch through transformers' registry as any architecture's do, so the engine takes them
over without knowing this one. Legend: B sequences, S tokens of each, H hidden, K slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeMLP,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
)

from lab.routers.attention import LabAttention, Neighbours
from lab.routers.configuration import LabConfig
from lab.routers.router import LabRouter
from moe.network.own_cache import CACHE_ARGUMENT

Decision = tuple[Tensor, Tensor]
"""Weights and ids ``(B * S, K)``."""


class LabFeedForward(nn.Module):
    """Routed experts, and the router where it is the layer's own."""

    def __init__(self, config: LabConfig, layer_idx: int) -> None:
        super().__init__()
        self.experts = Qwen3MoeExperts(config)
        self.gate = LabRouter(config) if config.router_reads != "model" else None
        self.neighbours = None
        if config.neighbours != "none":
            self.neighbours = Neighbours(config, layer_idx)

    def forward(self, hidden_states: Tensor, decision: Decision | None = None) -> Tensor:
        """Args:
        decision: of a router that has read something else.
        """
        rows = hidden_states.flatten(0, 1)
        if decision is None:
            assert self.gate is not None
            decision = self.gate(rows)[1:]
        weights, ids = decision
        output: Tensor = self.experts(rows, ids, weights)
        return output.view_as(hidden_states)


class LabLayer(GradientCheckpointingLayer):
    def __init__(self, config: LabConfig, layer_idx: int) -> None:
        super().__init__()
        self.early = config.router_reads == "block"
        self.self_attn = LabAttention(config, layer_idx)
        self.mlp = LabFeedForward(config, layer_idx)
        self.input_layernorm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, positions: tuple[Tensor, Tensor], mask: Any,
        cache: Cache | None, decision: Decision | None,
    ) -> Tensor:  # fmt: skip
        entered = self.input_layernorm(hidden_states)
        attended, heads = self.self_attn(entered, positions, mask, cache)
        hidden_states = hidden_states + attended
        rows = self.post_attention_layernorm(hidden_states)
        read, gate, neighbours = entered if self.early else rows, self.mlp.gate, self.mlp.neighbours
        if gate is not None and (self.early or neighbours is not None):
            mix = None
            if neighbours is not None:
                mix = lambda scores: neighbours(scores, read, heads, mask, cache)  # noqa: E731
            decision = gate(read.flatten(0, 1), mix)[1:]
        output: Tensor = hidden_states + self.mlp(rows, decision)
        return output


class ModelRouter(nn.Module):
    """One decision for all layers: a block of its own on the embeddings, then a router."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        self.attention = LabAttention(config, config.num_hidden_layers)
        self.mlp = Qwen3MoeMLP(config, intermediate_size=2 * config.hidden_size)
        self.norms = nn.ModuleList(
            [Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        )
        self.gate = LabRouter(config)

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Any, cache: Cache | None
    ) -> Decision:
        first, second, last = self.norms
        x = x + self.attention(first(x), positions, mask, cache)[0]
        x = x + self.mlp(second(x))
        _, weights, ids = self.gate(last(x).flatten(0, 1))
        return weights, ids


class LabPreTrainedModel(PreTrainedModel):
    config: LabConfig
    config_class = LabConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["LabLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Qwen3MoeExperts):
            nn.init.normal_(module.gate_up_proj, std=std)
            nn.init.normal_(module.down_proj, std=std)
        elif isinstance(module, LabRouter):
            nn.init.normal_(module.weight, std=std)


class LabModel(LabPreTrainedModel):
    def __init__(self, config: LabConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LabLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3MoeRotaryEmbedding(config=config)
        self.router = ModelRouter(config) if config.router_reads == "model" else None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        # older releases of transformers call it so
        cache = kwargs.get("past_key_values") if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen)[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask,
            **{CACHE_ARGUMENT: cache}, position_ids=position_ids,
        )  # fmt: skip
        positions = self.rotary_emb(x, position_ids=position_ids)
        decision = None
        if self.router is not None:
            decision = self.router(x, positions, mask, cache)
        for layer in self.layers:
            x = layer(x, positions, mask, cache, decision)
        returned: dict[str, Any] = {CACHE_ARGUMENT: cache}
        return MoeModelOutputWithPast(last_hidden_state=self.norm(x), **returned)


class LabForCausalLM(LabPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LabConfig) -> None:
        super().__init__(config)
        self.model = LabModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        output = self.model(input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        returned: dict[str, Any] = {CACHE_ARGUMENT: getattr(output, CACHE_ARGUMENT)}
        return MoeCausalLMOutputWithPast(logits=logits, **returned)
