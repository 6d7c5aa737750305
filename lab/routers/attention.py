"""Attention of the laboratory's model, also over the router scores of earlier tokens.

Routing by neighbours keeps keys, and scores as values, in further layers of the usual KV cache and
reads them by the usual attention, so an engine serves it without knowing it.
Legend: B sequences, S tokens of each, H hidden, E experts, A heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from lab.routers.configuration import LabConfig

_SIMILARITY_SIZE = 32


class CachedAttention(nn.Module):
    """Attention over a layer of the cache.

    Args:
        layer_idx: of the cache; beyond the decoder's own layers for what is not attention.
    """

    def __init__(self, config: LabConfig, layer_idx: int, groups: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_key_value_groups, self.is_causal = groups, True

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, cache: Cache | None
    ) -> Tensor:
        """``(B, S, A, Dv)`` of queries ``(B, A, S, D)`` and new keys and values."""
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output: Tensor = run(
            self, query, key, value, mask, dropout=0.0, scaling=query.shape[-1] ** -0.5
        )[0]
        return output


class LabAttention(CachedAttention):
    """Grouped queries with normed heads and rotary positions; gives its queries and keys too."""

    def __init__(self, config: LabConfig, layer_idx: int) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        super().__init__(config, layer_idx, heads // kv_heads)
        size, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)
        self.q_norm = Qwen3MoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3MoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        positions: tuple[Tensor, Tensor],
        mask: Any,
        cache: Cache | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """``(B, S, H)``, and the queries and keys of the new tokens."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *positions)
        output = self.attend(query, key, value, mask, cache)
        return self.o_proj(output.flatten(2)), (query, key)


class Neighbours(CachedAttention):
    """Averages the scores of earlier tokens, by similarity of rows or by the heads of a layer."""

    def __init__(self, config: LabConfig, layer_idx: int) -> None:
        similar = config.neighbours == "similarity"
        kv_heads = 1 if similar else config.num_key_value_heads
        heads = 1 if similar else config.num_attention_heads
        super().__init__(config, config.num_hidden_layers + layer_idx, heads // kv_heads)
        if similar:
            self.query = nn.Linear(config.hidden_size, _SIMILARITY_SIZE, bias=False)
            self.key = nn.Linear(config.hidden_size, _SIMILARITY_SIZE, bias=False)
        else:
            self.heads = nn.Parameter(torch.zeros(heads))

    def forward(
        self, scores: Tensor, rows: Tensor, given: tuple[Tensor, Tensor], mask: Any,
        cache: Cache | None,
    ) -> Tensor:  # fmt: skip
        """``(B * S, E)`` of scores ``(B * S, E)`` and rows ``(B, S, H)``.

        Args:
            given: queries and keys of the layer's attention.
        """
        if self.config.neighbours == "similarity":
            query, key = (part(rows)[:, None] for part in (self.query, self.key))
            shares = torch.ones(1, device=rows.device)
        else:
            (query, key), shares = given, self.heads.softmax(0)
        value = scores.to(rows.dtype).view(*rows.shape[:2], -1)
        value = value[:, None].expand(-1, key.shape[1], -1, -1)
        mixed = self.attend(query, key, value, mask, cache)
        return (mixed.float() * shares[:, None]).sum(2).flatten(0, 1)
