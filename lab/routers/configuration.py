"""Configuration of the laboratory's model: a Qwen3-MoE-like decoder whose router is a choice."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3MoeConfig


@strict
class LabConfig(Qwen3MoeConfig):
    """Every field of `Qwen3MoeConfig` means what it means there; ``norm_topk_prob`` renormalises.

    Attributes:
        head_dim: of queries and keys; 0: ``hidden_size / num_attention_heads``.
        router: what scores are made of and how many experts are taken: ``softmax`` and ``sigmoid``
            take the best ``num_experts_per_tok``, ``relu`` all with a positive logit (BlockFFN),
            ``sizes`` a big block, a small one, or none (Duo-LLM): the last expert is the small
            block, all others together are the big one.
        router_reads: ``experts``: the rows that the experts read; ``block``: what enters the layer,
            before its attention (SmallThinker); ``model``: a block of its own on the embeddings,
            once for all layers (Read-ME).
        selection_bias: the choice is by score + a bias that training balances.
        n_group, topk_group, group_score: groups that compete before their experts do; a group's
            score is its largest, or the sum of its two largest.
        neighbours: scores are mixed with those of earlier tokens, by ``similarity`` or by the
            ``attention`` of the same layer; ``none`` for each token alone.
        neighbour_share: of the mixture.
        sinkhorn_share: of training steps, in which a layer's choice comes from a balanced plan.
        sinkhorn_temperature: of that plan.
    """

    model_type = "moe_lab"
    base_model_tp_plan = {}  # noqa: RUF012
    base_model_ep_plan = {}  # noqa: RUF012
    base_model_pp_plan = {}  # noqa: RUF012

    head_dim: int = 0
    router: str = "softmax"
    router_reads: str = "experts"
    selection_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    neighbours: str = "none"
    neighbour_share: float = 0.5
    sinkhorn_share: float = 0.0
    sinkhorn_temperature: float = 0.5
    norm_topk_prob: bool = True

    CHOICES = {  # noqa: RUF012
        "router": ("softmax", "sigmoid", "relu", "sizes"),
        "router_reads": ("experts", "block", "model"),
        "neighbours": ("none", "similarity", "attention"),
        "group_score": ("max", "top2"),
    }

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not self.head_dim:
            self.head_dim = self.hidden_size // self.num_attention_heads
        for name, choices in self.CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}"
                )
        alone = self.router_reads == "model" or self.router not in ("softmax", "sigmoid")
        if self.neighbours != "none" and alone:
            raise ValueError(
                f"neighbours is {self.neighbours!r}: it needs router softmax or sigmoid, and "
                "router_reads experts or block; or set it to none"
            )
